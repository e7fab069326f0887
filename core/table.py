"""step 5's tables, from summary.json: for the terminal, for a file without colours, and for report.md."""

from dataclasses import dataclass

LEVELS = ("easy", "medium", "hard", "extra")


@dataclass
class Table:
    title: str
    header: list[str]
    rows: list[list[str]]


def served(summary: dict) -> str:
    """What a server's figures are of, in a sentence; empty for the run's own stages."""
    if not (server := summary.get("endpoint")):
        return ""
    return (
        f"{server['served_model']} at {server['url']}, asked with the rows of run {summary['run']}; {server['prompts']}"
    )


def tables(summary: dict) -> list[Table]:
    """How often each stage is right, and how it answers; then, where there is something in it, parts, turns, corrections, samples."""
    stages = summary["stages"]
    out = [_right(stages, summary["tests"]), _how(stages), _parts(stages)]
    if any(len(limits) > 1 for limits in summary.get("turns", {}).values()):
        out.append(_turns(summary["turns"]))
    if any(s["correction"] for s in stages.values()):
        out.append(_corrections(stages))
    if summary.get("samples"):
        out.append(_samples(summary["samples"]))
    return [table for table in out if table.rows]


def _right(stages: dict, tests: dict) -> Table:
    strict = any(s["strict"]["n"] for s in stages.values())
    header = ["stage", "n", "accuracy", "95 % interval", "vs before", *(["strict SQL"] if strict else [])]
    rows = []
    for name, s in stages.items():
        test = tests.get(name)
        rows.append(
            [
                name,
                f"{s['n']}" + (f" (+{s['undecided']} undecided)" if s["undecided"] else ""),
                share(s["accuracy"]),
                interval(s["interval"]),
                f"+{test['fixed']} -{test['broke']}, p={test['p']:.2g}" if test else "",
                *([share(s["strict"]["accuracy"])] if strict else []),
            ]
        )
    return Table("", header, rows)


def _how(stages: dict) -> Table:
    """Rows are measures, columns stages, as in the tables of parts: as wide as there are stages."""
    measures = {
        "queries that run": ("executable_rate", share),
        "format kept": ("format_rate", share),
        "turns": ("turns", number),
        "tool calls": ("tool_calls", number),
        "tool errors": ("tool_error_rate", share),
        "no tool call": ("no_tool_rate", share),
        "cut short": ("truncated_rate", share),
        "tokens written": ("tokens", number),
        "seconds in all": ("seconds", number),
        "tokens/s": ("tokens_per_second", number),
    }
    rows = [[name, *(text(s[key]) for s in stages.values())] for name, (key, text) in measures.items()]
    return Table("", ["episodes", *stages], rows)


def _parts(stages: dict) -> Table:
    rows = []
    for key, order in (("by_task", None), ("by_hardness", LEVELS)):
        names = sorted({n for s in stages.values() for n in s[key]})
        names.sort(key=lambda n: order.index(n) if order and n in order else 99)
        if len(names) > 1:
            rows += [[n, *(_of(s[key].get(n)) for s in stages.values())] for n in names]
    return Table("Accuracy by task and difficulty", ["part", *stages], rows)


def _turns(turns: dict[str, dict]) -> Table:
    limits = sorted({int(t) for found in turns.values() for t in found})
    names = ["no tool" if t == 0 else f"{t} turn{'s' if t > 1 else ''}" for t in limits]
    rows = [[stage, *(share(found[str(t)]["accuracy"]) for t in limits)] for stage, found in turns.items()]
    return Table("Accuracy by tool turns allowed", ["stage", *names], rows)


def _corrections(stages: dict) -> Table:
    header = ["stage", "first query right", "final answer right", "repaired", "spoiled"]
    rows = []
    for name, c in ((name, s["correction"]) for name, s in stages.items()):
        if c:
            rows.append([name, _of([c["first_correct"], c["n"]]), _of([c["final_correct"], c["n"]]),
                         _of([c["fixed"], c["n"] - c["first_correct"]]), _of([c["broke"], c["first_correct"]])])  # fmt: skip
    return Table("Self-correction (SQL): first query against final answer", header, rows)


def _samples(samples: dict[str, dict]) -> Table:
    sizes = sorted({int(k) for s in samples.values() for k in s["pass_at"]})
    header = ["stage", *(f"pass@{k}" for k in sizes), "majority vote", "95 % interval"]
    rows = []
    for name, s in samples.items():
        cells = [share(s["pass_at"].get(str(k))) for k in sizes]
        rows.append([name, *cells, share(s["majority"]["accuracy"]), interval(s["majority"]["interval"])])
    first = next(iter(samples.values()))
    return Table(f"{first['samples']} samples a question", header, rows)


def share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def interval(ends: list[float]) -> str:
    return f"{100 * ends[0]:.1f} - {100 * ends[1]:.1f} %"


def number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}" if value < 10 else f"{value:.0f}"


def _of(pair: list | None) -> str:
    return "-" if not pair or not pair[1] else f"{pair[0] / pair[1]:.0%} of {pair[1]}"


def markdown(found: list[Table]) -> str:
    parts = []
    for table in found:
        lines = ["| " + " | ".join(c) + " |" for c in [table.header, ["---"] * len(table.header), *table.rows]]
        parts.append((f"**{table.title}**\n\n" if table.title else "") + "\n".join(lines) + "\n")
    return "\n".join(parts)


def show(found: list[Table], title: str) -> None:
    """Ruled and coloured in a terminal, Markdown where the output goes to a file or a pipe."""
    from rich import box
    from rich.console import Console
    from rich.table import Table as Ruled

    console = Console()
    if not console.is_terminal:
        print(markdown(found), end="")
        return
    for n, table in enumerate(found):
        ruled = Ruled(
            title=table.title or (None if n else title), title_justify="left", title_style="bold", box=box.SIMPLE_HEAD
        )
        for i, name in enumerate(table.header):
            style = "bold" if name == "accuracy" else ""
            ruled.add_column(name, justify="right" if i else "left", style=style, no_wrap=not i)
        for row in table.rows:
            ruled.add_row(*row)
        console.print(ruled)

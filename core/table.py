"""step 5's tables, from summary.json: for the terminal, for a file without colours, and for report.md."""

from dataclasses import dataclass

LEVELS = ("easy", "medium", "hard", "extra")


@dataclass
class Table:
    title: str
    header: list[str]
    rows: list[list[str]]


def tables(summary: dict) -> list[Table]:
    """The comparison of the stages first; then, each only where there is something in it, the parts, turns, corrections, samples."""
    stages = summary["stages"]
    out = [_main(stages, summary["tests"]), _parts(stages)]
    if any(len(limits) > 1 for limits in summary.get("turns", {}).values()):
        out.append(_turns(summary["turns"]))
    if any(s["correction"] for s in stages.values()):
        out.append(_corrections(stages))
    if summary.get("samples"):
        out.append(_samples(summary["samples"]))
    return [table for table in out if table.rows]


def _main(stages: dict, tests: dict) -> Table:
    strict = any(s["strict"]["n"] for s in stages.values())
    header = ["stage", "n", "accuracy", "95 % interval", "vs stage before", *(["strict SQL"] if strict else [])]
    header += ["executable", "format", "tool calls", "tokens", "time"]
    rows = []
    for name, s in stages.items():
        test = tests.get(name)
        undecided = f" (+{s['undecided']} undecided)" if s["undecided"] else ""
        speed = "" if s["tokens_per_second"] is None else f", {s['tokens_per_second']:.0f} tok/s"
        rows.append(
            [
                name,
                f"{s['n']}{undecided}",
                share(s["accuracy"]),
                f"{s['interval'][0]:.1%} - {s['interval'][1]:.1%}",
                f"+{test['fixed']} -{test['broke']}, p={test['p']:.2g}" if test else "",
                *([share(s["strict"]["accuracy"])] if strict else []),
                share(s["executable_rate"]),
                share(s["format_rate"]),
                number(s["tool_calls"], 2),
                number(s["tokens"], 0),
                f"{s['seconds']:.0f} s{speed}",
            ]
        )
    return Table("", header, rows)


def _parts(stages: dict) -> Table:
    """Rows are tasks and levels, columns stages: as wide as there are stages."""
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
    rows = [[stage, *(_with_n(found.get(str(t))) for t in limits)] for stage, found in turns.items()]
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
        low, high = s["majority"]["interval"]
        cells = [share(s["pass_at"].get(str(k))) for k in sizes]
        rows.append([name, *cells, share(s["majority"]["accuracy"]), f"{low:.1%} - {high:.1%}"])
    first = next(iter(samples.values()))
    return Table(f"{first['samples']} samples a question", header, rows)


def share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _of(pair: list | None) -> str:
    return "-" if not pair or not pair[1] else f"{pair[0] / pair[1]:.0%} ({pair[0]} of {pair[1]})"


def _with_n(found: dict | None) -> str:
    return "-" if not found or not found["n"] else f"{found['accuracy']:.1%} ({found['correct']} of {found['n']})"


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
        ruled = Ruled(title=table.title or title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
        for i, name in enumerate(table.header):
            ruled.add_column(name, justify="right" if i else "left", style="bold" if n == 0 and i == 2 else "")
        for row in table.rows:
            ruled.add_row(*row)
        console.print(ruled)

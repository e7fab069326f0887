"""Two sets of verdicts on the same questions: paired statistics, for stages of one run and for two runs.

The difference of two paired shares has Newcombe's interval (1998, method 10): Wilson's intervals of the two shares, joined
by their correlation. Unlike a bootstrap it needs no random numbers, and it stays sensible where a stage is right or wrong
nearly always. The p is McNemar's exact test.
"""

import json
import math
import re
from dataclasses import dataclass
from pathlib import Path

from core.config import UserError
from core.evaluate import mcnemar, wilson

ORDER = ("base", "sft", "grpo")  # of the stages, where no summary says it
SETTINGS = {"prompt": "prompts", "max_turns": "turn limits", "database": "databases", "judge": "judges"}  # of a record
CHANGED_SHOWN = 10  # questions of each kind that the comparison lists


@dataclass
class Comparison:
    names: tuple[str, str]  # run and stage of A and of B
    shares: tuple[dict, dict]  # each: n, correct, interval
    test: dict  # of `paired`
    groups: list[tuple[str, str, dict]]  # kind, name, paired statistics
    changed: dict[str, list[tuple[str, str]]]  # fixed, broke -> (id, question)
    notes: list[str]


def read_lines(path: Path) -> list[dict]:
    """Rows of a JSON-lines file that may be growing: nothing if it is missing, a last line without its end is left out."""
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n")  # the last is empty where the file is whole
    rows = []
    for number, line in enumerate(lines, 1):
        try:
            rows += [json.loads(line)] if line else []
        except json.JSONDecodeError as error:
            if number < len(lines):
                raise UserError(f"{path}:{number} is not JSON ({error.msg}). Evaluate or train again") from error
    return rows


def by_stage(folder: Path) -> dict[str, dict[str, dict]]:
    """stage -> id -> record, from episodes.jsonl: greedy, at the turn limit that the table is made of, in its order."""
    greedy = [r for r in read_lines(folder / "episodes.jsonl") if not r.get("sample")]
    limits = {r.get("max_turns") for r in greedy}
    summary = read_summary(folder)
    usual = summary.get("max_turns")
    if usual not in limits and limits:  # no table yet: the most turns
        usual = max(limits, key=lambda t: -1 if t is None else t)
    out: dict[str, dict[str, dict]] = {}
    for record in greedy:
        if record.get("max_turns") == usual:
            out.setdefault(record["stage"], {})[record["id"]] = record
    order = [*summary.get("stages", {}), *ORDER]  # the lines stand as they were played, which a resume changes
    return {stage: out[stage] for stage in dict.fromkeys([*order, *out]) if stage in out}


def read_summary(folder: Path) -> dict:
    path = folder / "summary.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def find_run(name: str) -> tuple[Path, Path]:
    """(folder of the run, folder of its evaluation) from a run's name, its folder, or the folder of an evaluation."""
    for folder in (Path(name), Path("checkpoints") / name):
        if (folder / "episodes.jsonl").exists():
            return (folder.parent if re.match("eval(-|$)", folder.name) else folder), folder
        if folder.is_dir():
            return folder, folder / "eval"
    runs = sorted(p.name for p in Path("checkpoints").glob("*") if p.is_dir())
    raise UserError(
        f"no run '{name}': neither a folder nor under checkpoints/, which holds: {', '.join(runs) or 'nothing'}"
    )


def compare(a: str, b: str, stages: list[str]) -> Comparison:
    """Run `b` against run `a`; `stages`: none (the last of each), one for both, or one of each."""
    asked = [stages[0], stages[-1]] if stages else [None, None]
    (name_a, old), (name_b, new) = (_records(run, stage) for run, stage in zip((a, b), asked, strict=True))
    shared = [i for i in old if i in new]
    if not shared:
        raise UserError(
            f"{name_a} ({len(old)} questions) and {name_b} ({len(new)}) share no question, so nothing can be paired."
            " Evaluate both on the same split, with the same data.* and seed"
        )
    other = [i for i in shared if any(old[i].get(k) != new[i].get(k) for k in ("question", "gold", "task"))]
    if other:
        raise UserError(
            f"{len(other)} of the {len(shared)} ids that {name_a} and {name_b} share stand for different questions"
            f" (first: {other[0]}: {old[other[0]]['question']!r} and {new[other[0]]['question']!r}). The data were prepared"
            " differently: run step2_prepare_data.py with the same data.* and seed, then step5_eval.py for both"
        )
    notes = []
    if len(shared) < max(len(old), len(new)):
        notes.append(
            f"only the {len(shared)} shared questions are compared: {name_a} has {len(old)}, {name_b} {len(new)}"
        )
    old, new = {i: old[i] for i in shared}, {i: new[i] for i in shared}
    notes += [
        f"their {words} differ on {n} of the {len(shared)} questions{shown}, so the difference is not the model's alone"
        for words, n, shown in _different(old, new)
    ]
    undecided = sum(old[i]["correct"] is None or new[i]["correct"] is None for i in shared)
    if undecided:
        notes.append(f"{undecided} questions that were undecided in either are left out")
    return Comparison(
        names=(name_a, name_b),
        shares=(_share(old), _share(new)),
        test=paired(old, new),
        groups=_groups(old, new),
        changed={
            kind: [(i, new[i]["question"]) for i in shared if (old[i]["correct"], new[i]["correct"]) == pair]
            for kind, pair in {"fixed": (False, True), "broke": (True, False)}.items()
        },
        notes=notes,
    )


def _different(old: dict, new: dict) -> list[tuple[str, int, str]]:
    """(setting, on how many questions it differs, first of the two values); what a record does not say is left out."""
    found = []
    for key, words in SETTINGS.items():
        pairs = [(r.get(key), new[i].get(key)) for i, r in old.items()]
        pairs = [(a, b) for a, b in pairs if a != b and None not in (a, b)]
        if pairs:
            a, b = pairs[0]
            shown = (
                f" ({a if a != '' else 'none'} and {b if b != '' else 'none'})" if key in ("max_turns", "judge") else ""
            )
            found.append((words, len(pairs), shown))
    return found


def _records(run: str, stage: str | None) -> tuple[str, dict[str, dict]]:
    run_dir, folder = find_run(run)
    stages = by_stage(folder)
    if not stages:
        raise UserError(f"{run_dir} has no evaluation ({folder}/episodes.jsonl). Run: python step5_eval.py --config R")
    stage = stage or list(stages)[-1]
    if stage not in stages:
        raise UserError(f"{run_dir} has no stage '{stage}' evaluated; there are: {', '.join(stages)}")
    return f"{run_dir.resolve().name} {stage}", stages[stage]


def _share(records: dict[str, dict]) -> dict:
    verdicts = [r["correct"] for r in records.values() if r["correct"] is not None]
    return {"n": len(verdicts), "correct": sum(verdicts), "interval": wilson(sum(verdicts), len(verdicts))}


def _groups(old: dict, new: dict) -> list[tuple[str, str, dict]]:
    out = []
    for kind in ("task", "hardness"):
        for name in sorted({r.get(kind) or "" for r in new.values()}):
            ids = [i for i, r in new.items() if (r.get(kind) or "") == name]
            out.append((kind, name, paired({i: old[i] for i in ids}, {i: new[i] for i in ids})))
    return out


def paired(old: dict[str, dict], new: dict[str, dict]) -> dict:
    """Questions decided in both: how many were fixed and broken, the exact p, the difference and its 95 % interval."""
    pairs = [(old[i]["correct"], r["correct"]) for i, r in new.items() if i in old]
    both = [(a, b) for a, b in pairs if a is not None and b is not None]
    test = mcnemar([{**r, "id": i} for i, r in old.items()], [{**r, "id": i} for i, r in new.items()])
    if not both:
        return {**test, "n": 0, "before": 0, "after": 0, "difference": None, "interval": None}
    before, after = sum(a for a, _ in both), sum(b for _, b in both)
    right = sum(a and b for a, b in both)
    interval = newcombe(right, test["broke"], test["fixed"], len(both) - right - test["broke"] - test["fixed"])
    return {
        **test,
        "n": len(both),
        "before": before,
        "after": after,
        "difference": (after - before) / len(both),
        "interval": interval,
    }


def newcombe(both: int, only_old: int, only_new: int, neither: int) -> list[float]:
    """95 % interval of share(new) - share(old) from the four counts of a paired table."""
    n = both + only_old + only_new + neither
    old, new = both + only_old, both + only_new
    (old_low, old_high), (new_low, new_high) = wilson(old, n), wilson(new, n)
    margins = old * (n - old) * new * (n - new)
    agreement = both * neither - only_old * only_new
    agreement = max(agreement - n / 2, 0) if agreement > 0 else agreement  # continuity correction, towards independence
    phi = agreement / math.sqrt(margins) if margins else 0.0

    def reach(a: float, b: float) -> float:
        return math.sqrt(max(0.0, a * a - 2 * phi * a * b + b * b))

    old, new = old / n, new / n
    return [new - old - reach(new - new_low, old_high - old), new - old + reach(new_high - new, old - old_low)]


# ------------------------------------------------------------------------------------------------------------ output


def tables(c: Comparison) -> list[tuple[list[str], list[list[str]]]]:
    """(header, rows) of the comparison and of its parts."""
    main = [
        [
            name,
            str(s["n"]),
            f"{s['correct'] / s['n']:.1%}" if s["n"] else "-",
            f"{s['interval'][0]:.1%} to {s['interval'][1]:.1%}",
        ]
        for name, s in zip(c.names, c.shares, strict=True)
    ]
    parts = [
        [
            name,
            str(t["n"]),
            f"{t['before'] / t['n']:.1%}",
            f"{t['after'] / t['n']:.1%}",
            _difference(t),
            f"+{t['fixed']} -{t['broke']}",
        ]
        for _, name, t in c.groups
        if t["n"]
    ]
    header = ["part", "n", *c.names, "difference, points", "fixed, broken"]
    return [(["run", "n", "accuracy", "95 % interval"], main), (header, parts)]


def _difference(test: dict) -> str:
    low, high = (100 * x for x in test["interval"])
    return f"{100 * test['difference']:+.1f} [{low:+.1f}, {high:+.1f}]"


def verdict(c: Comparison) -> str:
    if not c.test["n"]:
        return "no question was decided in both"
    clear = "" if c.test["p"] < 0.05 else ": no clear difference"
    return (f"{c.names[1]} against {c.names[0]}: {_difference(c.test)} points (95 %, Newcombe, paired) on {c.test['n']} questions; "
            f"{c.test['fixed']} fixed, {c.test['broke']} broken, McNemar's exact p = {c.test['p']:.3g}{clear}")  # fmt: skip


def changed_lines(c: Comparison) -> list[str]:
    lines = []
    for kind, word in (("fixed", "fixed"), ("broke", "broken")):
        found = c.changed[kind]
        if found:
            shown = f", the first {CHANGED_SHOWN}" if len(found) > CHANGED_SHOWN else ""
            lines += [
                f"{word} ({len(found)}{shown}):",
                *(f"- {i}: {' '.join(q.split())}" for i, q in found[:CHANGED_SHOWN]),
            ]
    return lines


def markdown(c: Comparison) -> str:
    parts = [f"# {c.names[0]} and {c.names[1]}", verdict(c), *(f"Note: {note}." for note in c.notes)]
    for header, rows in tables(c):
        parts.append("\n".join("| " + " | ".join(cells) + " |" for cells in [header, ["---"] * len(header), *rows]))
    return "\n\n".join([*parts, "\n".join(changed_lines(c))]).rstrip() + "\n"


def show(c: Comparison) -> None:
    """Ruled tables in a terminal, Markdown where the output goes to a file or a pipe."""
    from rich.console import Console
    from rich.table import Table

    console = Console()
    if not console.is_terminal:
        print(markdown(c), end="")
        return
    for header, rows in tables(c):
        ruled = Table()
        for i, name in enumerate(header):
            ruled.add_column(name, justify="right" if i else "left")
        for row in rows:
            ruled.add_row(*row)
        console.print(ruled)
    for line in [verdict(c), *(f"note: {note}" for note in c.notes), *changed_lines(c)]:
        console.print(line, markup=False, highlight=False)

"""From episodes to a table one can believe: accuracy with its interval, paired tests between stages, what went wrong.

Episodes are kept line by line as they finish (`episodes.jsonl`), so an interrupted evaluation goes on where it stopped.
"""

import json
import math
import statistics
import time
from collections.abc import Callable
from pathlib import Path

from core.rollout import Episode

KEPT = ("id", "task", "environment", "question", "gold", "db_id", "db_path", "hardness", "prompt", "facts")


def evaluate(
    stage: str,
    rows: list[dict],
    play: Callable,  # list[Episode] -> iterator of finished batches
    make_episode: Callable[[dict], Episode],
    judge: Callable[[list[dict], list[list[dict]]], list[dict]],  # rows, completions -> rewards by name
    primary: dict[str, str],  # environment -> the reward that means "correct"
    path: Path,
    say: Callable[[str], None] = print,
) -> list[dict]:
    """Play and judge every row that `path` does not hold yet; returns all records of the stage, in row order."""
    done = {r["id"]: r for r in _read_records(path) if r["stage"] == stage}
    todo = [row for row in rows if row["id"] not in done]
    if done:
        say(f"  {stage}: {len(rows) - len(todo)} of {len(rows)} episodes already in {path}")
    began, finished = time.time(), 0
    with open(path, "a", encoding="utf-8") as out:
        for batch in play([make_episode(row) for row in todo]) if todo else ():
            rewards = judge([e.row for e in batch], [e.completion for e in batch])
            for episode, scores in zip(batch, rewards, strict=True):
                record = _record(stage, episode, scores, primary[episode.row["environment"]])
                done[record["id"]] = record
                out.write(json.dumps(record, ensure_ascii=False) + "\n")
            out.flush()
            finished += len(batch)
            right = sum(r["correct"] is True for r in done.values())
            left = (time.time() - began) / finished * (len(todo) - finished)
            say(f"  {stage}: {len(done)}/{len(rows)} episodes, {right / len(done):.1%} correct, {left:.0f} s left")
    return [done[row["id"]] for row in rows]


def _read_records(path: Path) -> list[dict]:
    """Records already on disk; a last line cut by a crash is dropped, and the file with it made whole."""
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").splitlines()
    records = []
    for number, line in enumerate(lines):
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            if number != len(lines) - 1:
                raise
            path.write_text("".join(f"{x}\n" for x in lines[:-1]), encoding="utf-8")
    return records


def _record(stage: str, episode: Episode, rewards: dict, primary: str) -> dict:
    value = rewards[primary]
    calls = [m for m in episode.completion if m["role"] == "tool"]
    return {
        "stage": stage,
        **{key: episode.row[key] for key in KEPT if key in episode.row},
        "completion": episode.completion,
        "rewards": rewards,
        "correct": None if value is None else value >= 0.5 if primary == "medical_judge" else value == 1.0,
        "turns": episode.turns,
        "tool_calls": len(calls),
        "tool_errors": sum(m["content"].lower().startswith(("error", "{'error'")) for m in calls),
        "tokens": sum(episode.mask) or sum(len(m["content"]) // 4 for m in episode.completion),
        "truncated": episode.truncated,
        "seconds": round(episode.seconds, 3),
        "prompt_ids": episode.prompt_ids,
        "completion_ids": episode.completion_ids,
        "mask": episode.mask,
    }


def summarise(records: list[dict]) -> dict:
    """The figures of one stage."""
    judged = [r for r in records if r["correct"] is not None]
    right = sum(r["correct"] for r in judged)
    names = sorted({name for r in records for name in r["rewards"]})
    return {
        "n": len(judged),
        "undecided": len(records) - len(judged),
        "correct": right,
        "accuracy": right / len(judged) if judged else math.nan,
        "interval": wilson(right, len(judged)),
        "by_task": _accuracy_by(judged, "task"),
        "by_hardness": _accuracy_by(judged, "hardness"),
        "rewards": {n: _mean([r["rewards"].get(n) for r in records]) for n in names},
        "turns": _mean([r["turns"] for r in records]),
        "tool_calls": _mean([r["tool_calls"] for r in records]),
        "tool_error_rate": _mean([r["tool_errors"] / r["tool_calls"] for r in records if r["tool_calls"]]),
        "no_tool_rate": _mean([r["tool_calls"] == 0 for r in records]),
        "truncated_rate": _mean([r["truncated"] for r in records]),
        "tokens": _mean([r["tokens"] for r in records]),
        "seconds": round(sum(r["seconds"] for r in records), 1),
    }


def _mean(values: list) -> float | None:
    values = [v for v in values if v is not None]
    return statistics.fmean(values) if values else None


def _accuracy_by(judged: list[dict], key: str) -> dict[str, list]:
    groups: dict[str, list] = {}
    for record in judged:
        groups.setdefault(record[key], []).append(record["correct"])
    return {k: [sum(v), len(v)] for k, v in sorted(groups.items())}


def wilson(right: int, n: int, z: float = 1.959964) -> list[float]:
    """95 % interval of a share (Wilson): honest for small n and near 0 and 1."""
    if n == 0:
        return [0.0, 1.0]
    p, d = right / n, 1 + z * z / n
    half = z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n)) / d
    centre = (p + z * z / (2 * n)) / d
    return [max(0.0, centre - half), min(1.0, centre + half)]


def mcnemar(before: list[dict], after: list[dict]) -> dict:
    """Paired exact test on the same questions: how many a stage fixed, how many it broke, and the two-sided p."""
    was = {r["id"]: r["correct"] for r in before}
    pairs = [(was[r["id"]], r["correct"]) for r in after if r["id"] in was]
    fixed = sum(b is False and a is True for b, a in pairs)
    broke = sum(b is True and a is False for b, a in pairs)
    n = fixed + broke
    tail = sum(math.comb(n, k) for k in range(min(fixed, broke) + 1)) / 2**n
    return {"fixed": fixed, "broke": broke, "p": min(1.0, 2 * tail)}


def table_rows(stages: dict[str, dict], tests: dict[str, dict]) -> tuple[list[str], list[list[str]]]:
    """Header and cells of the comparison table, for the terminal and for Markdown."""
    tasks = sorted({t for s in stages.values() for t in s["by_task"]})
    levels = [h for h in ("easy", "medium", "hard", "extra") if any(h in s["by_hardness"] for s in stages.values())]
    header = ["stage", "n", "accuracy", "95 % interval", "vs stage before"]
    header += (tasks if len(tasks) > 1 else []) + levels + ["tool calls", "tool errors", "no tool", "tokens", "seconds"]
    rows = []
    for name, s in stages.items():
        test = tests.get(name)
        cells = [
            name,
            str(s["n"]),
            f"{s['accuracy']:.1%}",
            f"{s['interval'][0]:.1%} - {s['interval'][1]:.1%}",
            f"+{test['fixed']} -{test['broke']}, p={test['p']:.2g}" if test else "",
        ]
        cells += [_share(s["by_task"].get(t)) for t in (tasks if len(tasks) > 1 else [])]
        cells += [_share(s["by_hardness"].get(h)) for h in levels]
        errors = s["tool_error_rate"]
        cells += [f"{s['tool_calls']:.2f}", "-" if errors is None else f"{errors:.0%}", f"{s['no_tool_rate']:.0%}"]
        rows.append([*cells, f"{s['tokens']:.0f}", f"{s['seconds']:.0f}"])
    return header, rows


def _share(pair: list | None) -> str:
    return "-" if not pair or not pair[1] else f"{pair[0] / pair[1]:.0%} of {pair[1]}"


def markdown(header: list[str], rows: list[list[str]]) -> str:
    lines = ["| " + " | ".join(cells) + " |" for cells in [header, ["---"] * len(header), *rows]]
    return "\n".join(lines) + "\n"

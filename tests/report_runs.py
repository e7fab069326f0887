"""Run folders for the tests of the report: small, with what a finished run, a growing one and a hostile model leave behind."""

import json
import math
from pathlib import Path

SQL = "SELECT name, COUNT(*) AS n FROM ship WHERE kind = 'ferry' GROUP BY name LIMIT 3 -- three"
RESULT = "name | n\n'a | b' | 2\nBay Star | 1\n(2 rows)"


def episode(id_: str, stage: str, correct, **other) -> dict:
    call = {"type": "function", "function": {"name": "execute_sql", "arguments": {"query": SQL}}}
    record = {
        "stage": stage, "id": id_, "task": "mini_sql", "environment": "sql", "question": f"How many ferries of kind {id_}?",
        "gold": "SELECT COUNT(*) FROM ship", "db_id": "harbour", "hardness": "easy", "max_turns": 3, "sample": 0,
        "prompt": [{"role": "system", "content": "You answer questions."}, {"role": "user", "content": f"Question {id_}"}],
        "completion": [{"role": "assistant", "content": "", "tool_calls": [call]},
                       {"role": "tool", "name": "execute_sql", "content": RESULT},
                       {"role": "assistant", "content": "<think>short</think>The query above answers it."}],
        "rewards": {"exec_match": None if correct is None else float(correct), "sql_format": 1.0}, "correct": correct,
        "answer": SQL, "strict": correct, "first_correct": correct, "executes": True, "well_formed": True, "error": None,
        "turns": 2, "tool_calls": 1, "tool_errors": 0, "tokens": 30, "truncated": False, "seconds": 1.5,
        "prompt_ids": [1] * 50, "completion_ids": [2] * 45, "mask": [1] * 20 + [0] * 15 + [1] * 10,
    }  # fmt: skip
    return record | other


def write_lines(path: Path, rows: list[dict]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(r) + "\n" for r in rows), encoding="utf-8")


def write_episodes(run: Path, verdicts: dict[str, list], **other) -> Path:
    """One question for each verdict: write_episodes(run, {"sft": [True, False, None]})"""
    levels = ("easy", "medium", "hard", "extra")
    rows = [
        episode(
            f"dev-{i}", stage, correct, hardness=levels[i % 4], task="mini_math" if i % 3 == 0 else "mini_sql", **other
        )
        for stage, found in verdicts.items()
        for i, correct in enumerate(found)
    ]
    write_lines(run / "eval" / "episodes.jsonl", rows)
    return run


def write_curves(run: Path, steps: int = 60) -> Path:
    sft = [{"step": i, "time": 10.0 * i, "loss": 2 / i, "grad_norm": 0.5, "epoch": i / steps} for i in range(1, 11)]
    grpo = [
        {"step": i, "time": 30.0 * i, "reward": math.tanh(i / steps), "rewards/exec_match/mean": 0.1, "kl": 0.01 * i,
         "rewards/math_accuracy/mean": None if i % 5 == 0 else 0.5, "tools/call_frequency": 1.2, "entropy": 1.0,
         "frac_reward_zero_std": 0.25, "step_time": 3.0, "own/measure": i}
        for i in range(1, steps + 1)
    ]  # fmt: skip
    write_lines(run / "sft" / "metrics.jsonl", sft + [{"step": 10, "time": 101.0, "eval_loss": 0.4}])
    write_lines(run / "grpo" / "metrics.jsonl", grpo)
    return run


def write_manifest(folder: Path, **other) -> None:
    recipe = {"run": "demo", "model": "org/model", "tasks": {"mini_sql": 0.5, "mini_math": 0.5}, "seed": 42}
    manifest = {"recipe": recipe, "seed": 42, "commit": "c0ffee" * 6, "dirty": True, "python": "3.11.7", "versions": {"torch": "2.13.0"},
                "device": "cpu (2 cores, x86_64)", "seconds": 517.4}  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "manifest.json").write_text(json.dumps(manifest | other))

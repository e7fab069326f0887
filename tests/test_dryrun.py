"""The dry run: what it checks, what it calls a problem, and the whole of it on a real model and a real server's answers."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from core.config import load_recipe
from core.dryrun import check_rows, findings, weighted

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    from tests.tiny_model import build_tiny_model

    home = tmp_path_factory.mktemp("memory")
    build_tiny_model(home / "tiny", home / "data" / "raw")
    run(home, ["step2_prepare_data.py"])
    return home


def run(home: Path, words: list[str], *more: str, code: int = 0) -> str:
    folders = ["--model", str(home / "tiny"), "--data_root", str(home / "data"), "--checkpoint_root", str(home / "ck")]
    env = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    words = [sys.executable, *words, "--config", "recipes/ci.yaml", *folders, *more]
    done = subprocess.run(words, cwd=ROOT, env=env, capture_output=True, text=True, timeout=600)
    out = done.stdout + done.stderr
    assert done.returncode == code and "Traceback" not in out, out[-3000:]
    return out


@pytest.fixture
def recipe():
    return load_recipe(ROOT / "recipes/ci.yaml")


def make_env(row):
    from envs import ENVIRONMENTS

    return ENVIRONMENTS[row["environment"]]()


def problems_of(recipe, *rows):
    import rewards
    from tasks.base import gold_episode

    return check_rows(recipe, list(rows), None, make_env, rewards, gold_episode)


def test_gold_of_every_environment_scores_one(recipe, sql_row, math_row, medical_row):
    from rewards import judge

    judge.use(judge.JudgeConfig())
    assert problems_of(recipe, sql_row, math_row, medical_row) == []


def test_rows_that_would_break_the_run(recipe, sql_row):
    broken = [
        (sql_row | {"id": "gone", "db_path": "no/such.sqlite"}, "no database no/such.sqlite"),
        (sql_row | {"id": "bad", "gold": "SELECT nme FROM customer"}, "gold scores"),
    ]
    recipe.grpo.rewards["kindness"] = 1.0
    first, *found = problems_of(recipe, sql_row, *(row for row, _ in broken))
    assert "kindness" in first
    assert len(found) == 2
    for problem, (row, text) in zip(found, broken, strict=True):
        assert problem.startswith(row["id"]) and text in problem


def test_time_on_a_cpu_is_that_of_the_rollouts_played(recipe, math_row, monkeypatch, capsys):
    """Not with a server, whose seconds are another machine's, nor for a GPU by name."""
    import argparse

    import rewards
    from core import dryrun
    from core.sizes import Device
    from tasks.base import call, gold_episode

    class Quick:
        def play(self, found):
            for n, e in enumerate(found):
                answer = "<answer>12</answer>" if n else "<answer>3</answer>"
                e.accept_message(call("calculator", {"expression": "1 + 1"}))
                e.accept_message({"role": "assistant", "content": answer})
            yield found

    monkeypatch.setattr(dryrun, "_open", lambda *_: (None, lambda temperature: Quick()))
    monkeypatch.setattr(dryrun, "device", lambda _: Device("cpu, 2 cores", 8.0, kind="cpu"))
    for endpoint in (None, "http://host:1/v1"):
        args = argparse.Namespace(gpu=None, endpoint=endpoint, served_model="m", dry_run_tasks=1)
        dryrun.dry_run(recipe, args, [math_row], make_env, rewards, gold_episode)
        out = capsys.readouterr().out
        assert ("as played here" in out) == (not endpoint) and "Calculated for this CPU" in out


def test_reward_is_grpos_sum(recipe):
    assert weighted(recipe, {"exec_match": 1.0, "sql_format": None, "executes": 1.0}) == 1.0  # executes: not in it


def record(total, **more):
    usual = {"total": total, "correct": total >= 1, "tool_calls": 1, "tool_errors": 0, "truncated": False}
    return usual | {"tokens": 50, "seconds": 0.1, "error": ""} | more


def test_what_episodes_say_about_the_run(recipe):
    said = []
    assert findings(recipe, [[record(1.0), record(0.0)], [record(0.1), record(0.1)]], said.append) == []
    assert (
        "1 of 4 correct" in said[0] and "1 of 2 groups of 2 have none" in said[1] and "groups of 4 have more" in said[1]
    )
    assert "no gradient" in findings(recipe, [[record(0.1)] * 2, [record(1.1)] * 2], said.append)[0]
    bad = [record(0.0, tool_calls=0, truncated=True), record(1.0, tool_calls=0, truncated=True)]
    assert ["calls a tool" in p or "cut off" in p for p in findings(recipe, [bad, bad], said.append)] == [True, True]
    down = [record(0.0, correct=None, error="server down"), record(1.0, correct=None, error="server down")]
    assert "server down" in findings(recipe, [down], said.append)[0]


@pytest.mark.slow
def test_tokens_of_a_servers_text_are_those_of_training(recipe, math_row, home):
    from core.chat import schemas_of
    from core.dryrun import shaded, tokens_of
    from core.models import load_tokenizer
    from envs import CalculatorEnv
    from tasks.base import gold_episode

    tokenizer, env = load_tokenizer(str(home / "tiny")), CalculatorEnv()
    completion = gold_episode(math_row, env)
    assert check_rows(recipe, [math_row], tokenizer, make_env, __import__("rewards"), gold_episode) == []
    served = {"completion": completion, "completion_ids": [], "mask": [], "prompt_ids": []}
    prompt, tokens = tokens_of(recipe, tokenizer, math_row, served, env)
    text = shaded(tokenizer, tokens, colour=False).plain
    assert text.count("«") == 2 and "«<tool_call>" in text and "<tool_response>\n2\n</tool_response>" in text
    assert "«" not in text[text.index("<tool_response>") : text.index("</tool_response>")]
    from core.chat import prompt_ids

    assert prompt == prompt_ids(tokenizer, math_row["prompt"], schemas_of(env))


@pytest.mark.slow
def test_whole_dry_run_on_a_random_model_refuses_the_run_and_writes_nothing(home):
    words = ["--dry_run", "--dry_run_tasks", "2", "--from_stage", "base", "--gpu", "3090"]
    before = sorted((home / "ck").rglob("*"))
    out = run(home, ["step4_grpo.py"], *words, code=1)
    assert (
        "gold scores 1.0" in out
        and out.count("sample 4:") == 2
        and "«" in out
        and "1 x exec_match 0.00 + 0.1 x sql_format" in out
    )
    assert "GRPO fits: peak" in out and "not measured on one" in out
    assert "the run would break" in out and "no gradient" in out
    assert sorted((home / "ck").rglob("*")) == before

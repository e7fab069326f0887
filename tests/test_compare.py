"""Paired statistics of two runs, against values that are known or counted out."""

import itertools
import json
import math
import shutil

import pytest

from core import compare as cmp
from core.config import UserError
from tests.report_runs import episode, write_episodes, write_lines


@pytest.mark.parametrize("counts", [(36, 2, 12, 0), (0, 0, 0, 20), (20, 0, 0, 0), (0, 10, 0, 0), (3, 5, 5, 3)])
def test_newcombe_mirrors_and_holds_the_difference(counts):
    both, old, new, neither = counts
    low, high = cmp.newcombe(*counts)
    assert -1 <= low <= (new - old) / sum(counts) <= high <= 1 and low < high
    assert cmp.newcombe(both, new, old, neither) == pytest.approx([-high, -low])


def test_newcombe_is_wald_where_wald_is_good():
    low, high = cmp.newcombe(400, 60, 120, 420)
    half = 1.96 * math.sqrt(60 + 120 - (120 - 60) ** 2 / 1000) / 1000
    assert [low, high] == pytest.approx([0.06 - half, 0.06 + half], abs=2e-3)


def test_newcombe_covers_what_it_promises():
    """Every possible table of 12 questions, weighted by its chance: the interval holds the true difference often enough."""
    n, chances = 12, (0.3, 0.1, 0.35, 0.25)
    truth, covered = chances[2] - chances[1], 0.0
    for a, b, c in itertools.product(range(n + 1), repeat=3):
        d = n - a - b - c
        if d >= 0:
            ways = math.factorial(n) // math.prod(map(math.factorial, (a, b, c, d)))
            low, high = cmp.newcombe(a, b, c, d)
            covered += (
                (low <= truth <= high) * ways * math.prod(p**k for p, k in zip(chances, (a, b, c, d), strict=True))
            )
    assert 0.93 < covered < 0.99


def test_compare_two_runs(tmp_path):
    a = write_episodes(tmp_path / "a", {"sft": [True] * 4 + [False] * 16})
    b = write_episodes(tmp_path / "b", {"base": [False] * 20, "sft": [False] + [True] * 15 + [None] + [False] * 3})
    c = cmp.compare(str(a), str(b / "eval"), [])
    assert c.names == ("a sft", "b sft") and c.shares[0]["correct"] == 4
    assert (c.test["n"], c.test["fixed"], c.test["broke"]) == (19, 12, 1) and c.test["difference"] == pytest.approx(
        11 / 19
    )
    assert c.notes == ["1 questions that were undecided in either are left out"]
    assert c.changed["broke"] == [("dev-0", "How many ferries of kind dev-0?")] and len(c.changed["fixed"]) == 12
    assert sum(t["fixed"] for kind, _, t in c.groups if kind == "hardness") == 12
    text = cmp.markdown(c)
    assert "| mini_math | 7 |" in text and "fixed (12, the first 10)" in text and "p = 0.00342" in text
    assert cmp.compare(str(b), str(b), ["base", "sft"]).test["fixed"] == 15


def test_errors_say_what_is_shared_and_what_to_do(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    a = write_episodes(tmp_path / "checkpoints" / "a", {"sft": [True] * 5})
    b = write_episodes(tmp_path / "checkpoints" / "b", {"sft": [True] * 3})
    assert cmp.compare("a", "b", []).notes == ["only the 3 shared questions are compared: a sft has 5, b sft 3"]
    with pytest.raises(UserError, match=r"no run 'c'.*holds: a, b"):
        cmp.compare("a", "c", [])
    with pytest.raises(UserError, match="no stage 'grpo' evaluated; there are: sft"):
        cmp.compare("a", "b", ["grpo"])
    (tmp_path / "checkpoints" / "new").mkdir()
    with pytest.raises(UserError, match=r"new has no evaluation.*step5_eval\.py"):
        cmp.compare("a", "new", [])
    write_lines(b / "eval" / "episodes.jsonl", [episode("other", "sft", True)])
    with pytest.raises(UserError, match=r"\(5 questions\) and b sft \(1\) share no question"):
        cmp.compare(str(a), "b", [])
    write_lines(b / "eval" / "episodes.jsonl", [episode("dev-0", "sft", True, question="What else?", task="mini_math")])
    with pytest.raises(UserError, match="1 of the 1 ids .* different questions .*dev-0.*What else"):
        cmp.compare("a", "b", [])


def test_stages_stand_in_the_tables_order(tmp_path):
    """A resume plays a stage of the middle last; the last stage is the one that is compared."""
    run = write_episodes(
        tmp_path / "a", {"grpo": [True] * 3, "mine": [True] * 3, "base": [False] * 3, "sft": [False] * 3}
    )
    assert list(cmp.by_stage(run / "eval")) == ["base", "sft", "grpo", "mine"]
    summary = {"stages": {"mine": {}, "base": {}, "sft": {}, "grpo": {}}, "max_turns": 3}
    (run / "eval" / "summary.json").write_text(json.dumps(summary))
    assert list(cmp.by_stage(run / "eval")) == list(summary["stages"])
    assert cmp.compare(str(run), str(run), []).names == ("a grpo", "a grpo")


def test_every_evaluation_folder_belongs_to_its_run(tmp_path):
    run = write_episodes(tmp_path / "demo", {"sft": [True]})
    for name in ("eval-first-20", "evaluated"):
        shutil.copytree(run / "eval", run / name)
    assert cmp.find_run(str(run / "eval-first-20")) == (run, run / "eval-first-20")
    assert cmp.find_run(str(run / "evaluated")) == (run / "evaluated", run / "evaluated")


def test_what_differs_beside_the_model_is_said(tmp_path):
    same = {"database": "d1", "judge": "offline", "prompt": [{"role": "user", "content": "?"}]}
    a = write_episodes(tmp_path / "a", {"sft": [True] * 4}, **same)
    b = write_episodes(tmp_path / "b", {"sft": [True] * 4}, **same)
    assert cmp.compare(str(a), str(b), []).notes == []
    write_episodes(tmp_path / "b", {"sft": [True] * 4}, database="d2", judge="qwen", max_turns=1)
    notes = "\n".join(cmp.compare(str(a), str(b), []).notes)
    assert "prompts differ on 4 of the 4 questions" in notes and "databases differ" in notes
    assert (
        "judges differ on 4 of the 4 questions (offline and qwen)" in notes
        and "limits differ on 4 of the 4 questions (3 and 1)" in notes
    )
    write_episodes(tmp_path / "b", {"sft": [True] * 4}, prompt=same["prompt"])  # of an older version: says neither
    assert cmp.compare(str(a), str(b), []).notes == []


def test_nothing_decided_in_both(tmp_path):
    a = write_episodes(tmp_path / "a", {"sft": [None, True]})
    b = write_episodes(tmp_path / "b", {"sft": [True, None]})
    text = cmp.markdown(cmp.compare(str(a), str(b), []))
    assert "no question was decided in both" in text

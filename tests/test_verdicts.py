"""The verdicts of --verify without any engine: what passes, fails, or proves nothing."""

import contextlib
from types import SimpleNamespace

import pytest

from core import verify
from core.config import UserError, load_recipe
from core.verify import Finding, Opened


def finding(name, words, correct=False, calls=0, prompts=None):
    records = [
        {
            "error": "",
            "correct": correct,
            "tool_calls": calls,
            "question": str(n),
            "completion": [{"role": "assistant", "content": text}],
        }
        for n, text in enumerate(words)
    ]
    return Finding(name, "engine", records=records, prompts=prompts or [[1, 2, 3]] * len(words))


WORDS = [f"I know nothing of {n}." for n in range(40)]


def test_a_stage_that_says_nothing_right_proves_nothing():
    """0 of 40 right and no tool call is within 0 of 40's interval, whatever was said."""
    stage = finding("stage", WORDS)
    garbage = finding("gguf-q8_0", ["!!!!"] * 40)
    assert "no episode is the stage's" in verify._problem(stage, garbage)
    near = finding("gguf-q8_0", WORDS[:30] + ["!!!!"] * 10)
    assert verify._problem(stage, near) == "" and "30 of 40 are equal" in verify._unproven(stage, near)
    same = finding("gguf-q8_0", WORDS)
    assert verify._problem(stage, same) == verify._unproven(stage, same) == ""


def test_a_stage_that_says_something_right_or_calls_a_tool_tells_garbage():
    for kind in ({"correct": True}, {"calls": 1}):
        stage, garbage = finding("stage", WORDS, **kind), finding("gguf-q8_0", ["!!!!"] * 40)
        assert "the stage's 100.0%" in verify._problem(stage, garbage) and not verify._unproven(stage, stage)
        near = finding("gguf-q8_0", [f"{w} " for w in WORDS[:5]] + ["other"] * 35, **kind)
        assert verify._problem(stage, near) == verify._unproven(stage, near) == ""


def test_prompts_are_compared_by_ids_else_by_their_count():
    stage = finding("stage", WORDS)
    for shown, says in (
        ([1, 2, 3], ""),
        ([1, 2, 4], "other ids"),
        (3, ""),
        (4, "other counts of tokens"),
        (None, ""),
    ):
        found = verify._problem(stage, finding("ollama", WORDS, prompts=[shown] * 40))
        assert says in found and bool(found) == bool(says)


def test_no_questions_are_refused(tmp_path):
    with pytest.raises(UserError, match="no question to ask"):
        verify.verify(load_recipe("recipes/ci.yaml", []), "stage", {}, [], None, None, tmp_path)
    assert not (tmp_path / "verify.md").exists()


def test_unproven_is_said_and_written(tmp_path, monkeypatch, capsys):
    played = {"stage": WORDS, "hf": WORDS, "adapter": WORDS[:39] + ["!!!!"]}

    @contextlib.contextmanager
    def opening(recipe, name, path, source):
        yield Opened("engine", SimpleNamespace(), None, lambda messages, tools: None, 0.0)

    def play(found, opened, rows, make_episode, judge):
        made = finding(found.name, played[found.name], prompts=[None] * 40 if found.name == "adapter" else None)
        found.engine, found.prompts = "engine", made.prompts
        found.records = [r | {"tokens": 1, "seconds": 0.0} for r in made.records]

    monkeypatch.setattr(verify, "_open", opening)
    monkeypatch.setattr(verify, "_play", play)
    files = {"hf": tmp_path, "adapter": tmp_path}
    verify.verify(load_recipe("recipes/ci.yaml", []), str(tmp_path), files, [{}] * 40, None, None, tmp_path, "sft")
    text, out = (tmp_path / "verify.md").read_text(), capsys.readouterr().out
    assert text.startswith(f"**stage sft: {tmp_path}, 40 questions**")
    assert text.splitlines()[-2].endswith("passed |") and text.splitlines()[-1].endswith("unproven |")
    assert "unproven: adapter. The stage answers none of 40 right" in out and "39 of 40 are equal" in out
    assert "adapter: engine shows neither ids nor counts" in out

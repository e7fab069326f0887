"""step5_eval.py around its engines: which stages share a table, where a part goes, what a server's report says."""

import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


class Quick:
    """Answers 12 at once, and counts."""

    played = 0

    def play(self, episodes):
        for e in reversed(episodes):
            Quick.played += 1
            e.accept_message({"role": "assistant", "content": "<answer>12</answer>"})
            yield [e]


@pytest.fixture
def step5(tmp_path, math_row, monkeypatch, capsys):
    """Runs step 5 in this process on three rows; `weights` of a stage may be changed, and a stage taken away."""
    import step5_eval
    from core import engines, models
    from core.artifacts import write_jsonl, write_manifest
    from core.config import UserError, load_recipe

    write_manifest(tmp_path / "data/ci", load_recipe(ROOT / "recipes/ci.yaml"), [], 0.0)
    write_jsonl(tmp_path / "data/ci/eval.jsonl", [math_row | {"id": str(n), "messages": []} for n in range(3)])
    weights = {"base": 1, "sft": 1, "grpo": 1}

    def source(recipe, stage, say=print):
        if stage not in weights:
            raise UserError(f"no {stage}")
        return stage

    monkeypatch.setattr(models, "stage_source", source)
    monkeypatch.setattr(models, "fingerprint", lambda stage: [stage, weights[stage]])
    monkeypatch.setattr(engines, "open_source", lambda *_: (None, lambda temperature: Quick()))
    monkeypatch.setattr(engines, "open_endpoint", lambda *_: (None, lambda temperature: Quick()))
    monkeypatch.setattr(engines, "compare_prompts", lambda *_: "warning: its chat template is another")

    def run(*words: str) -> tuple[str, int]:
        folders = ["--data_root", str(tmp_path / "data"), "--checkpoint_root", str(tmp_path / "ck")]
        monkeypatch.setattr(sys, "argv", ["step5_eval.py", "--config", str(ROOT / "recipes/ci.yaml"), *folders, *words])
        Quick.played = 0
        step5_eval.main()
        return capsys.readouterr().out, Quick.played

    run.weights, run.folder = weights, tmp_path / "ck/ci"
    return run


def summary(folder: Path) -> dict:
    return json.loads((folder / "summary.json").read_text())


def stages_of(path: Path) -> list[str]:
    return [json.loads(line)["stage"] for line in path.read_text().splitlines()]


def test_a_part_of_the_stages_stays_beside_the_others(step5):
    assert step5()[1] == 9
    step5.weights["sft"] = 2
    out, played = step5("--stages", "sft")
    found = summary(step5.folder / "eval")
    assert played == 3 and "base, grpo: evaluated with today's weights and settings" in out
    assert list(found["stages"]) == ["base", "sft", "grpo"] and list(found["tests"]) == ["sft", "grpo"]
    assert found["weights"] == {"base": ["base", 1], "sft": ["sft", 2], "grpo": ["grpo", 1]}  # step 6 compares them
    assert stages_of(step5.folder / "eval/episodes.jsonl") == ["base"] * 3 + ["sft"] * 3 + ["grpo"] * 3
    assert step5("--stages", "sft", "--restart")[1] == 3  # forgets what is named, and no more
    step5.weights["sft"] = 1
    assert step5()[1] == 3  # forgotten by --restart, else it would be taken up again


def test_a_part_without_the_others_has_its_own_folder(step5):
    step5()
    before = (step5.folder / "eval/summary.json").read_text()
    step5.weights["base"] = 2
    out, played = step5("--stages", "sft")
    assert "also holds base, grpo, of other weights or settings, and stays as it is" in out and played == 3
    assert "--stages base grpo sft" in out
    assert (step5.folder / "eval/summary.json").read_text() == before
    assert list(summary(step5.folder / "eval-only-sft")["stages"]) == ["sft"]
    assert (step5.folder / "eval-only-sft/report.html").exists()
    del step5.weights["grpo"]  # its folder is gone
    assert "eval-only-base" in step5("--stages", "base")[0]


def test_a_setting_that_is_taken_back_costs_nothing(step5):
    step5()
    out, played = step5("--agent.max_completion_length", "99")
    assert played == 9 and "9 episodes of other weights or settings wait in" in out
    assert step5()[1] == 0


def test_a_servers_report_names_it(step5):
    out, _ = step5("--endpoint", "http://me:secret@host:1/v1", "--served_model", "other/model")
    folder = step5.folder / "eval-other-model"
    server = {
        "url": "http://host:1/v1",
        "served_model": "other/model",
        "prompts": "warning: its chat template is another",
    }
    found, manifest = summary(folder), json.loads((folder / "manifest.json").read_text())
    assert found["endpoint"] == manifest["endpoint"] == server and found["model"] == "other/model"
    for text in (out, (folder / "report.md").read_text()):
        assert "other/model at http://host:1/v1, asked with the rows of run ci; warning: its chat template" in text
    assert "secret" not in (folder / "report.html").read_text() + (folder / "summary.json").read_text()

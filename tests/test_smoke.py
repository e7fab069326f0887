"""The six steps end to end, as a user runs them, on a tiny real model. Under two minutes on two cores."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def run(*words: str, code: int = 0) -> str:
    env = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, *words], cwd=ROOT, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == code, (
        f"{words} ended with {done.returncode}:\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    )
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    from tests.tiny_model import build_tiny_model

    home = tmp_path_factory.mktemp("smoke")
    build_tiny_model(home / "tiny", home / "data" / "raw")
    return home


def step(home: Path, script: str, *words: str, code: int = 0) -> str:
    folders = ["--model", str(home / "tiny"), "--data_root", str(home / "data"), "--checkpoint_root", str(home / "ck")]
    return run(script, "--config", "recipes/ci.yaml", *folders, *words, code=code)


def same_weights(exported: Path, folder: Path, gguf: str) -> None:
    """transformers reads the same model out of the GGUF, but for the rounding to 8 bits."""
    from transformers import AutoModelForCausalLM

    quantised = AutoModelForCausalLM.from_pretrained(folder, gguf_file=gguf).state_dict()
    for name, weight in AutoModelForCausalLM.from_pretrained(exported).state_dict().items():
        assert (quantised[name] - weight).abs().max() <= weight.abs().max() / 200, name


@pytest.mark.slow
def test_six_steps(home):
    run_dir = home / "ck" / "ci"
    assert "No such file" not in step(home, "step2_prepare_data.py")
    counts = json.loads((home / "data" / "ci" / "manifest.json").read_text())["counts"]
    assert counts == {"sft_train": 16, "sft_val": 4, "rl_train": 8, "eval": 8}

    assert "is not finished" in step(home, "step4_grpo.py", code=1)  # names the missing stage and the command
    assert "self-check" in step(home, "step3_sft.py")
    assert (run_dir / "sft" / "adapter" / "adapter_model.safetensors").exists()
    assert "is finished already" in step(home, "step3_sft.py")

    # a GRPO run whose first part was killed goes on from its checkpoint; a damaged newest checkpoint is passed over
    step(home, "step4_grpo.py")
    lines = [json.loads(x) for x in (run_dir / "grpo" / "metrics.jsonl").read_text().splitlines()]
    assert {"rewards/exec_match/mean", "rewards/math_accuracy/mean", "tools/call_frequency"} <= set(lines[0])
    (run_dir / "grpo" / "manifest.json").unlink()
    (run_dir / "grpo" / "checkpoint-2" / "optimizer.pt").write_bytes(b"cut")
    out = step(home, "step4_grpo.py")
    assert "checkpoint-2 is not whole" in out and "resuming from" in out and "checkpoint-1" in out
    assert (run_dir / "grpo" / "manifest.json").exists()

    out = step(home, "step5_eval.py")
    summary = json.loads((run_dir / "eval" / "summary.json").read_text())
    assert list(summary["stages"]) == ["base", "sft", "grpo"] and "| grpo | 8 |" in out
    assert all(s["n"] + s["undecided"] == 8 for s in summary["stages"].values())
    episodes = [json.loads(x) for x in (run_dir / "eval" / "episodes.jsonl").read_text().splitlines()]
    assert len(episodes) == 24 and all(len(e["mask"]) == len(e["completion_ids"]) for e in episodes)
    (run_dir / "eval" / "episodes.jsonl").write_text(
        "".join(json.dumps(e) + "\n" for e in episodes[:20]) + '{"stage": "gr'  # as a crash leaves it
    )
    assert "4 of them played already" in step(home, "step5_eval.py")
    output = home / "checkpoint"  # an adapter on its base plays as the merged weights do
    stages = ["--stages", "sft", "sft/checkpoint-2", "--turns", "0,2", "--limit", "4"]
    step(home, "step5_eval.py", *stages, "--output", str(output))
    episodes = [json.loads(x) for x in (output / "episodes.jsonl").read_text().splitlines()]
    assert len(episodes) == 16
    assert [e["completion_ids"] for e in episodes[:8]] == [e["completion_ids"] for e in episodes[8:]]

    out = step(home, "step6_export.py", "--formats", "hf", "gguf-q8_0", "ollama")
    exported = run_dir / "export" / "hf"
    assert "generation %}" not in (exported / "chat_template.jinja").read_text()
    same_weights(exported, run_dir / "export" / "gguf", "ci-q8_0.gguf")
    assert "FROM ./ci-q8_0.gguf" in (run_dir / "export" / "ollama" / "Modelfile").read_text()
    out = step(home, "chat.py", "--stage", str(exported), "--task", "mini_math", "--question", "What is 3 * 4?")
    assert "error" not in out.lower()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["step2_prepare_data.py", "--config", "recipes/dem.yaml"], 2, "Did you mean recipes/demo.yaml"),
        (["step3_sft.py", "--config", "recipes/ci.yaml", "--sft.learning_rat", "1"], 2, "learning_rate"),
        (["step3_sft.py", "--config", "recipes/ci.yaml", "--data_root", "nowhere"], 1, "step2_prepare_data.py"),
        (["step4_grpo.py", "--config", "recipes/ci.yaml", "--grpo.num_generations", "3"], 2, "divide into groups"),
        (["step5_eval.py", "--config", "recipes/ci.yaml", "--endpoint", "http://localhost:1"], 2, "--served_model"),
    ],
)
def test_bad_input_is_one_clear_error(words, code, says):
    out = run(*words, code=code)
    assert says in out and "Traceback" not in out

"""SIGKILL at any moment, the same command again: the run goes on and ends with the weights of an undisturbed one."""

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
KILLS = 10  # for each of the two stages


def run(*words: str) -> str:
    env = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "TRL_EXPERIMENTAL_SILENCE": "1"}
    done = subprocess.run([sys.executable, *words], cwd=ROOT, env=env, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, f"{words}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    from tests.tiny_model import build_tiny_model

    home = tmp_path_factory.mktemp("resume")
    build_tiny_model(home / "tiny", home / "data" / "raw")
    run("step2_prepare_data.py", *arguments(home, "calm"))
    return home


def arguments(home: Path, name: str) -> list[str]:
    folders = ["--model", str(home / "tiny"), "--data_root", str(home / "data"), "--checkpoint_root", str(home / name)]
    return ["--config", "recipes/ci.yaml", *folders]


def weights(folder: Path) -> str:
    return hashlib.sha256((folder / "merged" / "model.safetensors").read_bytes()).hexdigest()


@pytest.mark.slow
def test_killed_runs_end_with_the_weights_of_an_undisturbed_one(home):
    more = {
        "step3_sft.py": ["--sft.save_steps", "1", "--sft.max_steps", "6"],
        "step4_grpo.py": ["--grpo.save_steps", "1", "--grpo.max_steps", "4"],
    }
    for step, stage in (("step3_sft.py", "sft"), ("step4_grpo.py", "grpo")):
        run(step, *arguments(home, "calm"), *more[step])
        words = [*arguments(home, "killed"), *more[step]]
        found = json.loads(run("tests/killing.py", step, str(KILLS), "7", "--", *words).splitlines()[-1])
        assert found["killed"] == KILLS and found["inside_a_checkpoint"] >= 2 and set(found["codes"]) == {0}, found
        assert weights(home / "killed" / "ci" / stage) == weights(home / "calm" / "ci" / stage), stage
        kept = {c.name for c in (home / "killed" / "ci" / stage).glob("checkpoint-*")}
        assert len(kept) <= 2, kept  # save_total_limit


@pytest.mark.slow
def test_a_run_that_died_after_its_last_step_makes_no_further_one(home):
    for step, stage in (("step3_sft.py", "sft"), ("step4_grpo.py", "grpo")):
        words, folder = [step, *arguments(home, "late"), f"--{stage}.max_steps", "2"], home / "late" / "ci" / stage
        run(*words)
        was = weights(folder)
        (folder / "manifest.json").unlink()
        (folder / "merged" / "model.safetensors").unlink()
        said = run(*words)
        assert "resuming from" in said and "step 3/" not in said, said
        assert weights(folder) == was
        steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        assert [line["step"] for line in steps if "grad_norm" in line] == [1, 2]
        assert json.loads((folder / "manifest.json").read_text())["steps"] == 2


@pytest.mark.slow
def test_a_full_disk_is_said_and_survived(home, tmp_path):
    small = tmp_path / "disk"
    small.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=700k", "none", str(small)], capture_output=True).returncode:
        pytest.skip("needs the right to mount a small disk")
    try:
        folders = ["--model", str(home / "tiny"), "--data_root", str(home / "data"), "--checkpoint_root", str(small)]
        words = ["step3_sft.py", "--config", "recipes/ci.yaml", *folders]
        full = subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, text=True, timeout=600)
        assert full.returncode == 1 and "no space left" in full.stderr and "Traceback" not in full.stderr, full.stderr
        assert not (small / "ci" / "sft" / "manifest.json").exists()
        subprocess.run(["mount", "-o", "remount,size=100m", str(small)], check=True)
        run(*words)
        assert (small / "ci" / "sft" / "manifest.json").exists()
    finally:
        subprocess.run(["umount", "-l", str(small)], check=True)

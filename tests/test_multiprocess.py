"""Two real processes (gloo, CPU) under accelerate launch: the same prompts as one, files and log of one, turns in step."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def launch(processes: int, *words: str, code: int = 0, config: str = "ddp") -> tuple[str, str]:
    """(stdout, stderr) of `accelerate launch` with a configuration of the repository, or of plain Python."""
    env = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    start = [sys.executable]
    if processes > 1:
        file = f"recipes/accelerate/{config}.yaml"
        start += ["-m", "accelerate.commands.launch", "--config_file", file, "--num_processes", str(processes),
                  "--main_process_port", "0"]  # fmt: skip
    done = subprocess.run([*start, *words], cwd=ROOT, env=env, capture_output=True, text=True, timeout=900)
    assert done.returncode == code, (
        f"{words} ended with {done.returncode}:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    )
    return done.stdout, done.stderr


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    from tests.tiny_model import build_tiny_model

    home = tmp_path_factory.mktemp("processes")
    build_tiny_model(home / "tiny", home / "data" / "raw")
    return home


@pytest.mark.slow
def test_steps_with_two_processes(home):
    words = ["--config", "recipes/ci.yaml", "--model", str(home / "tiny"), "--data_root", str(home / "data"),
             "--checkpoint_root", str(home / "ck")]  # fmt: skip
    launch(1, "step2_prepare_data.py", *words)
    for step, stage in (("step3_sft.py", "sft"), ("step4_grpo.py", "grpo")):
        folder = home / "ck" / "ci" / stage
        words += ["--rate_difficulty", "2", "--resample", "1"] if stage == "grpo" else []
        out, _ = launch(2, step, *words)
        assert out.count("step 1/2") == out.count("step 2/2  loss" if stage == "sft" else "step 2/2") == 1, out
        assert out.count("wrote ") == 1  # one log
        assert json.loads((folder / "manifest.json").read_text())["processes"] == 2
        assert {p.name for p in (folder / "checkpoint-2").glob("rng_state*")} == {"rng_state_0.pth", "rng_state_1.pth"}
        steps = [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
        assert steps.count(1) == 1
        assert not list(home.rglob("*.tmp"))
        if stage == "sft":
            out, _ = launch(2, step, *words)
            assert out.count("is finished already") == 1
            alone = [*words, "--checkpoint_root", str(home / "alone"), "--sft.gradient_accumulation_steps", "2"]
            launch(1, step, *alone)
            assert_close(folder / "adapter", home / "alone" / "ci" / "sft" / "adapter")
            continue
        # killed after its last checkpoint: both go on from there; another number of processes is refused, nothing lost
        (folder / "manifest.json").unlink()
        _, err = launch(1, step, *words, code=1)
        assert "written by 2 processes" in err and (folder / "checkpoint-2").exists()
        out, _ = launch(2, step, *words)
        assert out.count("resuming from") == 1 and (folder / "manifest.json").exists()


def assert_close(one: Path, other: Path) -> None:
    """Two adapters, equal but for the order in which numbers were added up."""
    import torch
    from safetensors.torch import load_file

    first, second = (load_file(folder / "adapter_model.safetensors") for folder in (one, other))
    assert first.keys() == second.keys() and any(v.abs().max() > 1e-4 for k, v in first.items() if "lora_B" in k)
    for name, weights in first.items():
        torch.testing.assert_close(weights, second[name], rtol=1e-3, atol=1e-5, msg=name)


@pytest.mark.slow
def test_same_prompts_and_whole_groups(home, tmp_path):
    """What each process was given, by step: together what one process gets, each group once, each row's turn its own."""
    for processes in (1, 2):
        launch(processes, "-m", "tests.test_multiprocess", str(home / "tiny"), str(tmp_path / str(processes)))
    one = json.loads((tmp_path / "1" / "seen-0.json").read_text())
    two = [json.loads((tmp_path / "2" / f"seen-{rank}.json").read_text()) for rank in range(2)]
    assert len(one) == len(two[0]) == len(two[1]) == 2  # steps
    for step in range(2):
        assert len(two[0][step]) == len(two[1][step]) == 4
        both = two[0][step] + two[1][step]
        assert sorted(both) == sorted(one[step]) and {both.count(i) for i in both} == {4}
    assert set(one[0]).isdisjoint(one[1])


@pytest.mark.slow
def test_turns_in_step_and_first_process_decides(tmp_path):
    launch(2, "-m", "tests.test_multiprocess", "--lockstep", str(tmp_path))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["decided-0", "in-step-0", "in-step-1", "stopped-1"]


@pytest.mark.parametrize("name", ["ddp", "fsdp2", "zero3"])
def test_accelerate_reads_the_configurations(name):
    from accelerate.commands.config.config_args import load_config_from_file
    from accelerate.utils import DistributedType

    config = load_config_from_file(str(ROOT / "recipes" / "accelerate" / f"{name}.yaml"))
    kinds = {"ddp": DistributedType.MULTI_GPU, "fsdp2": DistributedType.FSDP, "zero3": DistributedType.DEEPSPEED}
    assert config.distributed_type == kinds[name] and config.num_machines == 1


def test_what_sharded_weights_cannot_do(monkeypatch):
    from core.config import UserError
    from core.ranks import check_sharded

    check_sharded(load_in_4bit=True, generates=True)
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    check_sharded(load_in_4bit=False, generates=True, use_vllm=True)
    with pytest.raises(UserError, match="4-bit"):
        check_sharded(load_in_4bit=True)
    with pytest.raises(UserError, match="without vLLM"):
        check_sharded(load_in_4bit=False, generates=True)
    with pytest.raises(UserError, match="sft.accuracy_rows is 64.* Add --sft.accuracy_rows 0"):
        check_sharded(load_in_4bit=False, accuracy_rows=64)
    with pytest.raises(UserError, match="Add --grpo.accuracy_rows 0"):
        check_sharded(load_in_4bit=False, generates=True, use_vllm=True, accuracy_rows=64)


def commands_for_divided_weights() -> list[str]:
    files = [ROOT / "recipes/accelerate/fsdp2.yaml", ROOT / "recipes/accelerate/zero3.yaml", ROOT / "docs/scaling.md"]
    found = [line for file in files for line in re.findall(r"accelerate launch .*", file.read_text())]
    return [line for line in found if "ddp.yaml" not in line]


@pytest.mark.parametrize("command", commands_for_divided_weights())
def test_printed_commands_for_divided_weights_are_not_refused(command, monkeypatch):
    """With a GPU recipe in place of R, whose accuracy_rows are on."""
    from core.config import load_recipe
    from core.ranks import check_sharded

    step, overrides = re.search(r"(step\d)_\w+\.py --config \S+(.*)", command).groups()
    recipe = load_recipe(ROOT / "recipes/spider-llama-3.2-3b-80gb.yaml", overrides.split())
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    section, generates = (recipe.sft, False) if step == "step3" else (recipe.grpo, True)
    use_vllm = section.config.get("use_vllm", False)
    check_sharded(section.load_in_4bit, generates, use_vllm, section.accuracy_rows)


def test_there_are_commands_for_both_steps():
    commands = commands_for_divided_weights()
    assert len(commands) == 6 and sum("step3_sft.py" in c for c in commands) == 3


@pytest.mark.slow
def test_accuracy_rows_of_divided_weights_are_refused_before_anything_is_loaded(home, monkeypatch):
    """The steps themselves, in one process that is told that its weights are divided."""
    from core.backend import vllm_installed

    words = ["--config", "recipes/ci.yaml", "--model", str(home / "tiny"), "--data_root", str(home / "divided"),
             "--checkpoint_root", str(home / "ck-divided")]  # fmt: skip
    launch(1, "step2_prepare_data.py", *words)
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    _, err = launch(1, "step3_sft.py", *words, "--sft.accuracy_rows", "2", code=1)
    assert "Add --sft.accuracy_rows 0" in err and "Traceback" not in err
    server = ["--from_stage", "base", "--grpo.use_vllm", "true", "--grpo.vllm_mode", "server"]
    _, err = launch(1, "step4_grpo.py", *words, *server, "--grpo.accuracy_rows", "2", code=1)
    says = "Add --grpo.accuracy_rows 0" if vllm_installed() else "rollouts without vLLM"
    assert says in err and "Traceback" not in err


def test_several_gpus_need_a_launcher_or_one_of_them(monkeypatch):
    import torch

    from core.config import UserError
    from core.ranks import check_sharded

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    monkeypatch.setattr(sys, "argv", ["step3_sft.py", "--config", "recipes/R.yaml"])
    with pytest.raises(UserError) as error:
        check_sharded(load_in_4bit=False)
    assert "CUDA_VISIBLE_DEVICES=2 python step3_sft.py --config recipes/R.yaml" in str(error.value)
    assert "ddp.yaml --num_processes 2 step3_sft.py --config recipes/R.yaml" in str(error.value)
    monkeypatch.setenv("LOCAL_RANK", "0")  # one process of accelerate launch
    check_sharded(load_in_4bit=False)
    monkeypatch.delenv("LOCAL_RANK")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    check_sharded(load_in_4bit=False)


def test_rollout_servers_do_not_divide_data():
    """TRL's server ends with an error where a dense model, as all of ours, is served by data_parallel_size above 1."""
    text = "".join((ROOT / name).read_text() for name in ("recipes/accelerate/slurm.sh", "docs/scaling.md"))
    lines = re.findall(r"^.*trl vllm-serve .+$", text, re.M)
    assert len(lines) >= 2 and not any("data_parallel" in line for line in lines)


# ---- what the processes run ------------------------------------------------------------------------------------------


def train(model: str, folder: Path) -> None:
    """Two GRPO steps of 2 prompts x 4 episodes, whatever the number of processes; writes the row ids each step was given."""
    from datasets import Dataset
    from trl import GRPOConfig

    from core.config import load_recipe
    from core.grpo import GroupTrainer
    from core.models import load_model, load_tokenizer
    from core.ranks import world
    from core.train import common_arguments

    seen = []

    def reward(completions, name, **columns):
        seen.append(name)
        return [float(i % 2) for i, _ in enumerate(completions)]

    config = common_arguments(load_recipe("recipes/ci.yaml"), folder) | {
        "num_generations": 4, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2 // world(),
        "max_steps": 2, "max_completion_length": 4, "report_to": "none", "save_strategy": "no",
    }  # fmt: skip
    rows = [{"prompt": [{"role": "user", "content": f"What is {i}?"}], "name": str(i)} for i in range(8)]
    trainer = GroupTrainer(
        model=load_model(model), args=GRPOConfig(**config), train_dataset=Dataset.from_list(rows),
        processing_class=load_tokenizer(model), reward_funcs=[reward],
    )  # fmt: skip
    trainer.train()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"seen-{trainer.accelerator.process_index}.json").write_text(json.dumps(seen))


def lockstep(folder: Path) -> None:
    """Episodes of 3, 1 | 0, 0 further turns on two processes, with an engine that needs both for every call."""
    import torch
    from accelerate import PartialState
    from accelerate.utils import gather_object

    from core.ranks import Lockstep, _connect, on_main

    _connect()
    state = PartialState()
    rank = state.process_index

    class Engine:
        accelerator, _tokenizer = state, type("Tokenizer", (), {"eos_token_id": 0})

        def _generate_single_turn(self, prompt_ids, images, fields, num_generations):
            """As vLLM's server in TRL: the first process answers for all and each takes a slice of equal length."""
            everyone = gather_object(prompt_ids)
            here = slice(rank * len(prompt_ids), (rank + 1) * len(prompt_ids))
            answers = [[sum(p) + 1] for p in everyone][here]
            torch.distributed.barrier()
            return answers, [[-float(a[0])] for a in answers]

        def _tool_call_loop(self, contexts, turns):
            while left := [i for i, n in enumerate(turns) if n]:
                answers, scores = self._generate_single_turn([contexts[i] for i in left], None, {}, 1)
                for i, answer, score in zip(left, answers, scores, strict=True):
                    assert answer == [sum(contexts[i]) + 1] and score == [-float(answer[0])], (contexts[i], answer)
                    contexts[i] = contexts[i] + answer
                    turns[i] -= 1
            return contexts

    class Trainer(Lockstep, Engine):
        def _jointly(self):
            return True

    trainer = Trainer()
    first, _ = trainer._generate_single_turn([[rank, 1], [rank, 2]], None, {}, 1)
    assert first == [[rank + 2], [rank + 3]]
    contexts = trainer._tool_call_loop([[rank, 1], [rank, 2]], [3, 1] if rank == 0 else [0, 0])
    assert [len(c) for c in contexts] == ([5, 3] if rank == 0 else [2, 2])
    (folder / f"in-step-{rank}").touch()

    @on_main
    def decide():
        (folder / f"decided-{rank}").touch()
        return "decision"

    @on_main
    def fail():
        raise ValueError("says the first one only")

    assert decide() == "decision"
    try:
        fail()
    except ValueError:
        assert rank == 0
    except SystemExit:
        (folder / f"stopped-{rank}").touch()


if __name__ == "__main__":
    lockstep(Path(sys.argv[2])) if sys.argv[1] == "--lockstep" else train(sys.argv[1], Path(sys.argv[2]))

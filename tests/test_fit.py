"""Running out of memory for real, in both steps: what is said, and how --auto_fit goes on."""

import json

import pytest

from tests.test_dryrun import home, run  # noqa: F401  (a fixture)

WRAPPER = """
import sys
import torch, transformers
step, limit = sys.argv[1], int(sys.argv[2])
del sys.argv[1:3]
inner = transformers.Trainer.training_step
def training_step(self, *args, **kwargs):
    if self.state.global_step >= 1 and self.args.per_device_train_batch_size > limit:
        if limit == 0:
            torch.empty(2**60)  # the CPU allocator's own error
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")
    return inner(self, *args, **kwargs)
transformers.Trainer.training_step = training_step
module = __import__(step)
from core.config import run_step
run_step(module.main)
"""


@pytest.mark.slow
def test_out_of_memory_in_both_steps(home):  # noqa: F811
    wrapper, ck = str(home / "wrapper.py"), home / "ck" / "ci"
    (home / "wrapper.py").write_text(WRAPPER)
    out = run(home, [wrapper, "step3_sft", "0"], code=1)  # a real allocation that fails
    assert "out of memory in SFT" in out and "DefaultCPUAllocator" in out
    assert "--sft.per_device_train_batch_size 2 (now 4) with --sft.gradient_accumulation_steps 2 (now 1)" in out
    assert "--sft.activation_checkpointing true (now false)" in out and "--sft.load_in_4bit true" in out

    out = run(home, [wrapper, "step3_sft", "1"], "--auto_fit")  # goes on from the checkpoint: 4 rows, 2, 1
    assert "going on with 2" in out and "going on with 1" in out and out.count("resuming from") >= 2
    manifest = json.loads((ck / "sft" / "manifest.json").read_text())
    section = manifest["recipe"]["sft"]
    assert (section["per_device_train_batch_size"], section["gradient_accumulation_steps"]) == (1, 4)
    assert manifest["steps"] == 2 and manifest["memory"]["memory_gib"] > 0.2
    assert "is finished already" in run(home, ["step3_sft.py"])  # with the recipe's own 4 rows: the same experiment

    out = run(home, [wrapper, "step4_grpo", "4"], "--auto_fit", "--restart")  # whose checkpoints survive the new start
    assert "going on with 4" in out and "resuming from" in out and "predicted peak" in out
    lines = [json.loads(x) for x in (ck / "grpo" / "metrics.jsonl").read_text().splitlines()]
    steps = [x for x in lines if "reward" in x]  # the last line sums up
    assert [x["step"] for x in steps] == [1, 2] and all(x["memory_gib"] > 0.2 for x in steps)

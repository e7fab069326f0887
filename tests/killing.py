"""Run a training step in child processes that are killed with SIGKILL, until one of them comes to its end.

    python tests/killing.py step3_sft.py KILLS SEED -- --config recipes/ci.yaml ...

Every other kill waits for a checkpoint that is being written. The libraries are imported once; children are forks.
Prints one JSON line: how often it killed, how often while a checkpoint was incomplete, and the children's exit codes.
"""

import importlib
import json
import os
import random
import shutil
import signal
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))


def half_written(folder: Path) -> bool:
    """A checkpoint whose last file (the random state) is not there yet."""
    return any(not (c / "rng_state.pth").exists() or not (c / "trainer_state.json").exists()
               for c in folder.glob("checkpoint-*"))  # fmt: skip


def run_once(step: str, arguments: list[str], log: str) -> int:
    pid = os.fork()
    if pid:
        return pid
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(out, 1)
    os.dup2(out, 2)
    sys.argv = [step, *arguments]
    code = 1
    try:
        from core.config import run_step

        run_step(importlib.import_module(step.removesuffix(".py")).main)
        code = 0
    except SystemExit as stop:
        code = stop.code or 0
    except BaseException:
        import traceback

        traceback.print_exc()
    sys.stdout.flush()
    os._exit(code)


def wait(pid: int, until) -> int | None:
    """The child's exit code, or None once `until()` holds."""
    while not until():
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.001)
    return None


def main():
    step, kills, seed = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    arguments = sys.argv[5:]
    options = dict(zip(arguments[::2], arguments[1::2], strict=True))
    folder = Path(options["--checkpoint_root"]) / "ci" / {"step3_sft.py": "sft", "step4_grpo.py": "grpo"}[step]
    folder.parent.mkdir(parents=True, exist_ok=True)
    log = str(folder.parent.parent / f"{step}.log")
    import torch
    import trl.trainer.grpo_trainer  # noqa: F401
    import trl.trainer.sft_trainer  # noqa: F401

    torch.set_num_threads(1)
    rng, killed, inside, codes = random.Random(seed), 0, 0, []
    usual = 8.0  # seconds of a whole run; learnt from runs that were too fast to be killed
    while True:
        began = time.time()
        pid = run_once(step, arguments, log)
        before = {c.name for c in folder.glob("checkpoint-*")}
        end = began + rng.uniform(0.05, usual)

        def until(before=before, end=end, killed=killed):
            if killed >= kills:
                return False
            if killed % 2:
                return {c.name for c in folder.glob("checkpoint-*")} - before and half_written(folder)
            return time.time() > end

        code = wait(pid, until)
        if code is None:
            inside += half_written(folder)
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            killed += 1
            continue
        codes.append(code)
        if code or killed >= kills:
            break
        usual = max(1.0, 0.8 * (time.time() - began))
        shutil.rmtree(folder)  # it came to its end before it was killed: from the start again
    print(json.dumps({"killed": killed, "inside_a_checkpoint": inside, "codes": codes}))


if __name__ == "__main__":
    main()

"""Steps 3 and 4 fit into memory, or say what to change: the prediction at the start, the message and the way on after
running out of memory, and what was really used.

`--auto_fit` halves the micro-batch and doubles the accumulation: the same rows in every optimizer step, the same groups.
After running out of memory while training, the process starts itself anew with the smaller micro-batch (nothing of the
old one's memory survives that) and goes on from the last checkpoint. With several processes only the start is fitted, by
the prediction: one of them cannot start anew without the others.
"""

import contextlib
import copy
import os
import sys
from collections.abc import Iterator

from core.config import Recipe, UserError
from core.memory import predict, stage_config
from core.ranks import world
from core.sizes import GIB, Device, device

ROWS, STEPS = "per_device_train_batch_size", "gradient_accumulation_steps"
TEXTS = ("DefaultCPUAllocator: can't allocate", "DefaultCPUAllocator: not enough", "CUDA out of memory")
VLLM_TEXTS = ("gpu_memory_utilization", "No available memory for the cache blocks")  # vLLM's own, at its start


def add_argument(parser) -> None:
    parser.add_argument(
        "--auto_fit",
        action="store_true",
        help="halve the micro-batch and double the accumulation as often as it takes to fit into memory (with several "
        "processes by the prediction only, before the start)",
    )


@contextlib.contextmanager
def fitted(recipe: Recipe, stage: str, auto_fit: bool, say=print) -> Iterator[None]:
    """Around the work of a step: says the predicted peak, fits `recipe` if asked to, and explains running out of memory."""
    on = device()
    try:
        need = predict(recipe, stage, on)
        while auto_fit and need.peak > on.gib and (smaller := halved(recipe, stage)):
            less = predict(smaller, stage, on)
            if less.peak >= need.peak:
                break
            getattr(recipe, stage).config, need = getattr(smaller, stage).config, less
            say(f"--auto_fit: {ROWS} {_rows(recipe, stage)}, {STEPS} {_steps(recipe, stage)}")
        line = f"predicted peak {need.peak:.1f} GiB of {on.gib:.1f} GiB on {on.name} ({need})"
        if need.peak > on.gib:
            line += f"\nwarning: by calculation this does not fit. {advice(recipe, stage, on, by_itself=not auto_fit)}"
    except UserError as unknown:  # a model of a shape that is not known, or not found: the step says what it needs
        line = str(unknown)
    if os.environ.get("RANK", "0") == "0":
        say(line)
    try:
        yield
    except Exception as error:
        if not _is_out_of_memory(error):
            raise
        mends = world() == 1 and not any(text in str(error) for text in VLLM_TEXTS)  # whether --auto_fit does
        if auto_fit and mends and (smaller := halved(recipe, stage)):
            say(f"out of memory with {ROWS} {_rows(recipe, stage)}: going on with {_rows(smaller, stage)}")
            _start_anew(smaller, stage)
        first = str(error).strip().splitlines()[0][:200] if str(error).strip() else type(error).__name__
        todo = advice(recipe, stage, on, by_itself=mends and not auto_fit)
        if auto_fit and world() > 1:
            todo = f"With several processes --auto_fit acts before the start only. {todo}"
        raise UserError(f"out of memory in {stage.upper()} on {on.name}: {first}\n{todo}") from error


def halved(recipe: Recipe, stage: str) -> Recipe | None:
    """The recipe with a smaller micro-batch and the same optimizer step; None where it is one row already."""
    rows = _rows(recipe, stage)
    if rows == 1:
        return None
    factor = next(n for n in range(2, rows + 1) if rows % n == 0)
    smaller = copy.deepcopy(recipe)
    config = getattr(smaller, stage).config
    config |= {ROWS: rows // factor, STEPS: _steps(recipe, stage) * factor}
    if "steps_per_generation" in config:  # else TRL takes the accumulation: the generation batch stays as it is
        config["steps_per_generation"] *= factor
    return smaller


def whatever_fits(recipe: dict) -> dict:
    """A saved recipe without what `halved` changes: the optimizer step is the same, so it is the same experiment."""
    recipe = copy.deepcopy(recipe)
    for stage in ("sft", "grpo"):
        section = recipe.get(stage, {})
        rows, steps = section.pop(ROWS, 8), section.pop(STEPS, 1)
        section["rows a step"] = rows * steps
        if "steps_per_generation" in section:
            section["rows a generation"] = rows * section.pop("steps_per_generation")
    return recipe


def advice(recipe: Recipe, stage: str, on: Device, by_itself: bool) -> str:
    """The three settings to change, with the values now and the proposed ones, those that cost least first.

    by_itself: whether --auto_fit would make the micro-batch smaller.
    """
    section, out = getattr(recipe, stage), []
    config, smaller = stage_config(recipe, stage, on)[0], halved(recipe, stage)
    if smaller:
        rows, steps = ((f(recipe, stage), f(smaller, stage)) for f in (_rows, _steps))
        out.append(
            f"--{stage}.{ROWS} {rows[1]} (now {rows[0]}) with --{stage}.{STEPS} {steps[1]} (now {steps[0]}): the same "
            "optimizer step" + ("; --auto_fit does this by itself" if by_itself else "")
        )
    if config.get("use_vllm") and config.get("vllm_mode", "colocate") == "colocate":
        if not config.get("vllm_enable_sleep_mode"):
            out.append(
                "--grpo.vllm_enable_sleep_mode true (now false): vLLM's memory is the trainer's while that works"
            )
        share = config.get("vllm_gpu_memory_utilization", 0.3)
        if share > 0.15:
            out.append(f"--grpo.vllm_gpu_memory_utilization {share - 0.1:.2g} (now {share:.2g}): slower rollouts")
    if not config.get("activation_checkpointing", True):
        out.append(f"--{stage}.activation_checkpointing true (now false): about a third slower")
    length = recipe.agent.max_completion_length
    if stage == "grpo":
        out.append(f"--agent.max_completion_length {length * 3 // 4} (now {length}): longer episodes are cut")
    if not section.load_in_4bit and section.lora:
        slower = "; rollouts are slower then, without vLLM" if config.get("use_vllm") else ""
        out.append(f"--{stage}.load_in_4bit true (now false): the frozen weights take a third{slower}")
    elif section.lora is None:
        out.append(f"--{stage}.lora '{{r: 16}}' (now null): an adapter instead of every weight")
    longest = recipe.data.max_length
    out.append(f"--data.max_length {longest * 3 // 4} (now {longest}) in steps 2 to 5: longer rows are left out")
    return "To need less:\n" + "\n".join(f"  {line}" for line in out[:3])


def compared(recipe: Recipe, stage: str) -> dict:
    """For the manifest: the prediction beside what was really used so far."""
    try:
        need = predict(recipe, stage, device())
    except UserError:
        return used()
    return {"predicted_gib": {k: round(v, 3) for k, v in need.parts.items()}, "peak_gib": round(need.peak, 3)} | used()


def used() -> dict[str, float]:
    """The most memory used so far: what torch had in use on the GPU, else the process's resident set."""
    import resource

    import torch

    if torch.cuda.is_available():
        return {"memory_gib": round(torch.cuda.max_memory_allocated() / GIB, 3)}
    unit = 1 if sys.platform == "darwin" else 1024
    return {"memory_gib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / GIB, 3)}


def _rows(recipe: Recipe, stage: str) -> int:
    return getattr(recipe, stage).config.get(ROWS, 8)


def _steps(recipe: Recipe, stage: str) -> int:
    return getattr(recipe, stage).config.get(STEPS, 1)


def _is_out_of_memory(error: Exception) -> bool:
    torch = sys.modules.get("torch")  # not loaded: it cannot be its error
    kinds = (MemoryError, torch.OutOfMemoryError) if torch else (MemoryError,)
    return isinstance(error, kinds) or any(text in str(error) for text in TEXTS + VLLM_TEXTS)


def _start_anew(recipe: Recipe, stage: str) -> None:
    """The same command with the smaller micro-batch, in place of this process; checkpoints are kept."""
    config = getattr(recipe, stage).config
    words = [word for word in sys.orig_argv[1:] if word != "--restart"]
    for key in (ROWS, STEPS, "steps_per_generation"):
        if key in config:
            words += [f"--{stage}.{key}", str(config[key])]
    sys.stdout.flush()
    sys.stderr.flush()
    for number in os.listdir("/dev/fd"):
        with contextlib.suppress(OSError):  # listdir's own is closed by now
            os.set_inheritable(int(number), int(number) <= 2)  # devices are let go
    os.execv(sys.executable, [sys.executable, *words])

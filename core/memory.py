"""What a run will need: peak memory of SFT and GRPO by part, and the time of a step, from the recipe alone.

    python -m core.memory --config recipes/spider-qwen2.5-coder-1.5b-24gb.yaml --gpu 3090

Calculated, no weights are loaded: the model's sizes come from its config.json (or the table below), the tensors are those
that transformers 5.23, peft 0.21 and TRL 1.16 keep (tests count them on small models, RESULTS.md compares with real runs
on CPU). The figures for GPUs follow the same arithmetic and have not been checked on one.
"""

import argparse
import statistics
from dataclasses import dataclass

from core import backend
from core.artifacts import read_manifest
from core.config import Recipe, UserError, load_recipe_args, run_step
from core.sizes import GIB, GPUS, Architecture, Device, architecture, device

NF4 = 0.5 + 1 / 64 + 4 / (64 * 256)  # bytes a weight: 4 bits, a scale of 8 bits per 64, its own scale per 256 of those
RUNTIME = {"cuda": 0.8, "cpu": 0.75}  # GiB: CUDA context and libraries / Python with torch, transformers and TRL
SLACK = 1.05  # the allocator's fragments
VLLM_ASLEEP = 0.7  # GiB that vLLM keeps in sleep mode
WORK = 9  # bytes for each value of an MLP's width that a block's backward pass holds at once (counted: 8 to 9.5)
TILE = (4096, 32768)  # tokens x vocabulary of the buffer in which TRL's fused head makes logits
TILE_COPIES = 7  # of it, in float32, beside it while its gradient is made without a Triton kernel (CPU)


@dataclass
class Batch:
    """What one stage puts through the model at a time, at worst; lengths in tokens."""

    rows: int  # a micro-batch
    length: int  # of the longest row, episode included
    completion: int  # of it, what is scored
    prompts: int  # different ones in a micro-batch: what rows share is read once (core/tree.py)
    accumulation: int
    generated: int = 0  # episodes that are played at once (GRPO)

    @property
    def tokens(self) -> int:
        return self.prompts * (self.length - self.completion) + self.rows * self.completion


def batch_of(recipe: Recipe, stage: str) -> Batch:
    config, lengths = getattr(recipe, stage).config, token_lengths(recipe)
    rows, steps = config.get("per_device_train_batch_size", 8), config.get("gradient_accumulation_steps", 1)
    if stage == "sft":
        longest = recipe.data.max_length if config.get("packing") else lengths["sft_train"][-1]
        return Batch(rows, longest, min(longest, recipe.agent.max_completion_length), rows, steps)
    episode, group = recipe.agent.max_completion_length, config.get("num_generations", 8)
    generated = config.get("generation_batch_size") or rows * config.get("steps_per_generation", steps)
    return Batch(rows, lengths["rl_train"][-1] + episode, episode, -(-rows // group), steps, generated)


def token_lengths(recipe: Recipe) -> dict[str, list[int]]:
    """[median, 95th percentile, longest] of the SFT rows and of the GRPO prompts: counted by step 2, or the limits."""
    limit = recipe.data.max_length
    prompt = max(limit - recipe.agent.max_completion_length, limit // 2)
    guess = {"sft_train": [limit // 2, limit, limit], "rl_train": [prompt // 2, prompt, prompt]}
    return guess | (read_manifest(recipe.data_dir) or {}).get("tokens", {})


@dataclass
class Memory:
    """GiB at the worst moment, by part."""

    parts: dict[str, float]

    @property
    def peak(self) -> float:
        return sum(self.parts.values())

    def __str__(self) -> str:
        return ", ".join(f"{name} {gib:.1f}" for name, gib in self.parts.items() if gib >= 0.05)


def stage_config(recipe: Recipe, stage: str, on: Device) -> tuple[dict, str]:
    """The stage's TRL fields as its step sets them on that device; for GRPO also the rollouts' engine, in a sentence.

    On this machine's own device it is what step 4 finds here. On a GPU by name (--gpu) vLLM is there if the recipe names
    it, and if the recipe leaves the choice open, vLLM is assumed where it is installed here.
    """
    config = getattr(recipe, stage).config
    if stage == "sft":
        return config, ""
    by_name, asked = on in GPUS.values(), config.get("use_vllm")
    fields, sentence = backend.generation_backend(recipe, on.kind == "cuda", True if by_name and asked else None)
    if by_name and asked is None and not config.get("use_transformers_continuous_batching"):
        found = "is" if backend.vllm_installed() else "is not"
        sentence += f" (assumed: grpo.use_vllm is not set, and vLLM {found} installed here)"
    return config | fields, sentence


def predict(recipe: Recipe, stage: str, on: Device) -> Memory:
    """The peak of `stage` (sft, grpo): what stays all the time, and the worst of its moments."""
    section, arch, batch = getattr(recipe, stage), architecture(recipe.model), batch_of(recipe, stage)
    wide = 2 if on.kind == "cuda" and on.bf16 else 4  # bytes of a value: bf16, or float32 where that is slow
    packed = arch.linear * (wide - NF4) if section.load_in_4bit else 0
    stored = 4 if section.lora is None else wide  # weights that are trained are float32 everywhere
    stays = {"runtime": RUNTIME[on.kind] * GIB, "weights": arch.parameters * stored - packed}
    if section.lora is None:
        trained, state = arch.parameters, stored
    else:
        trained, state = adapter_size(arch, section.lora), 2 if section.load_in_4bit else 4  # TRL: QLoRA's is bf16
        stays["adapter"] = trained * state
    stays["gradients"] = trained * state
    stays["optimizer"] = trained * 2 * (1 if "8bit" in section.config.get("optim", "") else state)
    if stage == "grpo" and section.config.get("beta") and section.lora is None:
        stays["reference"] = arch.parameters * wide
    moments = [_training(section, arch, batch, wide, on)]
    if stage == "grpo":
        config, _ = stage_config(recipe, stage, on)
        moments.append(_rollouts(config, arch, batch, wide, on))
        if config.get("vllm_enable_sleep_mode") and "vLLM" in moments[1]:
            moments[0]["vLLM"] = VLLM_ASLEEP * GIB
        elif "vLLM" in moments[1]:
            moments[0]["vLLM"] = moments[1]["vLLM"]
    worst = max(moments, key=lambda m: sum(m.values()))
    return Memory({name: size / GIB for name, size in (stays | worst).items()})


def adapter_size(arch: Architecture, lora) -> int:
    names = arch.matrices if isinstance(lora.target_modules, str) else lora.target_modules
    per_layer = sum(lora.r * sum(arch.matrices[name]) for name in names if name in arch.matrices)
    return per_layer * (len(lora.layers) or arch.layers)


def saved_bytes(arch: Architecture, batch: Batch, wide: int, lora: bool) -> float:
    """What one block keeps for the backward pass. `wide`: bytes of a value, 2 under autocast to bf16, else 4."""
    h, q, kv, m = arch.hidden, arch.queries, arch.keys, arch.intermediate
    norms = 2 * h * 4 + (0 if lora else 2 * h * wide) + (q + kv) * 4 * arch.qk_norm
    inputs = 2 * h + q  # of the seven linear layers
    if lora and wide == 2:
        inputs = 5 * h + q  # peft casts to the adapter's float32 and autocast back: a copy for each adapter
    padded = batch.rows * batch.length  # attention is computed row by row, with keys and values repeated to all heads
    attention = padded * (4 * q + batch.length) * wide
    return batch.tokens * (norms + (inputs + 4 * m) * wide) + attention


def _training(section, arch: Architecture, batch: Batch, wide: int, on: Device) -> dict[str, float]:
    """A micro-batch forward and back. What is kept stays while first the head, then block after block works."""
    tokens, scored = batch.tokens, batch.rows * batch.completion
    block = saved_bytes(arch, batch, wide, section.lora is not None)
    work = tokens * arch.intermediate * WORK
    kept = tokens * arch.hidden * 4 + scored * arch.hidden * wide  # the last norm, the head's input
    if section.config.get("activation_checkpointing", True):
        kept += tokens * arch.hidden * wide * arch.layers
        work += block
    else:
        kept += block * arch.layers
    if section.lora is None and arch.tied:
        work += arch.embedding * wide  # the head's gradient waits for the embedding's
    if section.load_in_4bit:
        work += arch.hidden * arch.intermediate * wide  # a matrix unpacked
    tile = min(scored, TILE[0])
    head = tile * TILE[1] * wide + scored * arch.hidden * 4
    if on.kind == "cpu":
        head += tile * min(arch.vocab, TILE[1]) * 4 * TILE_COPIES
    if section.lora is None:
        head += arch.embedding * 4
    if head > work:
        return {"activations": kept * SLACK, "logits": head}
    return {"activations": (kept + work) * SLACK}


def _rollouts(config: dict, arch: Architecture, batch: Batch, wide: int, on: Device) -> dict[str, float]:
    """While episodes are written: vLLM's share, or the keys and values of the whole generation batch."""
    if config["use_vllm"]:
        if config["vllm_mode"] == "server":
            return {}
        return {"vLLM": config.get("vllm_gpu_memory_utilization", 0.3) * on.gib * GIB}
    cache = batch.generated * batch.length * 2 * arch.layers * arch.keys * wide
    return {"KV cache": cache * SLACK, "logits": batch.generated * arch.vocab * 4 * 3}


# ---------------------------------------------------------------------------------------------------------------- time

MFU = 0.35  # share of the tensor cores' peak that training reaches
READ = 0.6  # share of the memory's bandwidth that decoding reaches
TOKEN_OVERHEAD = 0.008  # seconds of a decoding step that are spent outside the GPU
LONGEST = 1.6  # the longest episode of a batch against the mean one: all wait for it


@dataclass
class Time:
    """Seconds of one optimizer step, by part, and how many steps there are."""

    parts: dict[str, float]
    steps: int

    def __str__(self) -> str:
        step = sum(self.parts.values())
        parts = " + ".join(f"{name} {seconds:.1f}" for name, seconds in self.parts.items())
        return f"{step:.1f} s a step ({parts}), {self.steps} steps, {step * self.steps / 3600:.1f} h"


def step_time(recipe: Recipe, stage: str, on: Device, written: float | None = None) -> Time | None:
    """By calculation; None where the device's speed is unknown. `written`: tokens a policy writes in a mean episode."""
    if not on.tflops:
        return None
    section, arch, batch, lengths = (
        getattr(recipe, stage), architecture(recipe.model), batch_of(recipe, stage), token_lengths(recipe),
    )  # fmt: skip
    passes = 2 + (section.lora is None) + section.config.get("activation_checkpointing", True)
    speed = on.tflops * 1e12 * MFU
    rows = batch.rows * batch.accumulation
    if stage == "sft":
        length = lengths["sft_train"][0]
        parts = {"update": rows * _flops(arch, length, length - lengths["rl_train"][0]) * passes / speed}
        return Time(parts, run_steps(recipe, stage, rows))
    prompt, episode = lengths["rl_train"][0], recipe.agent.max_completion_length
    written = written or episode / 3
    read = min(episode, written * 1.5)  # with the tool's results
    group = section.config.get("num_generations", 8)
    forward = rows / group * _flops(arch, prompt, 0) + rows * (
        _flops(arch, prompt + read, read) - _flops(arch, prompt, 0)
    )
    if stage_config(recipe, stage, on)[0]["use_vllm"]:
        passes += 1  # log-probabilities of the trainer beside the sampler's
    moved = arch.parameters * 2 + batch.generated * (prompt + read / 2) * 4 * arch.layers * arch.keys
    decoding = TOKEN_OVERHEAD + moved / (on.bandwidth * 1e9 * READ)
    parts = {"rollouts": written * LONGEST * decoding + forward / speed, "update": forward * passes / speed}
    parts["rollouts"] *= rows / batch.generated
    return Time(parts, run_steps(recipe, stage, rows / group))


def _flops(arch: Architecture, length: float, scored: float) -> float:
    """Of one forward pass over a row: matrices, attention over the half it sees, the head where it is scored."""
    return length * (2 * arch.linear + 2 * length * arch.queries * arch.layers) + 2 * max(0, scored) * arch.embedding


def run_steps(recipe: Recipe, stage: str, taken: float) -> int:
    """Optimizer steps of a run that takes so many rows (SFT) or prompts (GRPO) in each."""
    config = getattr(recipe, stage).config
    if config.get("max_steps", -1) > 0:
        return config["max_steps"]
    counts = (read_manifest(recipe.data_dir) or {}).get("counts", {})
    rows = counts.get({"sft": "sft_train", "grpo": "rl_train"}[stage]) or getattr(
        recipe.data, {"sft": "train", "grpo": "rl"}[stage]
    )
    return max(1, round(rows * config.get("num_train_epochs", 3) / taken))


ASSUMPTIONS = (
    f"Calculated for one GPU, not measured on one: {RUNTIME['cuda']} GiB for CUDA itself, {SLACK - 1:.0%} of activations lost in "
    f"fragments, every micro-batch full of longest rows; {MFU:.0%} of the tensor cores' peak while training, {READ:.0%} "
    f"of the bandwidth while decoding and {TOKEN_OVERHEAD * 1000:.0f} ms a token beside it, the longest episode of a "
    f"batch {LONGEST} times the mean one; environments and start-up are left out."
)


CPU_ASSUMPTIONS = (
    f"Calculated for this CPU: {RUNTIME['cpu']} GiB for Python and its libraries, {SLACK - 1:.0%} of activations lost in fragments, "
    "every micro-batch full of longest rows; what loading, merging and evaluation hold beside that is left out. A CPU's speed "
    "is not calculated: times here are those of rollouts or runs that were measured."
)


def measured(recipe: Recipe, stage: str) -> str:
    """What this run's own stage took the last time, from its manifest and its log; empty where it has neither."""
    from core.report import training_curves

    folder = recipe.run_dir / stage
    series, manifest = (training_curves(folder) or {}).get("series", {}), read_manifest(folder) or {}
    memory, now, then = manifest.get("memory", {}), recipe.to_dict(), manifest.get("recipe", {})
    peaks = [gib for gib in (*series.get("memory_gib", ()), memory.get("memory_gib")) if gib]
    times = [seconds for seconds in series.get("step_time", ()) if seconds]
    parts = [f"peak {max(peaks):.1f} GiB"] if peaks else []
    parts += [f"predicted then {memory['peak_gib']:.1f}"] if peaks and "peak_gib" in memory else []
    parts += [f"{statistics.median(times):.1f} s a step"] if times else []
    if not parts:
        return ""
    other = [k for k in ("model", "agent", "data", stage) if then and then.get(k) != now.get(k)]
    changed = f", with other settings of {', '.join(other)}" if other else ""
    where = f" on {manifest['device']}" if manifest.get("device") else " in a run that is not finished"
    return f"measured{where}{changed}: {', '.join(parts)}"


def rollouts_time(recipe: Recipe, seconds: float) -> str:
    """A GRPO step of a device whose speed is unknown, from the seconds that an episode took there."""
    batch = batch_of(recipe, "grpo")
    rows = batch.rows * batch.accumulation
    steps = run_steps(recipe, "grpo", rows / recipe.grpo.config.get("num_generations", 8))
    step = rows * seconds
    return (
        f"about {step:.1f} s a step for its {rows} rollouts at {seconds:.2f} s each, as played here; {steps} steps, "
        f"{step * steps / 3600:.1f} h; the updates come on top"
    )


def report(recipe: Recipe, on: Device, written: float | None = None, rollout: float | None = None) -> list[str]:
    """Both stages on a device, in lines. `rollout`: seconds of an episode, as just played on it."""
    lines = []
    for stage in ("sft", "grpo"):
        try:
            need = predict(recipe, stage, on)
        except UserError as unknown:
            return [str(unknown)]
        fits = "fits" if need.peak <= on.gib else "does NOT fit"
        lines.append(f"{stage.upper():4} {fits}: peak {need.peak:.1f} GiB of {on.gib:.1f} GiB on {on.name}: {need}")
        if engine := stage_config(recipe, stage, on)[1]:
            lines.append(f"     rollouts by {engine}")
        if time := step_time(recipe, stage, on, written):
            lines.append(f"     {time}")
        elif stage == "grpo" and rollout:
            lines.append(f"     {rollouts_time(recipe, rollout)}")
        if line := measured(recipe, stage):
            lines.append(f"     {line}")
    return [*lines, ASSUMPTIONS if on.kind == "cuda" else CPU_ASSUMPTIONS]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--gpu", metavar="NAME", help=f"instead of the one found: {', '.join(GPUS)}")


def main() -> None:
    recipe, args = load_recipe_args(__doc__, add_arguments)
    if not (recipe.data_dir / "manifest.json").exists():
        print(f"{recipe.data_dir} is not there yet: lengths are the recipe's limits, not step 2's counts")
    print("\n".join(report(recipe, device(args.gpu))))


if __name__ == "__main__":
    run_step(main)

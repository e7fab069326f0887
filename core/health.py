"""The health of a run: figures of each step's episodes, alarms that say what to change, and sample episodes on disk.

`Alarms` sees every logged step; an alarm is one line that says what it means. `Observed` lets the observers here and
core.checks.SamplerCheck look at GRPO's batches; `Samples` keeps some episodes in the format of step 5's episodes.jsonl.
"""

import json
import math
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

from transformers import TrainerCallback

from core import fit
from core.artifacts import read_jsonl, write_jsonl
from core.episodes import tells_error

WINDOW = 5  # logged steps that an early and a late mean are made of
Series = dict[str, list[float]]  # metric -> its values so far


@dataclass(frozen=True)
class Rule:
    name: str
    sick: Callable[[Series], bool]
    text: str  # what it means, what to change


def early(values: list[float]) -> float:
    return statistics.fmean(values[:WINDOW])


def late(values: list[float]) -> float:
    return statistics.fmean(values[-WINDOW:])


def enough(values: list[float]) -> bool:
    return len(values) >= 2 * WINDOW


def _tool_use(s: Series) -> bool:
    values = s["episode/tool_use"]
    best = max((late(values[: n + 1]) for n in range(WINDOW - 1, len(values))), default=0.0)
    return enough(values) and best >= 0.3 and late(values) < 0.5 * best


def _climbs(name: str, least: float) -> Callable[[Series], bool]:
    return lambda s: enough(s[name]) and late(s[name]) > max(least, 2 * early(s[name]))


def _entropy(s: Series) -> bool:
    values = s["entropy"]  # SFT's falls as it should: there the policy is shown one right answer
    return bool(s["reward"]) and enough(values) and late(values) < 0.2 * early(values)


def _held_out(rows: int) -> Callable[[Series], bool]:
    """The last two accuracies lie a standard error below the best, while the reward has risen since then."""

    def sick(s: Series) -> bool:
        accuracy, rewards = s["held_out/accuracy"], s["held_out/reward"]  # reward: the mean when accuracy was measured
        if len(accuracy) < 3:
            return False
        best = max(accuracy[:-2])
        below = max(accuracy[-2:]) < best - math.sqrt(max(best * (1 - best), 0.05) / max(1, rows))
        return below and rewards[-1] > rewards[accuracy.index(best)]

    return sick


def _not_a_number(s: Series) -> bool:
    return any(s[name] and not math.isfinite(s[name][-1]) for name in ("loss", "grad_norm"))


def rules(held_out_rows: int = 0) -> list[Rule]:
    return [
        Rule("tool use collapses", _tool_use,
             "the model answers without its tool. Lower grpo.learning_rate, train SFT longer, and see in samples.jsonl "
             "whether a reward pays for answers without a call"),
        Rule("parse failures climb", _climbs("episode/parse_failures", 0.05),
             "tool calls are written that no parser reads. Lower grpo.learning_rate or grpo.temperature, raise the weight "
             "of the format reward"),
        Rule("entropy collapses", _entropy,
             "episodes of a question become copies of each other, and nothing new is tried. Lower grpo.learning_rate, raise "
             "grpo.epsilon_high or grpo.temperature, or stop here and take the last good checkpoint"),
        Rule("truncation climbs", _climbs("completions/clipped_ratio", 0.1),
             "episodes run out of tokens before they answer. Raise agent.max_completion_length, set "
             "grpo.mask_truncated_completions true, or give the reward for brevity more weight"),
        Rule("reward rises, held-out accuracy falls", _held_out(held_out_rows),
             "the policy learns the rewards and not the task. Read samples.jsonl, run python -m rewards.probe on step 5's "
             "episodes, lower the shaping weights in grpo.rewards, or take the checkpoint of the best accuracy"),
        Rule("no group has spread", lambda s: enough(s["frac_reward_zero_std"]) and late(s["frac_reward_zero_std"]) > 0.9,
             "all episodes of a question earn the same, so nothing is learnt. Choose easier or harder questions "
             "(data.hardness), raise grpo.num_generations or grpo.temperature"),
        Rule("loss is not a number", _not_a_number,
             "weights are or will be broken. Lower the learning rate, set max_grad_norm 0.2, and go on from the checkpoint "
             "before (delete the newest)"),
        Rule("no tool calls on held-out rows", lambda s: bool(s["eval_tool_use"]) and s["eval_tool_use"][-1] < 0.5,
             "most held-out episodes hold no call that parses: GRPO would have nothing to start from. Train SFT longer or on "
             "more rows (sft.num_train_epochs, data.train), or use a larger sft.learning_rate or lora.r"),
    ]  # fmt: skip


class Alarms:
    """Feed it every log; it returns the lines to print. An alarm speaks when it begins, not at every step it lasts."""

    def __init__(self, held_out_rows: int = 0):
        self.rules, self.series, self.on = rules(held_out_rows), defaultdict(list), set()

    def update(self, logs: dict) -> list[str]:
        for name, value in logs.items():
            if isinstance(value, int | float):
                self.series[name].append(value)
        if "held_out/accuracy" in logs:
            self.series["held_out/reward"].append(late(self.series["reward"]) if self.series["reward"] else 0.0)
        sick = [rule for rule in self.rules if rule.sick(self.series)]
        lines = [f"ALARM: {rule.name}: {rule.text}" for rule in sick if rule.name not in self.on]
        self.on = {rule.name for rule in sick}
        return lines


class Observed:
    """Mixin for GRPOTrainer: `observers` see every generated batch, and tokens come with the sampler's log-probabilities."""

    observers: tuple = ()  # called with (trainer, rows, batch)

    def _generate_single_turn(self, *args, **kwargs):
        ids, logprobs = super()._generate_single_turn(*args, **kwargs)
        return ids, getattr(self.model.generate, "logprobs", None) if logprobs is None else logprobs

    def _generate_and_score_completions(self, inputs):
        batch = super()._generate_and_score_completions(inputs)
        for look in self.observers:
            look(self, inputs, batch)
        return batch


def completions_of(trainer, inputs: list[dict]) -> list[list[dict]]:
    """The messages of this process's newest episodes; TRL's log holds those of all processes, in their order."""
    if "episode" in inputs[0]:  # a workflow's, which TRL reads as one text
        return [row["episode"] for row in inputs]
    count = len(inputs)
    everyone = list(trainer._logs["completion"])[-count * trainer.accelerator.num_processes :]
    start = count * trainer.accelerator.process_index
    return everyone[start : start + count]


def episode_figures(trainer, inputs: list[dict], batch: dict) -> None:
    """Observer: what the batch's episodes did, into the trainer's log (tensorboard, wandb, metrics.jsonl)."""
    import torch

    found = [_figures(completion) for completion in completions_of(trainer, inputs)]
    sums = torch.tensor(
        [sum(f[k] for f in found) for k in FIGURES], dtype=torch.float, device=trainer.accelerator.device
    )
    sums = trainer.accelerator.gather(sums).view(-1, len(FIGURES)).sum(0).tolist()
    totals = dict(zip(FIGURES, sums, strict=True))
    log = trainer._metrics["train" if trainer.model.training else "eval"]
    for name in ("turns", "tool_use", "parse_failures"):
        log[f"episode/{name}"].append(totals[name] / totals["episodes"])
    log["episode/tool_errors"].append(totals["errors"] / max(1.0, totals["results"]))


FIGURES = ("episodes", "turns", "tool_use", "parse_failures", "results", "errors")


def _figures(completion: list[dict]) -> dict[str, int]:
    turns = [m for m in completion if m["role"] == "assistant"]
    results = [m for m in completion if m["role"] == "tool"]
    unread = any(tag in (m.get("content") or "") for m in turns for tag in ("<tool_call>", "</tool_call>"))
    errors = sum(tells_error(str(m["content"])) for m in results)
    return dict(zip(FIGURES, (1, len(turns), bool(results), unread, len(results), errors), strict=True))


EPISODE_COLUMNS = {  # of GRPO's progress line, after the rewards
    "held_out/accuracy": "held-out accuracy",
    "frac_reward_zero_std": "no-spread groups",
    "resample/useful": "useful groups",
    "episode/turns": "turns",
    "tools/call_frequency": "calls",
    "episode/tool_errors": "errors",
    "episode/parse_failures": "unparsed",
    "completions/clipped_ratio": "cut",
    "kl": "KL",
    "entropy": "entropy",
    "sampler_gap": "sampler gap",
    "step_time": "seconds",
}


class Measure(TrainerCallback):
    """Tokens a second and peak memory of every step, into the trainer's log."""

    def __init__(self, trainer):
        self.log, self.last = trainer._metrics["train"], None

    def on_step_end(self, args, state, control, **kwargs):
        now, total = time.perf_counter(), (self.log.get("num_tokens") or [None])[-1]
        if self.last and total is not None and total >= self.last[1]:
            self.log["tokens_per_second"].append((total - self.last[1]) / (now - self.last[0]))
        self.last = (now, total) if total is not None else None
        self.log["memory_gib"].append(fit.used()["memory_gib"])


class Samples:
    """Observer: episodes of every `every`-th step into samples.jsonl, as step 5 writes them, with the step beside.

    When the file holds more than `most` episodes, only those of every second, fourth, ... such step stay, and the newest.
    """

    def __init__(self, folder: Path, agent, judge, every: int = 10, count: int = 8, most: int = 400):
        self.path, self.stage, self.agent, self.judge = folder / "samples.jsonl", folder.name, agent, judge
        self.every, self.count, self.most, self.last = every, count, most, None

    def __call__(self, trainer, inputs: list[dict], batch: dict) -> None:
        step = trainer.state.global_step
        if step % self.every or step == self.last or not trainer.accelerator.is_main_process:
            return
        self.last, episodes = step, []
        for i, completion in enumerate(completions_of(trainer, inputs)[: self.count]):
            shown, prompt = batch["completion_mask"][i].bool(), batch["prompt_mask"][i].bool()
            ids = batch["completion_ids"][i][shown].tolist()
            wrote = batch["tool_mask"][i][shown].tolist() if "tool_mask" in batch else [1] * len(ids)
            episodes.append(
                SimpleNamespace(
                    row=inputs[i], completion=completion, agent=self.agent, sample=i, error="", seconds=0.0,
                    turns=sum(m["role"] == "assistant" for m in completion), tokens=sum(wrote),
                    truncated=not ids or ids[-1] != trainer.processing_class.eos_token_id,
                    prompt_ids=batch["prompt_ids"][i][prompt].tolist(), completion_ids=ids, mask=wrote,
                )
            )  # fmt: skip
        self.add(step, self.records_of(episodes))

    def records_of(self, episodes: list) -> list[dict]:
        from core.episodes import records_of

        return records_of(episodes, self.stage, self.judge)  # `judge` is the package `rewards`

    def add(self, step: int, records: list[dict]) -> None:
        kept = read_jsonl(self.path) if self.path.exists() else []
        again = {r["id"] for r in records}  # after a resume; held-out questions of the same step are others
        kept = [r for r in kept if r["step"] < step or (r["step"] == step and r["id"] not in again)]
        kept += [{"step": step} | r for r in records]
        stride = self.every
        while len(kept) > self.most and stride <= step:
            stride *= 2
            kept = [r for r in kept if r["step"] % stride == 0 or r["step"] == step]
        kept = kept[-self.most :]
        write_jsonl(self.path, kept)


def cut_log(path: Path, step: int) -> list[dict]:
    """The records of metrics.jsonl up to `step`, with which it is written anew: a resumed run repeats what came after."""
    if not path.exists():
        return []
    kept = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            record = json.loads(line)
        except json.JSONDecodeError:  # cut by a crash
            continue
        kept += [record] if record["step"] <= step else []
    write_jsonl(path, kept)
    return kept

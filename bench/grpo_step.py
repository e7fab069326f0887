"""GRPO steps of this project against a plain TRL script: same model, tasks, environments, batch, seed; one run, ratios.

    python bench/grpo_step.py [--config recipes/demo.yaml] [--model FOLDER] [--steps 3]

The plain script is what TRL's documentation leads to: GRPOTrainer with environment_factory, `model.generate`, the whole
batch in the recipe's micro-batches. The two take turns step by step, so that noise of the machine meets both. A group is
useful if its rewards differ; what is generated is random, so time is also given per token of the completions. Data of
the recipe must exist (step2); --model takes a trained folder, the recipe's SFT result by default.
"""

import argparse
import functools
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))


def clocked(trainer_class, times: Counter):
    """The trainer with its parts timed; tools count as environment, not as generation."""

    class Clocked(trainer_class):
        def _generate_single_turn(self, *args, **kwargs):
            with clock(times, "generate"):
                return super()._generate_single_turn(*args, **kwargs)

        def _calculate_rewards(self, *args, **kwargs):
            with clock(times, "reward"):
                return super()._calculate_rewards(*args, **kwargs)

        def _generate_and_score_completions(self, inputs):
            with clock(times, "rollout"):
                out = super()._generate_and_score_completions(inputs)
            times["tokens"] += int(out["completion_mask"].sum())
            return out

        def training_step(self, *args, **kwargs):
            with clock(times, "step"):
                return super().training_step(*args, **kwargs)

    return Clocked


class clock:
    def __init__(self, times, name):
        self.times, self.name = times, name

    def __enter__(self):
        self.began = time.perf_counter()

    def __exit__(self, *error):
        self.times[self.name] += time.perf_counter() - self.began


def timed_environment(environment, times: Counter):
    """The same environment, its tools timed under their own names and docstrings."""

    def timed(method):
        @functools.wraps(method)
        def call(*args, **kwargs):
            with clock(times, "environment"):
                return method(*args, **kwargs)

        return call

    tools = {n: timed(m) for n, m in vars(environment).items() if callable(m) and not n.startswith("_")}
    return type(environment.__name__, (environment,), tools)


def build(recipe, source, rows, ours: bool, times: Counter, output: str):
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    from core import train as training
    from core.decode import fast_generate
    from core.grpo import GroupTrainer
    from core.models import load_model, load_tokenizer, lora_config
    from envs import ENVIRONMENTS
    from rewards import REWARDS
    from tasks.prepare import environment_limits

    tokenizer = load_tokenizer(source)
    config = training.DEFAULTS | recipe.grpo.config | training.common_arguments(recipe, Path(output))
    config |= {"report_to": "none", "save_strategy": "no", "max_steps": 10**6, "log_completions": False}
    config |= {"max_completion_length": recipe.agent.max_completion_length, "logging_strategy": "no"}
    config |= {"max_tool_calling_iterations": recipe.agent.max_turns, "disable_tqdm": True}
    names = sorted({row["environment"] for row in rows})
    model = load_model(source)
    trainer = clocked(GroupTrainer if ours else GRPOTrainer, times)(
        model=model,
        args=GRPOConfig(**config | {"reward_weights": list(recipe.grpo.rewards.values())}),
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        reward_funcs=[REWARDS[name] for name in recipe.grpo.rewards],
        environment_factory={
            n: functools.partial(timed_environment(ENVIRONMENTS[n], times), **environment_limits(recipe, n))
            for n in names
        },
        peft_config=lora_config(recipe.grpo.lora, model),
    )
    if ours:
        trainer.model.generate = fast_generate(trainer.model, [tokenizer.eos_token_id], tokenizer.pad_token_id)
    trainer.create_optimizer_and_scheduler(10**6)
    return trainer


def one_step(trainer, batches) -> None:
    """One optimizer step as the Trainer's loop makes it."""
    steps = trainer.args.gradient_accumulation_steps
    trainer.current_gradient_accumulation_steps = steps
    for inputs in [next(batches) for _ in range(steps)]:
        trainer.training_step(trainer.model, inputs, None)
    trainer.optimizer.step()
    trainer.optimizer.zero_grad()
    trainer.state.global_step += 1


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="recipes/demo.yaml")
    parser.add_argument("--data_root", default="data")
    parser.add_argument("--model", help="default: the recipe's SFT result")
    parser.add_argument("--steps", type=int, default=3)
    args = parser.parse_args()
    from core import train as training
    from core.artifacts import read_jsonl
    from core.config import load_recipe
    from core.models import stage_source

    training.quiet()
    recipe = load_recipe(args.config, ["--data_root", args.data_root])
    source = args.model or stage_source(recipe, "sft")
    rows = read_jsonl(recipe.data_dir / "rl_train.jsonl", f"python step2_prepare_data.py --config {args.config}")
    times = {"plain TRL": Counter(), "ours": Counter()}
    with tempfile.TemporaryDirectory() as output:
        trainers = {n: build(recipe, source, rows, n == "ours", t, output) for n, t in times.items()}
        batches = {n: iter(trainer.get_train_dataloader()) for n, trainer in trainers.items()}
        for step in range(args.steps + 1):
            for name, trainer in trainers.items():
                if step == 1:  # the first step warms caches
                    times[name].clear()
                    trainer._metrics["train"].clear()
                one_step(trainer, batches[name])
                print(f"step {step}/{args.steps} {name}: {times[name]['step']:.1f} s so far", flush=True)
    table(trainers, times, args.steps)


def table(trainers, times, steps: int) -> None:
    groups = next(iter(trainers.values())).args.generation_batch_size // next(iter(trainers.values())).num_generations
    print(f"\n{'seconds a step':<26}" + "".join(f"{name:>12}" for name in times) + f"{'ratio':>8}")
    found = {}
    for name, t in times.items():
        spread = trainers[name]._metrics["train"]["frac_reward_zero_std"]
        useful = groups * (steps - sum(spread) * steps / len(spread))
        found[name] = {part: t[part] / steps for part in ("step", "generate", "environment", "reward")}
        found[name]["update"] = (t["step"] - t["rollout"]) / steps
        found[name]["per useful group"] = t["step"] / max(useful, 1e-9)
        found[name]["per 1,000 tokens"] = 1000 * t["step"] / t["tokens"]
    for part in next(iter(found.values())):
        values = [f[part] for f in found.values()]
        print(f"{part:<26}" + "".join(f"{v:12.2f}" for v in values) + f"{values[1] / values[0]:8.2f}")
    ours = found["ours"]
    print(f"environment and reward: {(ours['environment'] + ours['reward']) / ours['step']:.1%} of our step")


if __name__ == "__main__":
    main()

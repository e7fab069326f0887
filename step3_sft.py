"""Step 3: SFT teaches the format. LoRA (or QLoRA, or all weights) on the trajectories, loss on assistant turns only.

Reads   data/<run>/sft_train.jsonl, sft_val.jsonl
Writes  checkpoints/<run>/sft/{adapter,merged,checkpoint-*,metrics.jsonl,samples.jsonl,manifest.json}; resumes by itself

    python step3_sft.py --config recipes/demo.yaml
    python step3_sft.py --config recipes/spider-qwen2.5-coder-1.5b-24gb.yaml --sft.load_in_4bit true
"""

import time

from core import fit
from core.config import load_recipe_args, run_step


def add_arguments(parser):
    parser.add_argument("--restart", action="store_true", help="throw away what this stage has so far")
    fit.add_argument(parser)
    parser.add_argument("--skip_checks", action="store_true", help="start even if the self-checks would refuse to")


def main():
    recipe, args = load_recipe_args(__doc__, add_arguments)
    with fit.fitted(recipe, "sft", args.auto_fit):
        train(recipe, args)


def train(recipe, args):
    from core.artifacts import read_jsonl
    from core.ranks import check_sharded

    started, folder = time.time(), recipe.run_dir / "sft"
    files = [recipe.data_dir / "sft_train.jsonl", recipe.data_dir / "sft_val.jsonl"]
    make = f"python step2_prepare_data.py {args.words}"
    train, val = (read_jsonl(file, make) for file in files)

    import rewards
    from core import checks, sft
    from core import train as training
    from core.health import Samples
    from core.held_out import HeldOut
    from core.models import load_model, load_tokenizer, lora_config, model_source, untrained_tokens
    from core.workflow import prompt_tools
    from envs import ENVIRONMENTS
    from rewards.probe import every_cheat
    from tasks.prepare import check_prepared, environment_limits

    training.quiet()
    check_prepared(recipe, make)
    from trl import SFTConfig

    settings = recipe.sft
    config = training.DEFAULTS | {"max_length": None, "eval_strategy": "no", "per_device_eval_batch_size": 8}
    if settings.config.get("packing"):
        config["max_length"] = recipe.data.max_length
    config |= settings.config | training.common_arguments(recipe, folder)
    if settings.accuracy_rows:
        config |= sft.best_by_accuracy(config)
    check_sharded(settings.load_in_4bit, accuracy_rows=settings.accuracy_rows)
    arguments, source = training.arguments(SFTConfig, "sft", config), model_source(recipe.model)
    asked = training.experiment(recipe, "sft", files, max_length=config["max_length"])
    if training.is_finished(folder, asked, args.restart):
        return
    tokenizer = load_tokenizer(source)
    tools = {name: prompt_tools(recipe.agent, make()) for name, make in ENVIRONMENTS.items()}
    checks.before_training(tokenizer, train, tools, rewards, recipe.grpo.rewards, every_cheat, args.skip_checks)

    from datasets import Dataset

    training.trackers(folder, config["report_to"])
    model = load_model(source, settings.load_in_4bit, train_all=settings.lora is None)
    new_tokens = untrained_tokens(model, tokenizer)
    if new_tokens and settings.lora:
        print(f"{', '.join(tokenizer.convert_ids_to_tokens(new_tokens))}: untrained in this base, their rows train too")
    rows, held_out = (
        [sft.labelled(tokenizer, row, tools[row["environment"]]) for row in split] for split in (train, val)
    )
    trainer = sft.AccuracyTrainer(
        model=model,
        args=arguments,
        train_dataset=Dataset.from_list(rows),
        eval_dataset=Dataset.from_list(held_out),
        processing_class=tokenizer,
        peft_config=lora_config(settings.lora, model, new_tokens),
    )
    if settings.accuracy_rows:

        def make_env(row):
            return ENVIRONMENTS[row["environment"]](**environment_limits(recipe, row["environment"]))

        samples = Samples(folder, recipe.agent, rewards)
        trainer.held_out = HeldOut(val[: settings.accuracy_rows], tokenizer, recipe, make_env, samples)
    if not args.skip_checks:
        checks.check_labels(trainer, rows)
        trainer.add_callback(checks.AdapterCheck(rows[0]["input_ids"]))
    columns = {
        "loss": "loss",
        "eval_loss": "held-out loss",
        "eval_accuracy": "held-out accuracy",
        "eval_tool_use": "with tool calls",
        "mean_token_accuracy": "token accuracy",
        "grad_norm": "grad",
    }
    training.speak(trainer, folder, columns)
    print(
        f"SFT: {len(train)} rows, {sum(p.numel() for p in trainer.model.parameters() if p.requires_grad):,} weights train"
    )
    training.train(trainer, folder)
    figures = sft.best_figures(trainer)
    training.finish(recipe, folder, trainer, tokenizer, source, files, started, rows[0]["input_ids"], **figures)


if __name__ == "__main__":
    run_step(main)

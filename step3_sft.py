"""Step 3: SFT teaches the format. LoRA (or QLoRA, or all weights) on the trajectories, loss on assistant turns only.

Reads   data/<run>/sft_train.jsonl, sft_val.jsonl
Writes  checkpoints/<run>/sft/{adapter,merged,checkpoint-*,metrics.jsonl,manifest.json}; resumes by itself

    python step3_sft.py --config recipes/demo.yaml
    python step3_sft.py --config recipes/spider-qwen2.5-coder-1.5b-24gb.yaml --sft.load_in_4bit true
"""

import time

from core import fit
from core.config import load_recipe_args, run_step


def add_arguments(parser):
    parser.add_argument("--restart", action="store_true", help="throw away what this stage has so far")
    fit.add_argument(parser)


def main():
    recipe, args = load_recipe_args(__doc__, add_arguments)
    with fit.fitted(recipe, "sft", args.auto_fit):
        train(recipe, args)


def train(recipe, args):
    import shutil

    from core.artifacts import read_jsonl
    from core.ranks import check_sharded, on_main

    started, folder = time.time(), recipe.run_dir / "sft"
    if args.restart:
        on_main(shutil.rmtree)(folder, ignore_errors=True)
    files = [recipe.data_dir / "sft_train.jsonl", recipe.data_dir / "sft_val.jsonl"]
    make = f"python step2_prepare_data.py --config {args.config}"
    train, val = (read_jsonl(file, make) for file in files)

    from core import train as training
    from core.chat import render
    from core.checks import check_rendering
    from core.models import load_model, load_tokenizer, lora_config, model_source
    from core.tree import attend_in_tree, collate, packs_exactly, score_labelled_positions_only
    from core.workflow import prompt_tools
    from envs import ENVIRONMENTS

    training.quiet()
    if training.is_finished(folder, recipe):
        return
    check_sharded(recipe.sft.load_in_4bit)
    source = model_source(recipe.model)
    tokenizer = load_tokenizer(source)
    tools = {name: prompt_tools(recipe.agent, make()) for name, make in ENVIRONMENTS.items()}
    for row in train[:32]:
        check_rendering(tokenizer, row, tools[row["environment"]])
    print(f"self-check: rendering, loss mask, parser and stop token agree with the rollout on {len(train[:32])} rows")

    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    def tokens(row):
        ids, mask = render(tokenizer, row["messages"], tools[row["environment"]])
        return {"input_ids": ids, "labels": [i if m else -100 for i, m in zip(ids, mask, strict=True)]}

    config = training.DEFAULTS | {"max_length": None, "eval_strategy": "no", "per_device_eval_batch_size": 8}
    config |= recipe.sft.config | training.common_arguments(recipe, folder)
    model = load_model(source, recipe.sft.load_in_4bit)
    score_labelled_positions_only()
    as_tree = packs_exactly(model.config)
    if as_tree:
        attend_in_tree(model)
    trainer = SFTTrainer(
        model=model,
        args=SFTConfig(**config),
        train_dataset=Dataset.from_list([tokens(row) for row in train]),
        eval_dataset=Dataset.from_list([tokens(row) for row in val]),
        processing_class=tokenizer,
        peft_config=lora_config(recipe.sft.lora),
        data_collator=collate if as_tree else None,
    )
    columns = {
        "loss": "loss",
        "eval_loss": "held-out loss",
        "mean_token_accuracy": "token accuracy",
        "grad_norm": "grad",
    }
    training.speak(trainer, folder, columns)
    print(
        f"SFT: {len(train)} rows, {sum(p.numel() for p in trainer.model.parameters() if p.requires_grad):,} weights train"
    )
    trainer.train(resume_from_checkpoint=training.last_checkpoint(folder))
    held_out = trainer.evaluate()["eval_loss"]
    training.finish(recipe, folder, trainer, tokenizer, source, files, started, held_out_loss=held_out)


if __name__ == "__main__":
    run_step(main)

"""Step 4: GRPO on multi-turn episodes. The environment really runs the SQL or the calculation, rewards score it.

Reads   data/<run>/rl_train.jsonl, checkpoints/<run>/sft/merged
Writes  data/<run>/difficulty.jsonl (with grpo.rate_difficulty),
        checkpoints/<run>/grpo/{adapter,merged,checkpoint-*,metrics.jsonl,samples.jsonl,manifest.json}; resumes by itself

    python step4_grpo.py --config recipes/demo.yaml --dry_run      # 10 prompts: every turn, reward, mask and check
    python step4_grpo.py --config recipes/demo.yaml
    python step4_grpo.py --config recipes/spider-qwen2.5-coder-1.5b-80gb.yaml --rate_difficulty 4 --resample 2
"""

import os
import time
from pathlib import Path

from core import dryrun, fit
from core.config import RecipeError, UserError, load_recipe_args, run_step


def add_arguments(parser):
    parser.add_argument("--restart", action="store_true", help="throw away what this stage has so far")
    parser.add_argument("--skip_checks", action="store_true", help="start even if the self-checks would refuse to")
    parser.add_argument(
        "--from_stage", default="sft", help="stage or folder to start from (default sft; base = no SFT)"
    )
    fit.add_argument(parser)
    dryrun.add_arguments(parser)


def main():
    recipe, args = load_recipe_args(__doc__, add_arguments)
    if args.dry_run:
        return dry_run(recipe, args)
    dryrun.refuse_arguments(args)
    with fit.fitted(recipe, "grpo", args.auto_fit):
        train(recipe, args)


def train(recipe, args):
    import functools

    from core.artifacts import read_jsonl
    from core.ranks import check_sharded
    from rewards import REWARDS, main_reward, main_scores

    started, folder = time.time(), recipe.run_dir / "grpo"
    unknown = set(recipe.grpo.rewards) - set(REWARDS)
    if unknown or not recipe.grpo.rewards:
        raise RecipeError(f"grpo.rewards names {sorted(unknown) or 'nothing'}; there are: {', '.join(REWARDS)}")
    file = recipe.data_dir / "rl_train.jsonl"
    make = f"python step2_prepare_data.py {args.words}"
    rows = read_jsonl(file, make)

    import rewards as judge
    from core import checks, workflow
    from core import train as training
    from core.backend import generation_backend
    from core.chat import render
    from core.decode import fast_generate
    from core.health import EPISODE_COLUMNS, Samples, episode_figures
    from core.held_out import HeldOut, HeldOutDuringGrpo
    from core.models import STAGES, load_model, load_tokenizer, lora_config, stage_source
    from envs import ENVIRONMENTS
    from rewards.probe import every_cheat
    from tasks.prepare import check_prepared, environment_limits

    training.quiet()
    source = stage_source(recipe, args.from_stage)
    check_start(source, folder, args.words)
    check_prepared(recipe, make)
    inputs = [file] + ([recipe.run_dir / "sft" / "manifest.json"] if args.from_stage == "sft" else [])
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")  # environment_factory is pinned with TRL's version
    import torch
    from datasets import Dataset
    from trl import GRPOConfig

    from core.difficulty import rated_prompts
    from core.grpo import GroupTrainer
    from core.resample import check_settings

    agent, names = recipe.agent, sorted({row["environment"] for row in rows})
    config = training.DEFAULTS | {"log_completions": False} | recipe.grpo.config
    config |= training.common_arguments(recipe, folder)
    backend, sentence = generation_backend(recipe, torch.cuda.is_available())
    config |= backend | {
        "max_completion_length": agent.max_completion_length,
        "max_tool_calling_iterations": agent.max_turns,
        "reward_weights": list(recipe.grpo.rewards.values()),
    }
    use_vllm, rows_played = config.get("use_vllm", False), recipe.grpo.accuracy_rows
    check_sharded(recipe.grpo.load_in_4bit, generates=True, use_vllm=use_vllm, accuracy_rows=rows_played)
    arguments = training.arguments(GRPOConfig, "grpo", config)
    start = args.from_stage if args.from_stage in STAGES else str(Path(source).resolve())
    asked = training.experiment(recipe, "grpo", inputs, start=start)
    if training.is_finished(folder, asked, args.restart):
        return
    if len(rows) < (prompts := arguments.generation_batch_size // arguments.num_generations):
        raise UserError(
            f"a step takes {prompts} prompts and {file} holds {len(rows)}: raise data.rl and run {make}, or lower "
            "--grpo.gradient_accumulation_steps"
        )
    tokenizer = load_tokenizer(source)
    tools = {name: workflow.prompt_tools(recipe.agent, env()) for name, env in ENVIRONMENTS.items()}
    worked = read_jsonl(recipe.data_dir / "sft_train.jsonl", make)
    checks.before_training(tokenizer, worked, tools, judge, recipe.grpo.rewards, every_cheat, args.skip_checks)

    rewards = [REWARDS[name] for name in recipe.grpo.rewards]
    environments = {n: functools.partial(ENVIRONMENTS[n], **environment_limits(recipe, n)) for n in names}
    facts = {}
    if recipe.grpo.resample:
        check_settings(arguments)
    if recipe.grpo.rate_difficulty:
        weights = recipe.grpo.rewards
        scores = functools.partial(main_scores, weights=weights)
        judged_by = sorted({f"{main_reward(row['environment'], weights)} {judge.judge_of(row)}" for row in rows})
        rows, facts["difficulty"] = rated_prompts(
            recipe, rows, source, arguments, lambda name: environments[name](), scores, ", ".join(judged_by)
        )
        arguments.shuffle_dataset = False  # easy ones first
    training.trackers(folder, config["report_to"])
    model = load_model(source, recipe.grpo.load_in_4bit, train_all=recipe.grpo.lora is None)
    model.generation_config.eos_token_id = tokenizer.eos_token_id  # a base may list more ends than a turn has
    trainer = GroupTrainer(
        model=model,
        args=arguments,
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        **(
            workflow.trl_arguments(agent, rewards, environments)
            if agent.workflow
            else {"reward_funcs": rewards, "environment_factory": environments}
        ),
        peft_config=lora_config(recipe.grpo.lora, model),
    )
    trainer.resample, trainer.tool_deadline = recipe.grpo.resample, 2 * agent.timeout
    trainer.main_reward = functools.partial(main_reward, weights=recipe.grpo.rewards)
    ids, _ = render(tokenizer, worked[0]["messages"], tools[worked[0]["environment"]])  # a real row
    samples = Samples(folder, agent, judge)
    trainer.observers = (episode_figures, samples)
    if not args.skip_checks:
        trainer.observers += (checks.SamplerCheck(),)
        trainer.add_callback(checks.AdapterCheck(ids))
    if recipe.grpo.accuracy_rows:
        val = read_jsonl(recipe.data_dir / "sft_val.jsonl", make)[: recipe.grpo.accuracy_rows]
        held_out = HeldOut(val, tokenizer, recipe, lambda row: environments[row["environment"]](), samples)
        trainer.add_callback(HeldOutDuringGrpo(trainer, held_out))
    if not trainer.args.use_vllm:
        trainer.model.generate = fast_generate(trainer.model, [tokenizer.eos_token_id], tokenizer.pad_token_id)
    columns = {"reward": "reward"} | {f"rewards/{n}/mean": n for n in recipe.grpo.rewards} | EPISODE_COLUMNS
    training.speak(trainer, folder, columns, recipe.grpo.accuracy_rows)
    a = trainer.args
    print(f"GRPO: {a.generation_batch_size // a.num_generations} prompts x {a.num_generations} episodes a step, "
          f"environments {', '.join(names)}, rewards {recipe.grpo.rewards}; rollouts by {sentence}")  # fmt: skip
    training.train(trainer, folder)
    training.finish(recipe, folder, trainer, tokenizer, source, inputs, started, ids, **facts)


def check_start(source: str, folder: Path, words: str) -> None:
    """GRPO begins with whole weights, and not with those in the folder that it may set aside."""
    from core.models import adapter_base

    found = "holds an adapter" if adapter_base(source) else "is in the folder that this step writes to"
    if adapter_base(source) or Path(source).resolve().is_relative_to(folder.resolve()):
        stage = Path(source).parent.name + "/" + Path(source).name if adapter_base(source) else "grpo"
        raise UserError(
            f"--from_stage: {source} {found}. Make whole weights of it beside the run first: python step6_export.py "
            f"{words} --export.stage {stage} --formats hf --output exports/start, then --from_stage exports/start/hf"
        )


def dry_run(recipe, args):
    import rewards
    from core.artifacts import read_jsonl
    from envs import ENVIRONMENTS
    from tasks.base import gold_episode
    from tasks.prepare import environment_limits

    def make_env(row):
        return ENVIRONMENTS[row["environment"]](**environment_limits(recipe, row["environment"]))

    rows = read_jsonl(recipe.data_dir / "rl_train.jsonl", f"python step2_prepare_data.py {args.words}")
    dryrun.dry_run(recipe, args, rows, make_env, rewards, gold_episode)


if __name__ == "__main__":
    run_step(main)

"""Step 6: export a stage for other programs, each file speaking as it was trained.

Reads   checkpoints/<run>/{sft,grpo} or any checkpoint folder, checkpoints/<run>/eval/summary.json (which stage is best)
Writes  checkpoints/<run>/export/   (--output DIR), finished files are kept:
          hf/          safetensors that plain transformers and vLLM load, with template and model card
          gguf/        one file a quantisation, for llama.cpp and Ollama
          ollama/      Modelfile and GGUF
          adapter/     LoRA of all stages together, on the recipe's base, with tokenizer, template and card
          manifest.json  what it was made from, sha256 of every file
          verify.md    with --verify: how each file spoke in its own engine

    python step6_export.py --config recipes/demo.yaml
    python step6_export.py --config R --formats hf gguf-q8_0 gguf-q4_k_m ollama --verify
    python step6_export.py --config R --export.stage grpo/checkpoint-6 --output exports/step-6
"""

from pathlib import Path

from core.config import FORMATS, UserError, load_recipe_args, positive, run_step


def add_arguments(parser):
    parser.add_argument("--formats", nargs="+", choices=FORMATS, help="default: the recipe's export.formats")
    parser.add_argument("--output", type=Path, help="folder to write to (default checkpoints/<run>/export)")
    parser.add_argument(
        "--verify", nargs="?", type=positive, const=20, metavar="N",
        help="play N questions (default 20) with the stage and every file; fails where a file speaks otherwise",
    )  # fmt: skip
    parser.add_argument(
        "--push_to_hub", metavar="REPO", help="afterwards upload to this private repository, e.g. me/model"
    )


def main():
    recipe, args = load_recipe_args(__doc__, add_arguments)
    from core import export, hub
    from core import train as training

    training.quiet()
    if args.push_to_hub:
        hub.check_hub(args.push_to_hub)
    stage = export.chosen_stage(recipe, recipe.export.stage)
    print(f"exporting stage '{stage}'")
    folder = args.output or recipe.run_dir / "export"
    rows = verify_rows(recipe, args) if args.verify else []
    paths = export.export(recipe, stage, args.formats or recipe.export.formats, folder)
    if args.verify:
        verify_exports(recipe, stage, paths, rows, folder)
    from tasks import TASKS

    calculates = next((name for name in recipe.tasks if TASKS[name].environment == "calculator"), None)
    for line in export.how_to_use(
        recipe, args.words, paths, f"--task {calculates}" if calculates else "--db FILE.sqlite"
    ):
        print(line)
    if args.push_to_hub:
        hub.push(args.push_to_hub, paths)


def verify_rows(recipe, args) -> list[dict]:
    """The questions of --verify, spread over the evaluation rows; read before the export works."""
    from core.artifacts import read_jsonl

    rows = read_jsonl(recipe.data_dir / "eval.jsonl", make_it := f"python step2_prepare_data.py {args.words}")
    if not rows:
        raise UserError(f"{recipe.data_dir / 'eval.jsonl'} is empty, so --verify has no question. Run: {make_it}")
    return rows[:: max(1, len(rows) // args.verify)][: args.verify]


def verify_exports(recipe, stage: str, paths: dict, rows: list[dict], folder: Path) -> None:
    """The same questions for all."""
    import rewards
    from core.export import local
    from core.models import stage_source
    from core.rollout import Episode
    from core.verify import verify
    from envs import ENVIRONMENTS
    from tasks.prepare import environment_limits

    def make_episode(row, tokenizer):
        env = ENVIRONMENTS[row["environment"]](**environment_limits(recipe, row["environment"]))
        return Episode(row, env, tokenizer, recipe.agent)

    verify(recipe, str(local(stage_source(recipe, stage))), paths, rows, make_episode, rewards, folder, stage)


if __name__ == "__main__":
    run_step(main)

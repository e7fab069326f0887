"""Step 6: export the winner for other programs.

Reads   checkpoints/<run>/{sft,grpo}/merged, checkpoints/<run>/eval/summary.json (which stage is best)
Writes  checkpoints/<run>/export/hf/   a folder that plain transformers and vLLM load

    python step6_export.py --config recipes/demo.yaml
    python step6_export.py --config R --export.stage sft
"""

import time

from core.config import load_recipe_args, run_step


def add_arguments(parser):
    parser.add_argument("--formats", nargs="+", choices=["hf"], help="default: the recipe's export.formats")


def main():
    recipe, args = load_recipe_args(__doc__, add_arguments)
    from core import export

    started, folder = time.time(), recipe.run_dir / "export"
    stage = export.chosen_stage(recipe, recipe.export.stage)
    print(f"exporting stage '{stage}'")
    target = export.export_hf(recipe, stage, folder / "hf")
    size = sum(f.stat().st_size for f in target.iterdir()) / 1e6
    print(f"wrote {target} ({size:.0f} MB) in {time.time() - started:.0f} s")
    print(f"talk to it:  python chat.py --config {args.config} --stage {target}")
    print(f"serve it:    vllm serve {target} --enable-auto-tool-choice --tool-call-parser hermes")


if __name__ == "__main__":
    run_step(main)

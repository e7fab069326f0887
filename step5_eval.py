"""Step 5: one harness for every stage. Same prompts, same loop, greedy; prints the comparison table.

Reads   data/<run>/eval.jsonl, checkpoints/<run>/{sft,grpo}/merged (or an endpoint)
Writes  checkpoints/<run>/eval/{episodes.jsonl,summary.json,report.md}; goes on where it was interrupted

    python step5_eval.py --config recipes/demo.yaml
    python step5_eval.py --config R --stages sft grpo --limit 100
    python step5_eval.py --config R --endpoint http://localhost:8000/v1 --served_model NAME --output /tmp/served
"""

import time
from pathlib import Path

from core.config import UserError, load_recipe_args, run_step


def add_arguments(parser):
    parser.add_argument("--stages", nargs="+", default=["base", "sft", "grpo"], help="base, sft, grpo or model folders")
    parser.add_argument("--limit", type=int, default=0, help="only the first N rows (0 = all)")
    parser.add_argument("--split", default="eval", help="file under data/<run>/ (default eval)")
    parser.add_argument("--endpoint", metavar="URL", help="evaluate an OpenAI-compatible server instead of --stages")
    parser.add_argument("--served_model", metavar="NAME", help="the model's name at the endpoint")
    parser.add_argument("--output", metavar="DIR", help="default checkpoints/<run>/eval")
    parser.add_argument("--restart", action="store_true", help="forget episodes played before")


def main():
    recipe, args = load_recipe_args(__doc__, add_arguments)
    started = time.time()
    if args.endpoint and not args.served_model:
        raise UserError("--endpoint needs --served_model NAME (what the server calls the model)")
    from core.artifacts import read_jsonl

    rows = read_jsonl(recipe.data_dir / f"{args.split}.jsonl", f"python step2_prepare_data.py --config {args.config}")
    rows = [{k: v for k, v in row.items() if k != "messages"} for row in rows[: args.limit or None]]
    output = Path(args.output or recipe.run_dir / "eval")
    output.mkdir(parents=True, exist_ok=True)

    import rewards
    from core import evaluate as ev
    from core.models import load_tokenizer, stage_source
    from core.rollout import EndpointEngine, Episode, TransformersEngine
    from envs import ENVIRONMENTS
    from tasks.prepare import environment_limits

    stages = [args.served_model] if args.endpoint else args.stages
    sources = {stage: None if args.endpoint else stage_source(recipe, stage) for stage in stages}
    path, key = output / "episodes.jsonl", _key(recipe, sources, rows)
    if args.restart or not _same(output / "key.json", key):
        path.unlink(missing_ok=True)
    records = {}
    for stage, source in sources.items():
        print(f"{stage}: {len(rows)} episodes with {source or args.endpoint}")
        tokenizer = None if args.endpoint else load_tokenizer(source)

        def episode(row, tokenizer=tokenizer):
            env = ENVIRONMENTS[row["environment"]](**environment_limits(recipe, row["environment"]))
            return Episode(row, env, tokenizer, recipe.agent)

        def play(episodes, stage=stage, source=source, tokenizer=tokenizer):
            if args.endpoint:
                return EndpointEngine(args.endpoint, stage, temperature=recipe.eval.temperature).play(episodes)
            from core.models import load_model

            engine = TransformersEngine(
                load_model(source), tokenizer, recipe.eval.batch_size, recipe.eval.temperature, recipe.seed
            )
            return engine.play(episodes)

        records[stage] = ev.evaluate(stage, rows, play, episode, rewards.score_batch, rewards.PRIMARY, path)
    write_report(recipe, output, records, started)


def _key(recipe, sources: dict, rows: list[dict]) -> dict:
    """What episodes of an earlier call must share to be taken over: weights, rows and the agent's settings."""
    import dataclasses
    import hashlib

    from core.artifacts import read_manifest

    weights = {}
    for stage, source in sources.items():
        manifest = read_manifest(Path(source).parent) if source else None
        weights[stage] = [source, manifest["seconds"] if manifest else None]
    ids = hashlib.sha256(repr([(r["id"], r["prompt"]) for r in rows]).encode()).hexdigest()
    return {
        "weights": weights,
        "rows": ids,
        "agent": dataclasses.asdict(recipe.agent),
        "eval": dataclasses.asdict(recipe.eval),
    }


def _same(path: Path, key: dict) -> bool:
    import json

    from core.artifacts import atomic_file

    before = json.loads(path.read_text()) if path.exists() else None
    with atomic_file(path) as f:
        json.dump(key, f)
    return before == key


def write_report(recipe, output: Path, records: dict, started: float) -> None:
    import json

    from rich.console import Console
    from rich.table import Table

    from core import evaluate as ev
    from core.artifacts import atomic_file, write_manifest

    summaries = {stage: ev.summarise(r) for stage, r in records.items()}
    names = list(records)
    tests = {b: ev.mcnemar(records[a], records[b]) for a, b in zip(names, names[1:], strict=False)}
    header, cells = ev.table_rows(summaries, tests)
    with atomic_file(output / "summary.json") as f:
        json.dump({"stages": summaries, "tests": tests, "model": recipe.model, "run": recipe.run}, f, indent=1)
    with atomic_file(output / "report.md") as f:
        f.write(f"# {recipe.run}\n\n{ev.markdown(header, cells)}")
    table = Table(title=f"{recipe.run}: {recipe.model}", title_justify="left")
    for name in header:
        table.add_column(name)
    for row in cells:
        table.add_row(*row)
    console = Console()
    console.print(table) if console.is_terminal else print(ev.markdown(header, cells), end="")
    write_manifest(output, recipe, [output / "episodes.jsonl"], started)
    print(f"wrote {output}/ (episodes.jsonl, summary.json, report.md)")


if __name__ == "__main__":
    run_step(main)

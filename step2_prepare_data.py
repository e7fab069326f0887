"""Step 2: raw tasks -> agent trajectories, made by running gold in the environment.

Reads   data/raw/<task>/ (embedded tasks are made there; Spider and GSM8K are put there by you, see README)
Writes  data/<run>/{sft_train,sft_val,rl_train,eval}.jsonl, rejected.jsonl (with reasons), manifest.json

    python step2_prepare_data.py --config recipes/demo.yaml
    python step2_prepare_data.py --config recipes/spider-qwen2.5-coder-1.5b-24gb.yaml --data.roots.spider ~/spider
    python step2_prepare_data.py --own_db shop.sqlite --questions q.csv    # writes a recipe for your own database
"""

import argparse
import sys
import time
from pathlib import Path

from core.config import UserError, load_recipe_args, run_step


def add_arguments(parser):
    parser.add_argument("--data_dir", help="write to this folder instead of data/<run>")
    parser.add_argument("--own_db", metavar="SOURCE", help="write a recipe for a database of yours (--own_db X --help)")
    parser.add_argument("--samples", type=int, default=3, help="rows shown as the model sees them (default 3)")


def own_database() -> None:
    """--own_db: no recipe yet; check the questions, take a snapshot, and write a recipe that is ready to run."""
    from tasks import own_db

    parser = argparse.ArgumentParser(description="A recipe for a database of your own.")
    own_db.add_arguments(parser)
    try:
        own_db.run(parser.parse_args())
    except (FileNotFoundError, ValueError, ImportError) as error:
        raise UserError(str(error)) from error


def main():
    if any(word.split("=")[0] == "--own_db" for word in sys.argv[1:]):
        return own_database()
    recipe, args = load_recipe_args(__doc__, add_arguments)
    from core.artifacts import write_jsonl, write_manifest
    from core.models import load_tokenizer, model_source
    from tasks.prepare import prepare

    started = time.time()
    target = Path(args.data_dir or recipe.data_dir)
    tokenizer = load_tokenizer(model_source(recipe.model))
    splits, rejected, facts = prepare(recipe, tokenizer)

    (target / "manifest.json").unlink(missing_ok=True)  # until the new files are whole, the folder is not
    for name, rows in splits.items():
        write_jsonl(target / f"{name}.jsonl", rows)
    write_jsonl(target / "rejected.jsonl", rejected)
    report(splits, rejected, facts, tokenizer, args.samples)
    files = [target / f"{name}.jsonl" for name in splits]
    facts = {"counts": {k: len(v) for k, v in splits.items()}, "rejected": len(rejected), "tokens": percentiles(facts)}
    write_manifest(target, recipe, files, started, **facts)
    print(f"wrote {target}/ in {time.time() - started:.0f} s")


def percentiles(facts: dict) -> dict[str, list[int]]:
    """Token lengths of every file: p50, p95, max."""
    lengths = {name: sorted(values) for name, values in facts["tokens"].items()}
    return {name: [v[int(q * (len(v) - 1))] for q in (0.5, 0.95, 1.0)] for name, v in lengths.items()}


def report(splits, rejected, facts, tokenizer, samples: int) -> None:
    from collections import Counter

    from rich.console import Console
    from rich.table import Table

    console = Console()
    table = Table(title="rows", title_justify="left")
    for column in ("file", "rows", "by task", "by hardness", "tokens p50 / p95 / max"):
        table.add_column(column)
    for name, rows in splits.items():
        counts = (Counter(r["task"] for r in rows), Counter(r["hardness"] for r in rows))
        cells = (" ".join(f"{k} {v}" for k, v in sorted(c.items())) for c in counts)
        table.add_row(name, str(len(rows)), *cells, " / ".join(map(str, percentiles(facts)[name])))
    console.print(table)
    for (task, reason), n in sorted(Counter((r["task"], r["reason"].split(":")[0]) for r in rejected).items()):
        console.print(f"rejected {n:5d}  {task}: {reason}", markup=False)
    from core.chat import render

    for row in splits["sft_train"][:samples]:
        ids, mask = render(tokenizer, row["messages"], facts["tools"][row["environment"]])
        console.rule(f"{row['id']} as the model sees it; what it learns to write is shaded")
        pieces, start = [], 0
        for n in range(1, len(ids) + 1):
            if n == len(ids) or mask[n] != mask[start]:
                pieces.append((tokenizer.decode(ids[start:n]), "reverse" if mask[start] else ""))
                start = n
        for text, style in pieces:
            console.print(text, style=style, end="", markup=False, highlight=False)
        console.print()


if __name__ == "__main__":
    run_step(main)

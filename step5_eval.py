"""Step 5: one harness for every stage. Same prompts, same loop, greedy; prints the comparison table.

Reads   data/<run>/eval.jsonl, checkpoints/<run>/{sft,grpo}/merged (or any checkpoint, or a server)
Writes  checkpoints/<run>/eval/{episodes.jsonl,summary.json,report.md,report.html}; goes on where it was interrupted

    python step5_eval.py --config recipes/demo.yaml
    python step5_eval.py --config R --stages sft grpo/checkpoint-6 --limit 100
    python step5_eval.py --config R --turns 0,1,3 --samples 8
    python step5_eval.py --config R --endpoint http://localhost:8000/v1 --served_model NAME --output checkpoints/served
"""

import argparse
import re
import time
from pathlib import Path

from core.config import RecipeError, UserError, load_recipe_args, positive, run_step


def add_arguments(parser):
    parser.add_argument(
        "--stages", nargs="+", default=["base", "sft", "grpo"],
        help="base, sft, grpo, a checkpoint of this run (grpo/checkpoint-6) or a folder; of an adapter too",
    )  # fmt: skip
    parser.add_argument("--limit", type=positive, metavar="N", help="only the first N rows")
    parser.add_argument("--split", default="eval", help="file under data/<run>/ (default eval)")
    parser.add_argument(
        "--turns", type=_numbers, metavar="N,M", help="tool turns allowed, e.g. 0,1,3 (0: no tool at all)"
    )
    parser.add_argument(
        "--samples", type=positive, default=0, metavar="K", help="also K samples a question: pass@k, majority"
    )
    parser.add_argument("--sample_temperature", type=float, default=0.8, help="of those samples (default 0.8)")
    parser.add_argument("--engine", choices=["auto", "vllm", "transformers"], default="auto", help="for local models")
    parser.add_argument("--endpoint", metavar="URL", help="evaluate an OpenAI-compatible server instead of --stages")
    parser.add_argument("--served_model", metavar="NAME", help="the model's name at the endpoint")
    parser.add_argument(
        "--concurrency", type=positive, default=8, help="requests to the endpoint at a time (default 8)"
    )
    parser.add_argument("--output", metavar="DIR", help="default checkpoints/<run>/eval, or eval-<what> for a part")
    parser.add_argument("--restart", action="store_true", help="forget episodes played before")


def _numbers(text: str) -> list[int]:
    if not all(n.strip().isdecimal() for n in text.split(",")):
        raise argparse.ArgumentTypeError(f"tool turns from 0 on with commas between them are needed, found '{text}'")
    return sorted({int(n) for n in text.split(",")})


def main():
    recipe, args = load_recipe_args(__doc__, add_arguments)
    started = time.time()
    _check(args)
    import dataclasses
    import functools

    from core import engines
    from core import train as training
    from core.artifacts import file_hash, read_jsonl
    from core.chat import TEMPLATE, vocabulary_key
    from core.episodes import Variant, assert_same_prompts, evaluate, plan, resume
    from core.models import fingerprint, stage_source
    from core.workflow import prompt_tools
    from envs import ENVIRONMENTS
    from tasks.prepare import check_prepared

    training.quiet()
    check_prepared(recipe, f"python step2_prepare_data.py {args.words}")
    rows = read_jsonl(recipe.data_dir / f"{args.split}.jsonl", f"python step2_prepare_data.py {args.words}")
    rows = {r["id"]: {k: v for k, v in r.items() if k != "messages"} for r in rows[: args.limit or None]}
    if not rows:
        raise UserError(f"{recipe.data_dir / args.split}.jsonl holds no rows: see rejected.jsonl beside it")
    sources = {s: stage_source(recipe, s) for s in args.stages if not args.endpoint}
    if args.endpoint:
        sources = {args.served_model: args.endpoint}
    limits = args.turns or [recipe.agent.max_turns]
    usual = recipe.agent.max_turns if recipe.agent.max_turns in limits else limits[-1]
    variants = [Variant(t, 0, recipe.eval.temperature) for t in limits]
    variants += [Variant(usual, s + 1, args.sample_temperature) for s in range(args.samples)]
    path = Path(args.output or recipe.run_dir / _folder(recipe, args)) / "episodes.jsonl"

    import rewards

    shows = dataclasses.replace(recipe.agent, max_turns=1)
    tools = {kind: prompt_tools(shows, ENVIRONMENTS[kind]()) for kind in {r["environment"] for r in rows.values()}}
    weights, server = {}, {}

    def planned(stage: str, source: str) -> dict:
        if not args.endpoint:
            weights[stage] = fingerprint(source)
        key = [args.endpoint] if args.endpoint else [args.engine, weights[stage], file_hash(TEMPLATE)]
        return plan(stage, key, list(rows.values()), recipe.agent, variants, recipe.seed, rewards, tools)

    wanted = {stage: planned(stage, source) for stage, source in sources.items()}
    if args.endpoint:  # before anything is written: the server may not be there
        row = next(iter(rows.values()))
        asked = tools[row["environment"]] if recipe.agent.max_turns else []
        verdict = engines.compare_prompts(recipe, args.endpoint, args.served_model, row, asked)
        print(verdict)
        address = re.sub("//[^/@]*@", "//", args.endpoint)  # a password is nobody's business
        server = {"endpoint": {"url": address, "served_model": args.served_model, "prompts": verdict}}
    else:
        path = _beside_the_others(recipe, args, path, planned, sources, wanted)
        weights = {stage: weights[stage] for stage in sources}
    path.parent.mkdir(parents=True, exist_ok=True)
    forget = [args.served_model, *args.stages] if args.restart else []
    done = resume(path, {i: k for keys in wanted.values() for i, k in keys.items()}, forget)
    for stage, source in sources.items():
        known = sum(i in done for i in wanted[stage])
        print(f"{stage}: {len(wanted[stage])} episodes with {source}, {known} of them played already")
        if known and args.endpoint:
            print("  (under this URL and name; if the server has other weights now, --restart plays them again)")
        if known == len(wanted[stage]):
            continue
        if args.endpoint:
            tokenizer, engine = engines.open_endpoint(recipe, source, stage, args.concurrency)
        else:
            tokenizer, engine = engines.open_source(recipe, source, args.engine)
        make_episode = functools.partial(_episode, recipe, rows, tokenizer)
        facts = {"vocabulary": vocabulary_key(tokenizer) if tokenizer else ""}
        for temperature in dict.fromkeys(v.temperature for v in variants):
            chosen = {(v.turns, v.sample) for v in variants if v.temperature == temperature}
            part = {i: key for i, key in wanted[stage].items() if i[1:3] in chosen}
            evaluate(part, done, make_episode, functools.partial(engine, temperature), rewards, path, facts)
    records = {stage: [done[i] for i in keys] for stage, keys in wanted.items()}
    assert_same_prompts(records)
    _report(recipe, args, path, records, {"weights": weights} | server, limits, usual, started)


def _beside_the_others(recipe, args, path: Path, planned, sources: dict, wanted: dict) -> Path:
    """A part of the stages never takes the place of a table of more: the others stay in it, or it gets its own folder.

    They stay (in `sources` and `wanted`) if they were played with today's weights and settings.
    """
    from core.compare import ORDER, read_summary
    from core.episodes import kept
    from core.models import stage_source

    others = [s for s in read_summary(path.parent).get("stages", {}) if s not in sources]
    if not others:
        return path
    have, found = kept(path), {}
    for stage in others:
        try:
            source = stage_source(recipe, stage, say=lambda _: None)
        except UserError:  # the stage is gone
            break
        keys = planned(stage, source)
        if not keys.items() <= have.keys():
            break
        found[stage] = source, keys
    if len(found) == len(others):
        print(f"{', '.join(others)}: evaluated with today's weights and settings, and stay in the table")
        rank = {stage: n for n, stage in enumerate(ORDER)}
        for stage in sorted([*others, *sources], key=lambda s: rank.get(s, len(rank))):
            source, keys = found[stage] if stage in found else (sources.pop(stage), wanted.pop(stage))
            sources[stage], wanted[stage] = source, keys
        return path
    if args.output:
        return path
    own = [path.parent.name, "only", *(s for s in args.stages if s in ORDER)]
    folder = path.parent.with_name("-".join(own))
    print(
        f"{path.parent} also holds {', '.join(others)}, of other weights or settings, and stays as it is: this goes to "
        f"{folder}. All of them again: --stages {' '.join([*others, *args.stages])}"
    )
    return folder / path.name


def _folder(recipe, args) -> str:
    """`eval` is the whole evaluation of the stages, which step 6 chooses by; anything less, or else, stands beside it."""
    parts = [args.split] if args.split != "eval" else []
    parts += ["turns", *map(str, args.turns)] if args.turns and recipe.agent.max_turns not in args.turns else []
    parts += [f"first-{args.limit}"] if args.limit else []
    parts += [args.served_model] if args.endpoint else [s for s in args.stages if s not in ("base", "sft", "grpo")]
    return "-".join(["eval", *(re.sub(r"[^\w.]+", "-", part).strip("-") for part in parts)])


def _check(args) -> None:
    if args.endpoint and not args.served_model:
        raise RecipeError("--endpoint needs --served_model NAME (what the server calls the model)")
    if args.samples and args.sample_temperature <= 0:
        raise RecipeError(
            "--samples with --sample_temperature 0 plays the same episode K times: give it a temperature above 0"
        )


def _episode(recipe, rows: dict, tokenizer, identity: tuple):
    import dataclasses

    from core.rollout import Episode
    from envs import ENVIRONMENTS
    from tasks.prepare import environment_limits, without_tool

    _, turns, sample, name = identity
    row = rows[name] if turns else without_tool(rows[name])
    limits = environment_limits(recipe, row["environment"]) | {"max_turns": max(1, turns)}
    agent = dataclasses.replace(recipe.agent, max_turns=turns)
    return Episode(row, ENVIRONMENTS[row["environment"]](**limits), tokenizer, agent, sample=sample)


def _report(recipe, args, path: Path, records: dict, of: dict, limits: list, usual: int, started: float) -> None:
    """`of`: what was measured, weights or an endpoint."""
    import json

    import rewards
    from core.artifacts import atomic_file, write_jsonl, write_manifest
    from core.evaluate import compare
    from core.report import write_page
    from core.table import markdown, served, show, tables

    summary = compare(records, limits, usual, rewards.vote_groups)
    model = args.served_model if args.endpoint else recipe.model
    summary |= {"model": model, "run": recipe.run, "split": args.split, "max_turns": usual} | of
    found, line = tables(summary), served(summary)
    write_jsonl(path, [r for stage in records.values() for r in stage])  # they were appended as they were played
    with atomic_file(path.with_name("summary.json")) as f:
        json.dump(summary, f, indent=1)
    with atomic_file(path.with_name("report.md")) as f:
        f.write("\n\n".join(part for part in (f"# {recipe.run}", line, markdown(found)) if part))
    if line:
        print(line)
    show(found, f"{recipe.run}: {model}")
    write_manifest(path.parent, recipe, [path], started, **({"endpoint": of["endpoint"]} if args.endpoint else {}))
    write_page(recipe.run_dir, path.parent)
    print(f"wrote {path.parent}/ (episodes.jsonl, summary.json, report.md, report.html)")


if __name__ == "__main__":
    run_step(main)

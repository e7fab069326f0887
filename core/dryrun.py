"""Before hours of GPU: play a few GRPO prompts, show what the trainer would see, and find what would break the run.

Prints every turn with the tokens that carry the loss told from those that do not, every reward, then the checks, the time
of a rollout, and what the recipe needs in memory and time. Writes nothing.
"""

import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

from core.chat import render
from core.config import Recipe, RecipeError, UserError
from core.memory import report
from core.sizes import GPUS, device
from core.workflow import from_tool_calls, prompt_tools, trained_mask

GROUP = 4  # episodes a prompt


def add_arguments(parser) -> None:
    parser.add_argument(
        "--dry_run", action="store_true", help="play a few prompts, show and check everything; no training"
    )
    parser.add_argument(
        "--dry_run_tasks", type=int, default=10, metavar="N", help="prompts of the dry run (default 10)"
    )
    parser.add_argument("--endpoint", metavar="URL", help="dry run with an OpenAI-compatible server instead of a stage")
    parser.add_argument("--served_model", metavar="NAME", help="the model's name at the endpoint")
    parser.add_argument("--gpu", metavar="NAME", help=f"dry run: estimate for this GPU: {', '.join(GPUS)}")


def refuse_arguments(args) -> None:
    for name in ("endpoint", "served_model", "gpu"):
        if getattr(args, name):
            raise RecipeError(f"--{name} belongs to --dry_run: without it, this command would train")


def dry_run(
    recipe: Recipe,
    args: Any,
    rows: list[dict],
    make_env: Callable[[dict], Any],
    judge: Any,  # the package `rewards`
    gold_episode: Callable[[dict, Any], list[dict]],
) -> None:
    """Everything in order; ends with a UserError that lists what would break the run."""
    from rich.console import Console

    if args.endpoint and not args.served_model:
        raise RecipeError("--endpoint needs --served_model NAME (what the server calls the model)")
    console, on = Console(highlight=False, soft_wrap=True), device(args.gpu)
    rows = rows[: max(1, args.dry_run_tasks)]
    tokenizer, engine = _open(recipe, args)
    problems = check_rows(recipe, rows, tokenizer, make_env, judge, gold_episode)
    if problems:
        raise UserError(_listed(problems))
    console.print(f"checked on {len(rows)} rows: databases open, gold scores 1.0, template, mask and parser agree")
    console.print(_legend(console.is_terminal))
    group, records = min(GROUP, recipe.grpo.config.get("num_generations", 8)), []
    player = engine(recipe.grpo.config.get("temperature", 1.0))
    for number, row in enumerate(rows, 1):
        console.rule(f"{number}/{len(rows)}  {row['id']}  {row['task']} {row['hardness']}", align="left")
        records.append(_play(recipe, row, group, player, tokenizer, make_env, judge, console))
    problems = findings(recipe, records, console.print)
    told = [r for group in records for r in group if r["tokens"]]
    console.rule("what the recipe needs", align="left")
    own = [r["seconds"] for group in records for r in group if not r["error"]] if not args.endpoint else []
    written = statistics.fmean(r["tokens"] for r in told) if told else None
    for line in report(recipe, on, written, statistics.fmean(own) if own and on.kind == "cpu" else None):
        console.print(line)
    if problems:
        raise UserError(_listed(problems))
    console.print("nothing found that would break the run")


def _listed(problems: list[str]) -> str:
    return "the run would break:\n" + "\n".join(f"  - {p}" for p in dict.fromkeys(problems))


def _open(recipe: Recipe, args: Any) -> tuple:
    from core import engines
    from core.models import load_tokenizer, stage_source

    if not args.endpoint:
        return engines.open_source(recipe, stage_source(recipe, args.from_stage), "auto")
    _, engine = engines.open_endpoint(recipe, args.endpoint, args.served_model, GROUP)
    try:  # the server tokenises by itself; this one shows what would be trained
        return load_tokenizer(stage_source(recipe, "base")), engine
    except UserError as error:
        print(f"no tokens are shown: {error}")
        return None, engine


def check_rows(recipe: Recipe, rows: list[dict], tokenizer, make_env, judge, gold_episode) -> list[str]:
    """What is wrong with the rows themselves, or between template, mask and parser."""
    from core.checks import check_rendering  # here: it loads the trainers, and --help should not wait

    unknown = sorted(set(recipe.grpo.rewards) - set(judge.REWARDS))
    problems = [f"grpo.rewards names {', '.join(unknown)}; there are: {', '.join(judge.REWARDS)}"] if unknown else []
    for row in rows:
        if row["db_path"] and not Path(row["db_path"]).is_file():
            problems.append(f"{row['id']}: no database {row['db_path']}; run step2_prepare_data.py again")
            continue
        env = make_env(row)
        gold = gold_episode(row, env)
        if recipe.agent.workflow:
            gold = from_tool_calls(gold)
        name, scores = judge.PRIMARY[row["environment"]], judge.score(row, gold)
        right = judge.holds(scores, name)
        if right is None:
            why = "it fails by itself (run step2_prepare_data.py again), or the judge is down"
            problems.append(f"{row['id']}: gold scores nothing on {name}: {why}")
        elif not right:
            problems.append(f"{row['id']}: gold scores {scores[name]} on {name}; run step2_prepare_data.py again")
        if tokenizer:
            try:
                check_rendering(tokenizer, row | {"messages": row["prompt"] + gold}, prompt_tools(recipe.agent, env))
            except UserError as error:
                problems.append(str(error))
    return problems


def _play(recipe: Recipe, row: dict, group: int, player, tokenizer, make_env, judge, console) -> list[dict]:
    """One group: play, judge, show."""
    import time

    from core.endpoint import EndpointEngine
    from core.episodes import records_of
    from core.rollout import Episode

    ids = None if isinstance(player, EndpointEngine) else tokenizer
    began = time.perf_counter()
    episodes = [Episode(row, make_env(row), ids, recipe.agent, sample=n) for n in range(group)]
    played = [episode for batch in player.play(episodes) for episode in batch]
    seconds = (time.perf_counter() - began) / group
    records = records_of(played, "dry run", judge)
    for n, record in enumerate(records):
        record |= {"seconds": seconds, "total": weighted(recipe, record["rewards"])}
        if tokenizer:
            prompt, episode = tokens_of(recipe, tokenizer, row, record, make_env(row))
            console.print(shaded(tokenizer, ([] if n else [(i, 0) for i in prompt]) + episode, console.is_terminal))
        else:
            for message in ([] if n else row["prompt"]) + record["completion"]:
                console.print(f"{message['role']}: {message['content']} {message.get('tool_calls', '')}", markup=False)
        scored = [(w, k, record["rewards"].get(k)) for k, w in recipe.grpo.rewards.items()]
        scores = " + ".join(f"{w:g} x {k} {v:.2f}" for w, k, v in scored if v is not None)
        state = record["error"] or {True: "correct", False: "wrong", None: "undecided"}[record["correct"]]
        line = f"sample {n + 1}: {state}{', cut off' * record['truncated']}  reward {record['total']:.2f} = {scores}"
        console.print(line, style="bold cyan", markup=False)
    return records


def weighted(recipe: Recipe, scores: dict[str, float | None]) -> float:
    """The reward as GRPO sums it."""
    return sum(weight * (scores.get(name) or 0.0) for name, weight in recipe.grpo.rewards.items())


def tokens_of(recipe: Recipe, tokenizer, row: dict, record: dict, env) -> tuple[list[int], list[tuple[int, int]]]:
    """(ids of the prompt, (id, trained) of the episode): as played, or for a server's text as training renders it."""
    workflow, completion = recipe.agent.workflow, record["completion"]
    if record["completion_ids"]:
        ids, mask, prompt = record["completion_ids"], record["mask"], record["prompt_ids"]
    else:
        whole, marks = render(tokenizer, row["prompt"] + completion, prompt_tools(recipe.agent, env))
        start = marks.index(1) if 1 in marks else len(whole)
        prompt, ids, mask = whole[:start], whole[start:], marks[start:]
    if workflow:
        mask = trained_mask(mask, completion, workflow.trained_turns)
    return prompt, list(zip(ids, mask, strict=True))


def shaded(tokenizer, tokens: list[tuple[int, int]], colour: bool):
    """The text of the tokens; those that carry the loss in green, or between « and » where there is no colour."""
    from itertools import groupby

    from rich.text import Text

    text = Text()
    for trained, run in groupby(tokens, key=lambda t: t[1]):
        piece = tokenizer.decode([i for i, _ in run])
        text.append(piece if colour or not trained else f"«{piece}»", style="bold green" if trained else "dim")
    return text


def _legend(colour: bool) -> str:
    return f"{'[bold green]green[/]' if colour else '«...»'}: tokens that the policy wrote and is trained on; the rest is masked"


def findings(recipe: Recipe, groups: list[list[dict]], say: Callable[[str], None]) -> list[str]:
    """Says what the episodes show; returns what would break the run."""
    records = [r for group in groups for r in group]
    n, failed = len(records), [r for r in records if r["error"]]
    flat = sum(max(r["total"] for r in g) - min(r["total"] for r in g) < 1e-6 for g in groups)
    right, judged = sum(r["correct"] is True for r in records), sum(r["correct"] is not None for r in records)
    cut, silent = sum(r["truncated"] for r in records), sum(not r["tool_calls"] for r in records)
    tokens = [r["tokens"] for r in records if r["tokens"]]
    say(f"{n} episodes: {right} of {judged} correct, {silent} without a tool call, {cut} cut off at "
        f"{recipe.agent.max_completion_length} tokens, {sum(r['tool_errors'] for r in records)} tool errors")  # fmt: skip
    say(f"reward spread: {flat} of {len(groups)} groups of {len(groups[0])} have none and teach nothing"
        + (f" (the recipe's groups of {recipe.grpo.config.get('num_generations', 8)} have more)"
           if recipe.grpo.config.get("num_generations", 8) > len(groups[0]) else ""))  # fmt: skip
    say(f"a rollout took {statistics.fmean(r['seconds'] for r in records):.2f} s here, {len(groups[0])} at a time"
        + (f", and {statistics.fmean(tokens):.0f} tokens" if tokens else ""))  # fmt: skip
    problems = []
    if failed:
        problems.append(f"{len(failed)} of {n} episodes could not be played: {failed[0]['error']}")
    if not judged:
        problems.append("no episode could be judged: every main reward is undecided")
    if len(groups) > 1 and flat == len(groups):
        problems.append(
            "no group has any spread in its rewards, so no gradient: train SFT longer (step3_sft.py), take easier "
            "questions (data.hardness), or raise grpo.temperature"
        )
    if silent == n:
        problems.append("no episode calls a tool: train SFT first (step3_sft.py), or look at the served chat template")
    if cut == n:
        problems.append(
            f"every episode is cut off: raise agent.max_completion_length ({recipe.agent.max_completion_length})"
        )
    return problems

"""How hard each prompt is for the model that GRPO starts from: K samples of each, once, kept on disk.

A group whose episodes all earn the same teaches nothing, so prompts that are always or never solved are left out, and
the rest is ordered from easy to hard. Only as many are rated as the run needs. Every sample draws random numbers of its
own (core/rollout.py), so an interrupted rating goes on where it stopped and comes to the same figures.
"""

import hashlib
import json
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

from core.artifacts import file_hash
from core.config import Recipe
from core.engines import open_source
from core.rollout import Episode

LEVELS = {"easy": 0, "medium": 1, "hard": 2, "extra": 3}
LEAST = 0.25  # share of the prompts that is kept at least: GRPO on a handful of prompts learns them by heart


def rated_prompts(
    recipe: Recipe,
    rows: list[dict],
    source: str,
    arguments,  # GRPOConfig
    make_env: Callable[[str], object],
    judge: Callable[[list[dict], list[list[dict]]], list[float | None]],
    judged_by: str,  # who judges free text
    say: Callable[[str], None] = print,
) -> tuple[list[dict], dict]:
    """The prompts that GRPO should see, in order, rated by the model of `source`; and the counts."""
    path, samples = recipe.data_dir / "difficulty.jsonl", recipe.grpo.rate_difficulty
    key = rating_key(recipe, source, arguments.temperature, judged_by)
    alone = arguments.world_size == 1  # vLLM in each of several processes would ask for the same GPU
    tokenizer, engine = open_source(recipe, source, "auto" if alone else "transformers")

    def play(episodes):
        yield from engine(arguments.temperature).play(episodes)

    def episode(row, sample):
        return Episode(row, make_env(row["environment"]), tokenizer, recipe.agent, sample=sample)

    a, part = arguments, (arguments.process_index, arguments.world_size)
    batch = a.generation_batch_size // a.num_generations
    used = a.max_steps * a.gradient_accumulation_steps * batch // (a.steps_per_generation * a.num_iterations)
    used = used if a.max_steps > 0 else len(rows)
    needed, useful, done, counts = used * (1 + recipe.grpo.resample), 0, 0, {}
    rows = random.Random(recipe.seed).sample(rows, len(rows))
    while done < len(rows) and useful < needed:  # no more of them than the run will see
        first, done = done, min(len(rows), done + 2 * max(batch, needed - useful))
        rate(rows[first:done], samples, play, episode, judge, path, key, part, say)
        a.distributed_state.wait_for_everyone()
        kept, counts = select(rated(rows[:done], path, key), max(batch, round(LEAST * done)))
        useful = counts["used"] - counts["kept all the same"]
    if part[0] == 0:
        spare = counts["kept all the same"]
        say(
            f"difficulty: of {done} prompts ({len(rows)} there are), {samples} samples each, {counts['always solved']} are "
            f"always and {counts['never solved']} never solved; {len(kept)} are used, easy ones first"
            + (f" ({spare} of these all the same, as too few remain)" if spare else "")
        )
    return easy_to_hard(kept, used), counts


def rate(
    rows: list[dict],
    samples: int,
    play: Callable[[list[Episode]], Iterator[list[Episode]]],  # yields them in batches, as they are finished
    make_episode: Callable[[dict, int], Episode],  # row, number of the sample
    judge: Callable[[list[dict], list[list[dict]]], list[float | None]],  # rows, completions -> 1.0 where right
    path: Path,
    key: str,  # what else the figures depend on: weights, agent, temperature
    part: tuple[int, int] = (0, 1),  # this process and how many there are: each rates its share of the rows
    say: Callable[[str], None] = print,
) -> None:
    """Add to `path` the pass rate of every row that it does not hold yet."""
    known = _records(path)
    order = sorted(rows, key=lambda r: (r["prompt"][-1]["content"], r["id"]))  # neighbours share most of their prompt
    mine = order[part[0] :: part[1]]
    todo = {row["id"]: row for row in mine if _row_key(key, row) not in known}
    if len(todo) < len(mine) and part[0] == 0:
        say(f"difficulty: {len(mine) - len(todo)} of {len(mine)} prompts are rated in {path} already")
    began = told = time.time()
    found, done, tokens = {name: [] for name in todo}, 0, Counter()
    path.parent.mkdir(parents=True, exist_ok=True)
    for batch in play([make_episode(row, n) for row in todo.values() for n in range(samples)]) if todo else ():
        for episode, value in zip(batch, judge([e.row for e in batch], [e.completion for e in batch]), strict=True):
            found[episode.row["id"]].append(None if episode.error else value)
            tokens[episode.row["id"]] += episode.tokens or 0
        lines = []
        for name in dict.fromkeys(episode.row["id"] for episode in batch):
            if len(found[name]) == samples:
                judged = [value for value in found[name] if value is not None]
                if not judged:
                    continue  # the judge was not there: asked again next time
                record = {"key": _row_key(key, todo[name]), "id": name, "right": sum(v > 0.5 for v in judged)}
                lines.append(json.dumps(record | {"judged": len(judged), "tokens": tokens[name]}) + "\n")
        with open(path, "a", encoding="utf-8") as f:
            f.write("".join(lines))  # one write: processes may share the file
        done += len(batch)
        total = len(todo) * samples
        if part[0] == 0 and (done == total or time.time() - told > 15):
            told = time.time()
            say(f"  difficulty: {done} of {total} samples, {(told - began) / done * (total - done):.0f} s left")


def rated(rows: list[dict], path: Path, key: str) -> list[dict]:
    """The rows with `difficulty` = the share of samples that failed; 0.5 where the judge could not tell."""
    known = _records(path)
    out = []
    for row in rows:
        record = known.get(_row_key(key, row))
        failed = 1 - record["right"] / record["judged"] if record else 0.5
        out.append(row | {"difficulty": round(failed, 4)})
    return out


def select(rows: list[dict], least: int) -> tuple[list[dict], dict]:
    """Without the always and the never solved; if fewer than `least` remain, with the nearest of them. And counts."""
    kept = [row for row in rows if 0 < row["difficulty"] < 1]
    # nearest to being solved now and then: easy ones that never were, then hard ones that always were
    spare = sorted((r for r in rows if r["difficulty"] == 1), key=_level)
    spare += sorted((r for r in rows if r["difficulty"] == 0), key=_level, reverse=True)
    added = spare[: max(0, least - len(kept))]
    counts = {
        "rated": len(rows),
        "always solved": sum(row["difficulty"] == 0 for row in rows),
        "never solved": sum(row["difficulty"] == 1 for row in rows),
        "kept all the same": len(added),
        "used": len(kept) + len(added),
        "by difficulty": {str(d): n for d, n in sorted(Counter(row["difficulty"] for row in rows).items())},
    }
    chosen = {id(row) for row in kept + added}
    return [row for row in rows if id(row) in chosen], counts


def easy_to_hard(rows: list[dict], prompts: int) -> list[dict]:
    """Rows by difficulty. A run that uses only some of them goes through the whole range: first an even sample of that
    many, the others after it."""
    rows = sorted(rows, key=lambda r: r["difficulty"])  # stable: prompts as hard as each other stay in random order
    if prompts >= len(rows):
        return rows
    first = {i * len(rows) // prompts for i in range(prompts)}
    return [rows[i] for i in sorted(first)] + [row for i, row in enumerate(rows) if i not in first]


def rating_key(recipe: Recipe, source: str, temperature: float, judged_by: str = "") -> str:
    """What a pass rate depends on beside the row: weights, how an episode runs and is judged, how often and hot it is sampled."""
    weights = [file_hash(f) for f in sorted(Path(source).glob("*.safetensors"))] or [source]
    return _hash(weights, asdict(recipe.agent), recipe.grpo.rate_difficulty, temperature, recipe.seed, judged_by)


def _row_key(key: str, row: dict) -> str:
    return _hash(key, row["id"], row["environment"], row["prompt"], row["gold"])


def _hash(*parts) -> str:
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


def _level(row: dict) -> int:
    return LEVELS.get(row["hardness"], 1)


def _records(path: Path) -> dict[str, dict]:
    """Records on disk by key. A line that a crash cut short is left out, and ended so that the next one is whole."""
    if not path.exists():
        return {}
    text = path.read_text(encoding="utf-8")
    if text and not text.endswith("\n"):
        with open(path, "a", encoding="utf-8") as f:
            f.write("\n")
    records = {}
    for line in text.split("\n"):
        try:
            record = json.loads(line)
            records[record["key"]] = record
        except (json.JSONDecodeError, KeyError, TypeError):
            continue
    return records

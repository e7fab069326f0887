"""Play, judge and keep episodes: `episodes.jsonl` grows line by line, so that an evaluation goes on where it was stopped.

An episode is one (stage, turn limit, sample, question). Its line carries a key, a hash of all that it hangs on: weights,
row, template, tools, database, the agent's settings, temperature. Only lines whose key is the wanted one are taken over. Lines
that this call does not ask for, or that were played with other weights or settings, wait in `earlier.jsonl` until a call asks
for them again, so that episodes.jsonl holds exactly what the table is made of. Episodes that the engine could not play (a
server that is down) are undecided, and are tried again by the next call.

The table of the stages is made of the lines with sample 0 and with max_turns as summary.json says; the others are the same
questions at other turn limits, and the samples for pass@k.
"""

import functools
import hashlib
import json
import time
from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from core.artifacts import file_hash, write_jsonl
from core.config import Agent, UserError
from core.rollout import Episode

KEPT = ("id", "task", "environment", "question", "gold", "db_id", "db_path", "hardness", "prompt", "facts")
SAY_EVERY = 5.0  # seconds between two progress lines

Identity = tuple[str, int, int, str]  # stage, turn limit, sample, id of the row


@dataclass(frozen=True)
class Variant:
    """How every question is played once."""

    turns: int  # tool turns allowed; 0: no tool
    sample: int = 0  # 0: the episode that the table is made of; 1, 2, ...: for pass@k
    temperature: float = 0.0


def plan(
    stage: str,
    weights: Any,  # what tells this stage's answers from another's
    rows: list[dict],
    agent: Agent,
    variants: list[Variant],
    seed: int,
    judge: Any = None,
    tools: dict[str, Any] | None = None,  # environment -> schemas of its tools, which the prompts show
) -> dict[Identity, str]:
    """Identity -> key of every episode of a stage."""
    database, wanted = functools.cache(file_hash), {}
    for v in variants:
        how = [weights, asdict(agent) | {"max_turns": v.turns}, asdict(v), seed if v.temperature else None]
        for row in rows:
            data = database(row["db_path"]) if row["db_path"] else ""
            shown = (tools or {}).get(row["environment"]) if v.turns else None
            judged_by = judge.judge_of(row) if judge else ""
            parts = [how, row["prompt"], row["gold"], row["facts"], data, judged_by, shown]
            wanted[stage, v.turns, v.sample, row["id"]] = hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]
    return wanted


def resume(
    path: Path, wanted: dict[Identity, str], forget: Collection[str] = (), say: Callable[[str], None] = print
) -> dict[Identity, dict]:
    """The finished episodes among `wanted`, with which `path` is written anew; the others of the folder are set aside.

    What an engine failed to play, or no judge could decide, is not finished. `forget`: the stages whose episodes, of any
    key, are dropped.
    """
    earlier, forgotten = path.with_name("earlier.jsonl"), {i for i in wanted if i[0] in forget}
    found = {at: r for at, r in kept(path).items() if at[0] not in forgotten}
    found = {at: r for at, r in found.items() if not r["error"] and r["correct"] is not None}
    done = {i: found[i, key] for i, key in wanted.items() if (i, key) in found}
    aside = [r for (i, key), r in found.items() if wanted.get(i) != key]
    if other := sum(identity(r) in wanted for r in aside):
        say(f"{other} episodes of other weights or settings wait in {earlier}: going back takes them up again")
    if aside or earlier.exists():
        write_jsonl(earlier, aside)
    write_jsonl(path, done.values())
    return done


def kept(path: Path) -> dict[tuple[Identity, str], dict]:
    """(identity, key) -> episode, of the file and of those set aside."""
    return {(identity(r), r.get("key", "")): r for r in _read(path.with_name("earlier.jsonl")) + _read(path)}


def identity(record: dict) -> Identity:
    return record["stage"], record.get("max_turns", -1), record.get("sample", 0), record["id"]


def evaluate(
    wanted: dict[Identity, str],
    done: dict[Identity, dict],
    make_episode: Callable[[Identity], Episode],
    open_engine: Callable,  # gives an engine: play(episodes) yields batches as they finish
    judge: Any,
    path: Path,
    facts: dict,  # of the stage, for every record: which vocabulary the ids are of
    say: Callable[[str], None] = print,
) -> None:
    """Play and judge what of `wanted` is not in `done` yet, and put it there and into the file."""
    todo = [i for i in wanted if i not in done]
    if not todo:
        return
    engine, database = open_engine(), functools.cache(file_hash)
    over, right, judged, began = 0, 0, 0, time.perf_counter()  # without the time that loading takes
    last = turn = began
    with open(path, "a", encoding="utf-8", errors="replace") as out:  # a server may send lone surrogates
        for batch in engine.play([make_episode(i) for i in todo]):
            seconds = (time.perf_counter() - turn) / len(batch)
            for record in records_of(batch, todo[0][0], judge):
                i = identity(record)
                data = database(record["db_path"]) if record.get("db_path") else ""
                record |= {"judge": judge.judge_of(record), "database": data}
                record |= {"key": wanted[i], "seconds": round(seconds, 3)} | facts
                done[i] = record
                out.write(json.dumps(record, ensure_ascii=False) + "\n")
                judged += record["correct"] is not None
                right += record["correct"] is True
            out.flush()
            over, turn = over + len(batch), time.perf_counter()
            if turn - last > SAY_EVERY or over == len(todo):
                left, last = (turn - began) / over * (len(todo) - over), turn
                share = f"{right / judged:.1%} correct" if judged else "none judged"
                say(f"  {todo[0][0]}: {over}/{len(todo)} episodes, {share}, {left:.0f} s left")


def records_of(batch: list[Episode], stage: str, judge: Any) -> list[dict]:
    """The judged episodes as they are kept; `judge` is the package `rewards`, which core does not import."""
    played = [e for e in batch if not e.error]
    scores = judge.score_batch([e.row for e in played], [e.completion for e in played])
    firsts = _first_correct(played, scores, judge)
    known = {id(e): facts for e, *facts in zip(played, scores, firsts, strict=True)}
    return [{"stage": stage} | _record(e, *known.get(id(e), ({}, None)), judge) for e in batch]


def _first_correct(played: list[Episode], scores: list[dict], judge: Any) -> list[bool | None]:
    """Whether the first query of each episode was right; judged apart only where the final answer is another one."""
    out: list[bool | None] = []
    cuts = []
    for n, (episode, found) in enumerate(zip(played, scores, strict=True)):
        first = judge.first_attempt(episode.row, episode.completion)
        out.append(None if first is None else judge.holds(found, judge.PRIMARY[episode.row["environment"]]))
        if first and judge.answer_text(episode.row, first) != judge.answer_text(episode.row, episode.completion):
            cuts.append((n, first))
    rows = [played[n].row for n, _ in cuts]
    for (n, _), row, found in zip(cuts, rows, judge.score_batch(rows, [first for _, first in cuts]), strict=True):
        out[n] = judge.holds(found, judge.PRIMARY[row["environment"]])
    return out


def _record(episode: Episode, scores: dict, first: bool | None, judge: Any) -> dict:
    row, completion = episode.row, episode.completion
    calls = [m for m in completion if m["role"] == "tool"]
    kind = row["environment"]
    return {
        "max_turns": episode.agent.max_turns,
        "sample": episode.sample,
        **{key: row[key] for key in KEPT if key in row},
        "completion": completion,
        "answer": judge.answer_text(row, completion),
        "rewards": scores,
        "correct": judge.holds(scores, judge.PRIMARY[kind]),
        "strict": judge.holds(scores, judge.STRICT.get(kind)),
        "first_correct": first,
        "executes": judge.holds(scores, judge.EXECUTES.get(kind)),
        "well_formed": judge.holds(scores, judge.FORMAT.get(kind)),
        "error": episode.error,
        "turns": episode.turns,
        "tool_calls": len(calls),
        "tool_errors": sum(tells_error(m["content"]) for m in calls),
        "tokens": episode.tokens,
        "truncated": episode.truncated,
        "seconds": round(episode.seconds, 3),
        "prompt_ids": episode.prompt_ids,
        "completion_ids": episode.completion_ids,
        "mask": episode.mask,
    }


def tells_error(result: str) -> bool:
    """Whether a tool's result is an error, as the environments and TRL word it; a column may be called error_code."""
    return result.lower().startswith(("error:", "{'error':"))


def assert_same_prompts(records: dict[str, list[dict]]) -> None:
    """Stages of one vocabulary were asked with the very same ids, whatever engine played them."""
    first: dict[tuple, tuple] = {}
    for stage, found in records.items():
        for r in (r for r in found if r["prompt_ids"]):
            there, ids = first.setdefault((r["vocabulary"], r["max_turns"], r["id"]), (stage, r["prompt_ids"]))
            if ids != r["prompt_ids"]:
                raise UserError(
                    f"{r['id']}: stage {stage} was asked with other ids than {there}, so that the two do not compare: the "
                    "episodes come from different code or chat templates. The same command with --restart plays them again"
                )


def _read(path: Path) -> list[dict]:
    """Records on disk; a last line cut by a crash is dropped, damage elsewhere is an error."""
    if not path.exists():
        return []
    text = path.read_text(encoding="utf-8", errors="replace")  # the cut may go through a character
    lines = text.rstrip("\n").split("\n")  # not splitlines: text may hold other line ends
    records = []
    for number, line in enumerate(lines, 1):
        try:
            records += [json.loads(line)] if line else []
        except json.JSONDecodeError as error:
            if number < len(lines):
                raise UserError(f"{path}:{number} is not JSON ({error}): --restart plays the episodes again") from error
    return records

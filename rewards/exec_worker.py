"""The part of the execution judge that runs inside a worker process: run gold (or remember it), run the prediction, compare.

Imports nothing but the standard library and the sandbox, so that a worker starts in some 50 ms. rewards/exec_match.py hands out
the work.
"""

import time
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

from envs.sqlite_exec import Limits, QueryError, Result, execute
from envs.sqlite_worker import alarm, emit, mark
from rewards.exec_compare import (
    as_written,
    canonical_text,
    normalise,
    official_text,
    ordered_at_top,
    packed,
    same_official,
    same_strict,
)

GOLD_ROWS, GOLD_BYTES = 500_000, 64 << 20  # a gold result beyond that is not judged
GOLD_CACHE_BYTES = 128 << 20  # of each worker
QUICK_CELL = 16_000  # bytes: no function of SQLite takes long on values of this size
FLUSH_SECONDS = 0.005


@dataclass
class Job:
    """What a chunk of pairs on one database has in common."""

    db_path: str
    content: str  # names the content of the file: key of the gold cache
    stat: tuple
    mode: str
    keep_distinct: bool
    twin: str = (
        ""  # run the prediction there: gold against itself tells whether its result hangs on the order of the rows
    )


@dataclass
class Gold:
    result: Result | None
    error: str
    blob: bytes
    ordered: bool
    text: str = ""  # canonical


_golds: OrderedDict[tuple, Gold] = OrderedDict()
_gold_bytes = 0


def _limits(timeout: float, quick: bool) -> Limits:
    return Limits(timeout, GOLD_ROWS, GOLD_BYTES, QUICK_CELL if quick else GOLD_BYTES)


def _gold(job: Job, sql: str, timeout: float, quick: bool) -> Gold:
    """Raises QueryError for what a longer limit, or another moment, may change; a gold that fails for good is an answer."""
    global _gold_bytes
    key = (job.content, sql, job.mode, job.keep_distinct)
    if key in _golds:
        _golds.move_to_end(key)
        return _golds[key]
    official = job.mode == "official"
    text = official_text(sql, job.keep_distinct) if official else normalise(sql)
    ordered = "order by" in text.lower() if official else ordered_at_top(text)
    errors = "ignore" if official else "surrogateescape"
    try:
        result = execute(job.db_path, text, _limits(timeout, quick), errors=errors, stat=job.stat)
    except QueryError as error:
        if error.kind in ("timeout", "limit", "infrastructure"):
            raise
        return Gold(None, f"gold fails: {error}", b"", ordered)
    if result.truncated:
        return Gold(None, f"gold gives more than {GOLD_ROWS} rows or {GOLD_BYTES} bytes", b"", ordered)
    gold = Gold(result, "", packed(result.rows), ordered, canonical_text(text))
    if result.steady and len(gold.blob) * 5 < GOLD_CACHE_BYTES:
        _golds[key] = gold
        _gold_bytes += len(gold.blob) * 5 + 2000  # Python's objects take about five times the packed size
        while _gold_bytes > GOLD_CACHE_BYTES:
            _gold_bytes -= len(_golds.popitem(last=False)[1].blob) * 5 + 2000
    return gold


def _verdict(job: Job, gold: Gold, pred: str, timeout: float, quick: bool) -> tuple[bool | None, str, bool]:
    """-> (correct, reason, may be cached)"""
    official, answer = job.mode == "official", gold.result
    if not pred.strip():
        as_official = official and job.keep_distinct and not answer.rows  # that tool runs it and gets no rows
        return as_official, "empty prediction" + ", empty gold" * as_official, answer.steady
    text = official_text(pred, job.keep_distinct or not answer.tables) if official else normalise(pred)
    # strictly, gold that reads no table is an answer without its query: a prediction must find it, not repeat it
    if answer.steady and not job.twin and canonical_text(text) == gold.text and (official or answer.tables):
        return True, "same query", True
    result = execute(
        job.twin or job.db_path,
        text,
        _limits(timeout, quick),
        errors="ignore" if official else "surrogateescape",
        # A prediction with more rows than gold is wrong whatever they hold: one more row than gold has is enough to know.
        stat=None if job.twin else job.stat,
        expect=lambda columns: len(answer.rows) if columns == len(answer.columns) else 0,
    )
    steady = answer.steady and result.steady
    if result.truncated or len(result.rows) != len(answer.rows):
        if len(result.columns) != len(answer.columns):
            return False, f"{len(result.columns)} columns, gold has {len(answer.columns)}", steady
        found = f"more than {len(result.rows)}" if result.truncated else str(len(result.rows))
        return False, f"{found} rows, gold has {len(answer.rows)}", steady
    elsewhere = answer.tables and not answer.rows and result.tables != answer.tables
    if not official and (not result.tables or elsewhere):
        return False, f"reads {_names(result.tables)}, gold reads {_names(answer.tables)}", steady
    if gold.blob == packed(result.rows):
        return True, "same result", steady
    rows, found = answer.rows, result.rows
    if result.tables and not answer.tables:  # an answer without its query, which cannot say its columns' types
        rows, found = as_written(rows), as_written(found)
    same = (same_official if official else same_strict)(rows, found, gold.ordered)
    if same is None:
        return None, "the results are too alike to be compared in bounded time", steady
    return same, "same result" if same else "different values" + " or order" * gold.ordered, steady


def _names(tables: frozenset[str]) -> str:
    return ", ".join(sorted(tables)) or "no table"


def judge(job: Job, pairs: list[tuple[int, str, str]], timeout: float, quick: bool, shared: bool) -> str:
    """Emit lists of (index, status, reason, may be cached); status is True, False, None, or "slow" | "gold" | "timeout".

    quick: limits so tight that a query which meets one is "slow", to be run again alone, and no single step of SQLite is long.
    shared: `timeout` is for gold and prediction together. "gold" (alone, before the prediction runs) carries gold's seconds.
    """
    outcomes: list[tuple[int, Any, str, bool]] = []
    flushed = time.monotonic()
    for index, gold_sql, pred in pairs:
        outcomes.append((index, *_judge_one(job, index, gold_sql, pred, timeout, quick, shared)))
        if time.monotonic() - flushed > FLUSH_SECONDS:
            emit(outcomes)
            outcomes, flushed = [], time.monotonic()
    alarm(0)
    mark(-1)
    if outcomes:
        emit(outcomes)
    return "done"


def _judge_one(job: Job, index: int, gold_sql: str, pred: str, timeout: float, quick: bool, shared: bool) -> tuple:
    # execute() checks that the file still has the fingerprint under which gold was remembered; where nothing runs (a
    # prediction that is gold's own text), the answer does not hang on the file.
    part, started = "gold", time.monotonic()
    mark(index)
    if quick:
        alarm(2 * timeout + 1.0, 2 * timeout + 0.05)
    else:
        alarm(timeout)
    try:
        gold = _gold(job, gold_sql, timeout, quick)
        if gold.result is None:
            return None, gold.error, False
        if not quick:
            emit([(index, "gold", gold.result.seconds, False)])
            if shared:
                timeout = max(0.001, timeout - (time.monotonic() - started))
            alarm(timeout)
        part = "prediction"
        return _verdict(job, gold, pred, timeout, quick)
    except QueryError as error:
        if quick and error.kind in ("timeout", "limit"):
            return "slow", str(error), False
        if error.kind == "infrastructure":
            return None, str(error), False
        if part == "gold":
            return None, f"gold fails: {error}", False
        if error.kind == "timeout":
            return "timeout", str(error), False
        return False, f"{error.kind}: {error}", True
    except MemoryError:
        return ("slow" if quick else None), "out of memory while comparing", False

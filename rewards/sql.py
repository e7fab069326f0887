"""Rewards of the SQL tasks: execution match first, small terms that break ties after it.

Default weights: exec_match 1.0, executes 0.1, schema_linking 0.1, sql_format 0.1, turn_economy 0.05. A wrong episode so
earns at most 0.3 and a right one at least 1.0: no shaping outweighs being right. turn_economy is paid for right answers
only, else giving up early would pay. `exec_match_strict` is the same judge in its strict mode: the safer training signal,
because in official mode an empty result equals any other empty result.

Every function takes TRL's keyword columns, one value an episode, and returns one number an episode: None where the row is
not a SQL row, or where the judge could not tell (a failing gold, a missing database), never 0 for that.
"""

import os
import re
import time
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache

from envs.sql import read_schema
from envs.sqlite_exec import QueryError, run_query
from rewards import episode

TOOL, ARGUMENT = "execute_sql", "query"
MAX_SQL = 10_000  # characters; longer queries earn no schema_linking
MAX_FINAL = 2000  # characters of a well-formed final message
FREE_CALLS, MOST_CALLS = (2, 6)  # tool calls: full economy up to FREE_CALLS, none from MOST_CALLS on
QUERY_SECONDS, BATCH_SECONDS = 3.0, 10.0  # limits of `executes`
JUDGE_SECONDS, PAIRS_PER_SECOND = 5.0, 50  # a query's limit in the judge; a batch may take BATCH_SECONDS and this rate
MOST_WRONG = 50_000

_BLOCK = re.compile(r"```[ \t]*sql(?:ite)?[ \t]*\n?(.*?)```", re.DOTALL | re.IGNORECASE)


def final_sql(completion: list[dict]) -> str:
    """The episode's answer: the last ```sql block of the final message, else the last query passed to the tool."""
    final = episode.final_message(completion)
    if final and (blocks := sql_blocks(final)):
        return blocks[-1].strip()
    queries = [q for c in episode.calls(completion) if (q := episode.argument(c, TOOL, ARGUMENT)) is not None]
    return queries[-1].strip() if queries else ""


def sql_blocks(text: str) -> list[str]:
    return _BLOCK.findall(text)


def exec_match(completions, environment, gold, db_path, **columns) -> list[float | None]:
    """1.0 where the answer gives gold's result, by the official evaluator's rules."""
    return _matches(completions, environment, gold, db_path, "official")


def exec_match_strict(completions, environment, gold, db_path, **columns) -> list[float | None]:
    """1.0 where the answer gives gold's result, by the strict rules of rewards.exec_match."""
    return _matches(completions, environment, gold, db_path, "strict")


def executes(completions, environment, gold, db_path, **columns) -> list[float | None]:
    """1.0 where the answer runs in the sandbox and reads a table of the database (SELECT 1 is no attempt)."""
    wanted = [
        (p, final_sql(c)) if e == "sql" else None for c, e, p in zip(completions, environment, db_path, strict=True)
    ]
    todo = list(dict.fromkeys(w for w in wanted if w is not None))
    deadline = time.monotonic() + BATCH_SECONDS
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        known = dict(zip(todo, pool.map(lambda w: runs(*w, deadline), todo), strict=True))
    return [None if w is None else known[w] for w in wanted]


def schema_linking(completions, environment, gold, db_path, **columns) -> list[float | None]:
    """F1 of the table and column names in the answer against those in gold."""
    rows = zip(completions, environment, gold, db_path, strict=True)
    return [_linking(final_sql(c), g, p) if e == "sql" else None for c, e, g, p in rows]


def sql_format(completions, environment, gold, db_path, **columns) -> list[float | None]:
    """1.0 for the protocol kept: valid calls only, at least one of them answered, then a short final message."""
    return [float(_well_formed(c)) if e == "sql" else None for c, e in zip(completions, environment, strict=True)]


def turn_economy(completions, environment, gold, db_path, **columns) -> list[float | None]:
    """For right answers: 1.0 for one or two queries, less for each more, 0.0 from six on and for none."""
    right = _matches(completions, environment, gold, db_path, "official")  # remembered, not run again
    return [r if not r else _economy(c) for c, r in zip(completions, right, strict=True)]


# (mode, answer, gold, database, its mtime) found wrong, also by running into a limit, which the judge does not remember.
# Right ones are not kept here: a query with random() that was lucky once must not stay right.
_wrong: set[tuple] = set()


def _matches(completions, environment, gold, db_path, mode: str) -> list[float | None]:
    from rewards.exec_match import exec_match_batch  # here, so that `python -m rewards.exec_match` is loaded only once

    keys: dict[int, tuple] = {}
    for i, kind in enumerate(environment):
        if kind == "sql":
            changed = os.stat(db_path[i]).st_mtime_ns if os.path.exists(db_path[i]) else 0
            keys[i] = (mode, final_sql(completions[i]), gold[i], db_path[i], changed)
    if len(_wrong) > MOST_WRONG:
        _wrong.clear()
    # no answer is never right, though the official evaluator takes it for an empty result in one of its modes
    todo = [k for k in dict.fromkeys(keys.values()) if k[1] and k not in _wrong]
    columns = ([k[part] for k in todo] for part in (1, 2, 3))
    verdicts = exec_match_batch(
        *columns, mode=mode, timeout=JUDGE_SECONDS, batch_timeout=BATCH_SECONDS + len(todo) / PAIRS_PER_SECOND
    )
    decided = {k: v.correct for k, v in zip(todo, verdicts, strict=True)}
    _wrong.update(k for k, correct in decided.items() if correct is False)
    out: list[float | None] = [None] * len(completions)
    for i, key in keys.items():
        correct = decided[key] if key in decided else False
        out[i] = None if correct is None else float(correct)
    return out


def runs(db_path: str, sql: str, deadline: float) -> float | None:
    """1.0 where the query runs and reads a table, None where that cannot be known by the deadline (time.monotonic())."""
    if not sql:
        return 0.0
    left = deadline - time.monotonic()
    if left <= 0.05:
        return None  # the others of this batch used up the time
    try:
        return float(bool(run_query(db_path, sql, timeout=min(QUERY_SECONDS, left), max_rows=1).tables))
    except QueryError as error:
        unknown = error.kind == "infrastructure" or error.kind == "timeout" and left < QUERY_SECONDS
        return None if unknown else 0.0


def _linking(sql: str, gold: str, db_path: str) -> float | None:
    try:
        schema = read_schema(os.path.abspath(db_path), os.stat(db_path).st_mtime_ns)
    except (OSError, QueryError):
        return None
    known = {name.lower() for table, columns in schema.items() for name in (table, *columns)}
    wanted, named = _words(gold) & known, _words(sql) & known
    if not wanted:
        return None  # nobody can say what gold names
    return 2 * len(named & wanted) / (len(named) + len(wanted))


@lru_cache(maxsize=20_000)
def _words(sql: str) -> frozenset[str]:
    """The words of a query that may be names, in lower case: no strings, comments, functions, or aliases being given.

    By sqlglot's tokenizer, which is linear, and not by its parser, which is not: `SELECT * FROM a JOIN a JOIN a ...`, 25
    times, takes it minutes, and a policy would find that. It also reads what SQLite cannot.
    """
    if len(sql) > MAX_SQL:
        return frozenset()
    from sqlglot.dialects.sqlite import SQLite  # here, because the judge's workers import this package and start often
    from sqlglot.errors import SqlglotError
    from sqlglot.tokens import TokenType

    try:
        tokens = SQLite.Tokenizer().tokenize(sql)
    except SqlglotError:
        return frozenset()
    words = set()
    for before, token, after in zip([None, *tokens], tokens, [*tokens[1:], None], strict=False):
        called = after is not None and after.token_type == TokenType.L_PAREN and token.token_type == TokenType.VAR
        given = before is not None and before.token_type == TokenType.ALIAS
        if token.token_type not in (TokenType.STRING, TokenType.NUMBER) and not called and not given:
            words.add(token.text.lower())
    return frozenset(words)


def _well_formed(completion: list[dict]) -> bool:
    final = episode.final_message(completion)
    if not final or len(final) > MAX_FINAL or len(sql_blocks(final)) > 1 or episode.has_stray_tags(completion):
        return False
    made = episode.calls(completion)
    return (
        all(episode.argument(c, TOOL, ARGUMENT) is not None for c in made)
        and any(c.result is not None for c in made)
        and len(made) <= MOST_CALLS
    )


def _economy(completion: list[dict]) -> float:
    made = len(episode.calls(completion))
    return 0.0 if made == 0 else min(1.0, max(0.0, (MOST_CALLS - made) / (MOST_CALLS - FREE_CALLS)))

"""Run one untrusted SQL query on a SQLite file, read-only and bounded: the sandbox of the SQL tool and of the judge.

    from envs.sqlite_exec import QueryError, run_query
    result = run_query("shop.sqlite", "SELECT name FROM product", timeout=5.0, max_rows=100)
    result.columns, result.rows, result.truncated

Every query runs in a killable worker process (envs/sqlite_worker.py), because no in-process limit of SQLite fires inside
one long VM step (a sort, a LIKE on a long string) or while a statement is prepared. Layers, outermost first:

1. the worker: an alarm of the kernel ends it at 1.03x the time limit, whatever SQLite does; it cannot write a byte to any
   file (RLIMIT_FSIZE 0), its memory is bounded (RLIMIT_AS, SQLite's hard heap limit), a crash of SQLite stays in it;
2. the connection: `mode=ro&immutable=1`, query_only, temporary data in memory only, sqlite3_limit on the size of a cell;
3. the authorizer: SELECT, EXPLAIN of a SELECT and a short list of reading PRAGMAs; no ATTACH, no load_extension, no virtual
   table that shows other statements (sqlite_stmt would show the gold query of the judge);
4. the progress handler: wall clock and VM steps, with a proper message;
5. rows and bytes of the result.

immutable=1 takes no locks, makes no -wal or -shm file and ignores a write-ahead log. So a database with a non-empty -wal or
-journal beside it (somebody is writing, or did not finish) is refused with kind "infrastructure" and the command that
repairs it. A file that changed between two queries is noticed by its stat fingerprint and opened again; one that changes
during a query gives one retry, then kind "infrastructure".

Not covered: the machine's CPU time beyond the limit (use fewer workers), side channels by timing, bugs of SQLite that break
out of the worker (it runs as the same user, without seccomp or a container), and databases that the user does not trust
as files (a corrupt file is reported, but views and triggers of the database are taken as the user's own).
"""

import marshal
import os
import sqlite3
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import quote

KINDS = ("sql", "denied", "timeout", "limit", "infrastructure")
MAX_SQL_CHARS = 100_000
MAX_OPEN = 64  # connections a worker keeps open, least recently used first out
STEPS_PER_CALL = 4_000  # VM steps between two calls of the progress handler: about 0.05 ms
HEAP_BYTES = 512 << 20  # SQLite's heap in one worker; a kernel limit of 4x that bounds the whole process

READ_PRAGMAS = {
    "table_info",
    "table_xinfo",
    "table_list",
    "index_list",
    "index_info",
    "index_xinfo",
    "foreign_key_list",
}
VALUE_PRAGMAS = {"user_version", "application_id", "encoding", "page_count", "page_size"}  # to read, never to set
DENIED_FUNCTIONS = {"load_extension", "readfile", "writefile", "edit", "fts3_tokenizer", "sqlite_log", "sha1_query"}
DENIED_TABLES = {"sqlite_stmt", "sqlite_dbpage", "fts3tokenize", "bytecode", "tables_used", "sqlite_memstat", "fsdir"}
UNSTEADY_FUNCTIONS = {  # results that may differ from one call to the next: never cached
    "random", "randomblob", "date", "time", "datetime", "julianday", "strftime", "unixepoch", "timediff",
    "current_date", "current_time", "current_timestamp", "changes", "total_changes", "last_insert_rowid",
}  # fmt: skip
BROKEN_FILE = {
    sqlite3.SQLITE_CORRUPT,
    sqlite3.SQLITE_NOTADB,
    sqlite3.SQLITE_IOERR,
    sqlite3.SQLITE_BUSY,
    sqlite3.SQLITE_LOCKED,
    sqlite3.SQLITE_CANTOPEN,
}


class QueryError(Exception):
    """A query that gave no result. str(error) is what SQLite says, where SQLite said it. kind: one of KINDS.

    "infrastructure" is not the query's fault (no such file, the file changes, the worker was killed from outside): a reward must
    be None then, never 0.
    """

    def __init__(self, message: str, kind: str = "sql"):
        super().__init__(message)
        assert kind in KINDS, kind
        self.kind = kind

    def __reduce__(self):
        return QueryError, (str(self), self.kind)


@dataclass(frozen=True)
class Limits:
    timeout: float = 5.0  # seconds
    max_rows: int = 1000  # more rows are cut and .truncated says so
    max_bytes: int = 8 << 20  # of the whole result
    max_cell: int = 8 << 20  # bytes of a value or of a record inside SQLite
    max_steps: int = 2_000_000_000  # VM steps


@dataclass
class Result:
    columns: list[str]
    rows: list[tuple]
    truncated: bool
    tables: frozenset[str] = frozenset()  # tables of the database that the statement reads, lower case
    steady: bool = True  # false where the result may differ next time (random(), date('now'))
    seconds: float = 0.0


def fingerprint(db_path: str) -> tuple:
    """What the file system says of the file; it changes when the file does. Raises QueryError for what cannot be judged on."""
    try:
        stat = os.stat(db_path)
    except OSError as error:
        raise QueryError(f"cannot read the database {db_path}: {error.strerror}", "infrastructure") from None
    for suffix, command in (("-wal", "PRAGMA wal_checkpoint(TRUNCATE)"), ("-journal", "PRAGMA schema_version")):
        try:
            pending = os.stat(db_path + suffix).st_size
        except OSError:
            continue
        if pending:
            raise QueryError(
                f"{db_path}{suffix} is not empty: the database has changes that are not in its file yet. Close the program "
                f"that writes it, then: sqlite3 {db_path} '{command}'",
                "infrastructure",
            )
    return stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns


def settled(stat: tuple, now_ns: int | None = None) -> bool:
    """False while the file is so young that a second change could leave the same timestamps (clock ticks are some ms)."""
    return (time.time_ns() if now_ns is None else now_ns) - max(stat[3], stat[4]) > 50_000_000


@dataclass
class _Guard:
    """What the callbacks of one connection see of the query that runs now."""

    deadline: float = 0.0
    steps_left: int = 0
    stopped: str = ""
    denied: str | None = None
    steady: bool = True
    tables: set[str] = field(default_factory=set)

    def progress(self) -> int:
        self.steps_left -= STEPS_PER_CALL
        if self.steps_left < 0:
            self.stopped = "steps"
        elif time.monotonic() > self.deadline:
            self.stopped = "timeout"
        return bool(self.stopped)

    def authorize(
        self, action: int, first: str | None, second: str | None, database: str | None, origin: str | None
    ) -> int:
        if action == sqlite3.SQLITE_READ:
            name = (first or "").lower()
            if name not in DENIED_TABLES:
                self.tables.add(name)
                return sqlite3.SQLITE_OK
        elif action == sqlite3.SQLITE_SELECT or action == sqlite3.SQLITE_RECURSIVE:
            return sqlite3.SQLITE_OK
        elif action == sqlite3.SQLITE_FUNCTION:
            name = (second or "").lower()
            if name not in DENIED_FUNCTIONS:
                if name in UNSTEADY_FUNCTIONS:
                    self.steady = False
                return sqlite3.SQLITE_OK
            first = second
        elif action == sqlite3.SQLITE_PRAGMA:
            name = (first or "").lower()
            if name in READ_PRAGMAS or (name in VALUE_PRAGMAS and second is None):
                return sqlite3.SQLITE_OK
        elif action == sqlite3.SQLITE_UPDATE and first == "sqlite_master":
            return (
                sqlite3.SQLITE_OK
            )  # SQLite asks this when it opens a virtual table (json_each, FTS); it cannot be written
        if self.denied is None:
            self.denied = DETAILED.get(action, "") and f" ({DETAILED[action]} {first})"
        return sqlite3.SQLITE_DENY


DETAILED = {sqlite3.SQLITE_FUNCTION: "function", sqlite3.SQLITE_READ: "table", sqlite3.SQLITE_PRAGMA: "PRAGMA"}


@dataclass
class Database:
    stat: tuple
    connection: sqlite3.Connection
    guard: _Guard
    base_tables: frozenset[str]
    lenient: bool = False  # text that is not UTF-8 was met: decode in Python from then on


_open: OrderedDict[str, Database] = OrderedDict()


def open_database(db_path: str, stat: tuple | None = None) -> Database:
    """The open connection of this process (a worker runs one thread). stat: the fingerprint, where the caller has it."""
    stat = stat or fingerprint(db_path)
    database = _open.get(db_path)
    if database is not None:
        if database.stat == stat and settled(stat):
            _open.move_to_end(db_path)
            return database
        _open.pop(db_path).connection.close()
    guard = _Guard()
    try:
        uri = f"file:{quote(str(Path(db_path).absolute()))}?mode=ro&immutable=1"
        connection = sqlite3.connect(uri, uri=True, isolation_level=None, cached_statements=0)
        for pragma in (f"hard_heap_limit={HEAP_BYTES}", "temp_store=MEMORY", "query_only=ON", "cell_size_check=ON"):
            connection.execute(f"PRAGMA {pragma}")
        names = connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall()
    except sqlite3.Error as error:
        raise QueryError(f"cannot open the database {db_path}: {error}", "infrastructure") from None
    connection.setlimit(sqlite3.SQLITE_LIMIT_ATTACHED, 0)
    connection.setlimit(sqlite3.SQLITE_LIMIT_WORKER_THREADS, 0)
    connection.setlimit(sqlite3.SQLITE_LIMIT_VDBE_OP, 250_000)
    connection.setlimit(sqlite3.SQLITE_LIMIT_LIKE_PATTERN_LENGTH, 5_000)
    connection.set_progress_handler(guard.progress, STEPS_PER_CALL)
    connection.set_authorizer(guard.authorize)
    tables = frozenset(name.lower() for (name,) in names)  # SQLite's lower() knows ASCII only
    database = Database(stat, connection, guard, tables)
    _open[db_path] = database
    if len(_open) > MAX_OPEN:
        _open.popitem(last=False)[1].connection.close()
    return database


def execute(
    db_path: str,
    sql: str,
    limits: Limits,
    *,
    errors: str = "replace",
    expect: Callable | None = None,
    stat: tuple | None = None,
) -> Result:
    """Run one statement on this process's own connection, inside a worker: layers 2 to 5. run_query() is for everybody else.

    errors: how text that is not UTF-8 is decoded. expect(column count) -> rows worth fetching: lets the judge stop early.
    stat: the fingerprint that the file must have; without it a file that changes during the query gives one retry.
    """
    if not isinstance(sql, str):
        raise QueryError(f"a query is text, not {type(sql).__name__}")
    if len(sql) > MAX_SQL_CHARS:
        raise QueryError(f"the query is longer than {MAX_SQL_CHARS} characters", "limit")
    started = time.monotonic()
    for _ in range(2):
        database = open_database(db_path, stat)
        try:
            result = _execute(database, sql, limits, started, errors, expect)
        except QueryError:
            if fingerprint(db_path) == (stat or database.stat):
                raise
        else:
            if fingerprint(db_path) == (stat or database.stat):
                return result
        if stat:
            break
    raise QueryError(f"the database {db_path} changed while the query ran", "infrastructure")


def _execute(
    database: Database, sql: str, limits: Limits, started: float, errors: str, expect: Callable | None
) -> Result:
    guard, connection = database.guard, database.connection
    guard.deadline, guard.steps_left = started + limits.timeout, limits.max_steps
    guard.stopped, guard.denied, guard.steady, guard.tables = "", None, True, set()
    connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, limits.max_cell)
    connection.text_factory = (lambda raw: raw.decode(errors=errors)) if database.lenient else str
    cursor = None
    try:
        cursor = connection.execute(sql)
        if (
            cursor.description is None
        ):  # REINDEX without an index asks the authorizer nothing, and a comment is no query
            raise QueryError("the text holds no query that gives a result", "denied" if sql.strip() else "sql")
        columns = [column[0] for column in cursor.description]
        wanted = limits.max_rows if expect is None else expect(len(columns))
        rows, truncated = _fetch(cursor, wanted, limits.max_bytes)
    except sqlite3.OperationalError as error:
        if not database.lenient and str(error).startswith("Could not decode to UTF-8"):
            database.lenient = True
            return _execute(database, sql, limits, started, errors, expect)
        raise _explain(error, guard, limits) from None
    except (sqlite3.Error, sqlite3.Warning, MemoryError, ValueError, OverflowError) as error:
        raise _explain(error, guard, limits) from None
    finally:
        if cursor is not None:
            cursor.close()
    tables = frozenset(guard.tables & database.base_tables)
    return Result(columns, rows, truncated, tables, guard.steady, time.monotonic() - started)


def _fetch(cursor: sqlite3.Cursor, max_rows: int, max_bytes: int) -> tuple[list[tuple], bool]:
    rows, room = [], max_bytes
    while len(rows) <= max_rows:
        part = cursor.fetchmany(min(256 if rows else 16, max_rows + 1 - len(rows)))
        if not part:
            return rows, False
        size = len(marshal.dumps(part, 2))
        if size > room:
            for row in part:
                room -= len(marshal.dumps(row, 2))
                if room < 0:
                    break
                rows.append(row)
            if not rows:
                raise QueryError(f"the result is larger than {max_bytes} bytes", "limit")
            return rows[:max_rows], True
        room -= size
        rows += part
    return rows[:max_rows], True


def _explain(error: BaseException, guard: _Guard, limits: Limits) -> QueryError:
    text = str(error)
    if guard.stopped == "timeout":
        return QueryError(f"interrupted: the query ran longer than {limits.timeout:g} s", "timeout")
    if guard.stopped == "steps":
        return QueryError(f"interrupted: the query took more than {limits.max_steps} steps", "timeout")
    if guard.denied is not None:
        return QueryError(
            f"not authorized{guard.denied}: only SELECT, WITH, EXPLAIN and reading PRAGMAs run here", "denied"
        )
    if isinstance(error, MemoryError):
        return QueryError("out of memory: the query needs more than it may use", "limit")
    if "too big" in text or "pattern too complex" in text:
        return QueryError(text, "limit")
    if "one statement at a time" in text:
        return QueryError("You can only execute one statement at a time.", "denied")
    # by the code and never by the text, which a query can choose: `SELECT locked` is told "no such column: locked"
    if getattr(error, "sqlite_errorcode", 0) & 0xFF in BROKEN_FILE:
        return QueryError(text, "infrastructure")
    return QueryError(text)


def run_query(
    db_path: str | Path,
    sql: str,
    timeout: float = 5.0,
    max_rows: int = 1000,
    max_bytes: int = 8 << 20,
    max_steps: int = 2_000_000_000,
) -> Result:
    """Run one reading statement; safe to call from any number of threads and processes. Raises QueryError.

    timeout: seconds from the start of the query to an answer, kept within 20 % (starting a worker, once, comes on top).
    """
    if timeout <= 0 or max_rows < 0 or max_bytes <= 0 or max_steps <= 0:
        raise ValueError(f"limits must be positive, found {timeout=} {max_rows=} {max_bytes=} {max_steps=}")
    from envs.sqlite_worker import WorkerDied, borrow  # here, as the worker itself imports this module

    request = os.path.abspath(db_path), sql, Limits(timeout, max_rows, max_bytes, max_bytes, max_steps)
    for _ in range(2):
        try:
            with borrow(1, timeout) as workers:
                if not workers:
                    raise QueryError(f"every worker of the sandbox was busy for {timeout:g} s", "infrastructure")
                answer = workers[0].call("envs.sqlite_exec:execute", request, timeout)
        except WorkerDied as death:
            if death.timed_out:
                raise QueryError(f"interrupted: the query ran longer than {timeout:g} s", "timeout") from None
            continue  # killed from outside (or by a crash): once more, in a new worker
        except OSError as error:
            raise QueryError(f"the sandbox cannot start a worker: {error}", "infrastructure") from None
        if isinstance(answer, Exception):
            raise answer
        return answer
    raise QueryError("the worker that ran the query was killed twice", "infrastructure")

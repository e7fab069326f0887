"""The SQL environments: one tool that runs a query in the sandbox and answers in few, readable characters.

The result is a line of column names, a line per row (cells joined by ` | `) and a closing line with the number of rows:

    name | age
    Ann | 31
    'NULL' | NULL
    (2 rows)

Always at most `max_chars` characters, because a small model with 2k tokens of context reads it: rows, columns and long
cells are cut, and the text says so. A missing value is NULL; text that could be taken for something else ('NULL', the
empty text, ` | `, line breaks, outer blanks) is quoted. Numbers have 15 digits, blobs are hexadecimal. Marks of the chat
protocol inside data (`<|im_end|>`, `<tool_call>`) are broken up, so that data cannot speak as the system or the user.

An error is what SQLite says, plus the nearest names of the schema. State is per episode and holds the path and a call
counter: never the row, so no query and no error can show the gold. The sandbox is envs.sqlite_exec; see there for what
it does not cover. Data that tries to persuade the model in plain words is not covered either.
"""

import difflib
import os
import re
from functools import lru_cache
from pathlib import Path

from envs.sqlite_exec import QueryError, Result, run_query

FETCH_ROWS = 1000  # rows that are counted; only max_rows of them are shown
FETCH_BYTES = 1 << 20
MAX_ERROR = 240  # characters of SQLite's own error text, which may echo the query
SHAPES = ((40, 100), (40, 40), (20, 24), (10, 16), (5, 12), (1, 12))  # (columns, characters of a cell), widest first
EMPTY = "(0 rows: the result is empty)"

_MARKS = re.compile(r"<(?=\||/?(?:tool_|think|answer))", re.IGNORECASE)


class _DatabaseEnv:
    """What the environments with a database share; each has its tool as a method of its own."""

    def __init__(self, max_turns: int = 5, max_rows: int = 20, max_chars: int = 1200, timeout: float = 5.0):
        self._session = _Session(max_turns, max_rows, max_chars, timeout)

    @property
    def trouble(self) -> str:
        """Why nobody can say whether this episode is right; empty where nothing failed."""
        return self._session.trouble

    def reset(self, **row) -> None:
        self._session.start(row)


class SQLEnv(_DatabaseEnv):
    """What a text-to-SQL agent acts in."""

    def execute_sql(self, query: str) -> str:
        """Runs one SQLite SELECT query and returns its result.

        Args:
            query: The SQL query.

        Returns:
            Column names, rows and the number of rows, or a text that starts with Error.
        """
        return self._session.answer(query)


class MedicalEnv(_DatabaseEnv):
    """What the medical agent acts in: the same tool under the name its users know."""

    def query_database_by_sql(self, query: str) -> str:
        """Runs one SQLite SELECT query on the medical database and returns its result.

        Args:
            query: The SQL query.

        Returns:
            Column names, rows and the number of rows, or a text that starts with Error.
        """
        return self._session.answer(query)


class _Session:
    """One episode on one database: the limits, the path and the calls made so far."""

    def __init__(self, max_turns: int, max_rows: int, max_chars: int, timeout: float):
        if max_turns < 1 or max_rows < 1 or max_chars < 200 or timeout <= 0:
            raise ValueError(
                "a SQL environment needs max_turns and max_rows >= 1, max_chars >= 200 and timeout > 0;"
                f" found {max_turns=} {max_rows=} {max_chars=} {timeout=}"
            )
        self.max_turns, self.max_rows, self.max_chars, self.timeout = (max_turns, max_rows, max_chars, timeout)
        self.db_path, self.calls = "", 0
        self.trouble = ""  # what failed that no query is to blame for

    def start(self, row: dict) -> None:
        path = row.get("db_path")
        if not path or not Path(path).is_file():
            raise FileNotFoundError(
                f"row {row.get('id', '?')}: its db_path is {path!r}, which is no file here; run step2_prepare_data.py"
                " again with the folder that holds the databases"
            )
        self.db_path, self.calls, self.trouble = str(path), 0, ""

    def answer(self, query: str) -> str:
        assert self.db_path, "reset(**row) comes before the first query"
        self.calls += 1
        if self.calls > self.max_turns:
            return f"Error: no queries left (at most {self.max_turns}); give your final answer now"
        if not isinstance(query, str) or not query.strip():
            return "Error: the query is empty; pass one SQL SELECT statement as text"
        try:
            result = run_query(self.db_path, query, self.timeout, FETCH_ROWS, FETCH_BYTES)
        except QueryError as error:
            if error.kind == "infrastructure":
                self.trouble = str(error)
            return error_text(error, self.db_path)[: self.max_chars]
        return format_result(result, self.max_rows, self.max_chars)


def format_result(result: Result, max_rows: int = 20, max_chars: int = 1200) -> str:
    """A result as text of at most `max_chars` (>= 200) characters; see the module's docstring."""
    found = f"{'more than ' if result.truncated else ''}{len(result.rows)}"
    for columns, width in SHAPES:
        lines = [_line([_text(c, width) for c in result.columns[:columns]], len(result.columns) - columns)]
        room = max_chars - len(lines[0]) - max(len(EMPTY), len(f"(first {found} of {found} rows)")) - 1
        for row in result.rows[:max_rows]:
            line = _line([cell(value, width) for value in row[:columns]], len(row) - columns)
            room -= len(line) + 1
            if room < 0:
                break
            lines.append(line)
        if room >= 0 or len(lines) > 1:
            break
    shown = len(lines) - 1
    if not result.rows:
        lines.append(EMPTY)
    elif shown == len(result.rows) and not result.truncated:
        lines.append(f"({shown} row{'s' if shown > 1 else ''})")
    else:
        lines.append(f"(first {shown} of {found} rows)")
    return "\n".join(lines)


def _line(cells: list[str], left_out: int) -> str:
    return " | ".join(cells) + (f" | (+{left_out} columns)" if left_out > 0 else "")


def cell(value, width: int = 100) -> str:
    """One value, on one line, so that different values read differently unless they are cut."""
    if value is None:
        return "NULL"
    if isinstance(value, float):
        text = f"{value:.15g}"
        return text if re.search(r"[.en]", text) else text + ".0"
    if isinstance(value, bytes):
        shown = f"x'{value[: width // 2].hex()}'"
        return shown if len(value) <= width // 2 else f"{shown}(+{len(value) - width // 2} bytes)"
    if isinstance(value, int):
        return str(value)
    odd = not value or value.upper() == "NULL" or value != value.strip() or "|" in value or re.match(r"['(]|x'", value)
    if len(value) > width or (not odd and value.isprintable()):
        return _text(value, width)
    quoted = value.replace("'", "''") if value.isprintable() else value.replace("\\", "\\\\").replace("'", "''")
    return f"'{_text(quoted, 2 * width)}'"


def _text(value: str, width: int) -> str:
    """Text on one line: control characters escaped, chat marks broken up, the end cut and said."""
    text = neutral(value[:width])
    if not text.isprintable():
        text = "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
    left = len(value) - width
    return f"{text[: 2 * width]}...(+{left} characters)" if left > 0 else text[: 2 * width]


def neutral(text: str) -> str:
    """Break up what a tokenizer or a parser would take for a mark of the chat protocol."""
    return _MARKS.sub("< ", text)


def error_text(error: QueryError, db_path: str) -> str:
    """What SQLite says, and the names of the schema that were probably meant."""
    if error.kind == "infrastructure":  # its text holds paths, which the model has no use for
        return "Error: the database is not available at the moment"
    said = " ".join(str(error).split())
    said = neutral(said if len(said) <= MAX_ERROR else said[:MAX_ERROR] + "...")
    hint = _hint(said, db_path)
    return f"Error: {said}" + (f". {hint}" if hint else "")


def _hint(said: str, db_path: str) -> str:
    match = re.match(r"no such (table|column): (.{1,80})", said)
    if match is None:
        return ""
    try:
        schema = read_schema(os.path.abspath(db_path), os.stat(db_path).st_mtime_ns)
    except (QueryError, OSError):
        return ""
    wanted = match[2].split(".")[-1].strip("\"'`[] ").lower()
    if match[1] == "table":
        names = {table.lower(): table for table in schema}
        close = [names[n] for n in difflib.get_close_matches(wanted, names, n=2, cutoff=0.6)]
        return f"Did you mean {_or(close)}?" if close else f"Tables: {_listed(list(schema))}"
    places: dict[str, list[str]] = {}
    for table, columns in schema.items():
        for column in columns:
            places.setdefault(column.lower(), []).append(f"{_quoted(table)}.{_quoted(column)}")
    if wanted in places:
        return f"That column is {_or(places[wanted][:4])}"
    close = [p for n in difflib.get_close_matches(wanted, places, n=3, cutoff=0.6) for p in places[n][:2]]
    return f"Did you mean {_or(close[:4])}?" if close else ""


def _or(names: list[str]) -> str:
    return neutral(" or ".join(names))


def _listed(names: list[str]) -> str:
    return neutral(", ".join(_quoted(n) for n in names[:15]) + (", ..." if len(names) > 15 else ""))


def _quoted(name: str) -> str:
    return name if re.fullmatch(r"\w{1,60}", name) else f'"{name[:60]}"'


@lru_cache(maxsize=256)
def read_schema(db_path: str, mtime_ns: int) -> dict[str, list[str]]:
    """table -> columns; `mtime_ns` makes a changed file a new entry."""
    sql = (
        "SELECT m.name, p.name FROM sqlite_master AS m JOIN pragma_table_info(m.name) AS p"
        " WHERE m.type IN ('table', 'view') AND m.name NOT LIKE 'sqlite!_%' ESCAPE '!'"
    )
    tables: dict[str, list[str]] = {}
    for table, column in run_query(db_path, sql, timeout=2.0, max_rows=5000).rows:
        tables.setdefault(table, []).append(column)
    return tables

"""Neighbours: copies of a database with other data under the same schema. A prediction that gives gold's result on the database only by
accident (no WHERE, >= for >, LEFT JOIN for JOIN, a constant) rarely gives it on all of them.

    paths = make_neighbours("concert.sqlite", k=4, golds=["SELECT name FROM singer WHERE age > 30"])

Each copy is made once and kept in $SIXSTEP_CACHE/neighbours (default ~/.cache/sixstep/neighbours), named by the content of the
database, the seed and the constants of the golds. In each table some values are resampled from their column or set to NULL, and
rows are added: new keys without children, duplicates of everything that is not a key, values at the edges of the column, round
numbers, and the constants that the golds compare the column with, one below and one above.

What the schema declares stays true: primary keys, UNIQUE, NOT NULL and CHECK hold, a declared foreign key points to a parent or is
NULL. So a rewrite that is equivalent under the declared schema still matches. A rewrite that is equivalent only because of what
the data happens to be (a column that is never NULL but may be) does not: that is the point. Undeclared rules are not known here.

Not covered: virtual tables and their shadow tables are left as they are; triggers are dropped from the copies.
"""

import hashlib
import json
import math
import os
import random
import sqlite3
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import quote

from envs.sqlite_exec import fingerprint
from rewards.exec_compare import TOKEN

VERSION = 1  # of the recipe below: part of the copies' names
MAX_CHANGED, MAX_ADDED = 2000, 120  # rows a table
POOL = 400  # values kept of a column
LOWEST, HIGHEST = -(2**63), 2**63 - 1  # integers that SQLite can hold


@dataclass
class Column:
    name: str
    kind: str
    nullable: bool
    key: bool  # in the primary key or in a UNIQUE index
    alone: bool = False  # unique by itself: a new row needs a new value
    parent: tuple[str, str] | None = None  # declared foreign key
    pool: list = field(default_factory=list)
    edges: list = field(default_factory=list)
    constants: list = field(default_factory=list)  # that golds compare it with, and what lies next to them


@dataclass
class Table:
    name: str
    columns: list[Column]
    rowid: bool
    rows: int


def cache_folder() -> Path:
    return Path(os.environ.get("SIXSTEP_CACHE") or Path.home() / ".cache" / "sixstep") / "neighbours"


def make_neighbours(db_path: str | Path, k: int, seed: int = 0, golds: Iterable[str] = ()) -> list[Path]:
    """Paths of k copies, made where they are not there yet. The copies of one call are safe to make in several processes."""
    from rewards.exec_match import content_key

    if k < 1:
        raise ValueError(f"at least one neighbour, found k={k}")
    path = os.path.abspath(db_path)
    constants = gold_constants(golds)
    recipe = json.dumps([VERSION, seed, sorted((name, sorted(map(repr, found))) for name, found in constants.items())])
    name = f"{content_key(path, fingerprint(path))[:24]}-{hashlib.sha256(recipe.encode()).hexdigest()[:12]}"
    folder = cache_folder()
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{name}-{number}.sqlite" for number in range(k)]
    for number, target in enumerate(paths):
        if not target.exists():
            temporary = target.with_name(f".{target.name}.{os.getpid()}")
            other = target.with_name(f".{target.name}.{os.getpid()}.twin")
            temporary.unlink(missing_ok=True)
            other.unlink(missing_ok=True)
            try:
                _make(path, temporary, random.Random(f"{recipe}/{name}/{number}"), constants)
                if _make_twin(temporary, other):
                    os.replace(other, target.with_suffix(".twin.sqlite"))
                os.replace(temporary, target)
            finally:
                temporary.unlink(missing_ok=True)
                other.unlink(missing_ok=True)
    return paths


def gold_constants(golds: Iterable[str]) -> dict[str, set]:
    """column name (lower case) -> constants that the golds compare it with. A gold that cannot be parsed gives none."""
    import sqlglot
    from sqlglot import exp

    found: dict[str, set] = {}
    comparing = (exp.EQ, exp.NEQ, exp.GT, exp.GTE, exp.LT, exp.LTE, exp.Like, exp.Between, exp.In)
    for gold in golds:
        try:
            tree = sqlglot.parse_one(gold, read="sqlite")
        except (sqlglot.errors.SqlglotError, RecursionError):
            continue
        for node in tree.find_all(*comparing):
            column = node.this.find(exp.Column) if node.this else None
            if column is None:
                continue
            for part in node.iter_expressions():
                if part is node.this:
                    continue
                if isinstance(part, exp.Literal):
                    found.setdefault(column.name.lower(), set()).add(_literal(part))
                elif isinstance(part, exp.Column) and part.this.quoted and not part.table:
                    found.setdefault(column.name.lower(), set()).add(
                        part.name.replace("%", "")
                    )  # "text" in double quotes
    return found


def _literal(node) -> object:
    if node.is_string:
        return node.this.replace("%", "")
    return int(node.this) if node.this.isdigit() else float(node.this)


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def _make(source: str, target: Path, rng: random.Random, constants: dict[str, set]) -> None:
    reading = sqlite3.connect(f"file:{quote(source)}?mode=ro&immutable=1", uri=True)
    writing = sqlite3.connect(target, isolation_level=None)
    try:
        reading.backup(writing)
        writing.text_factory = lambda raw: raw.decode(errors="surrogateescape")
        writing.execute("PRAGMA journal_mode=OFF")
        writing.execute("PRAGMA synchronous=OFF")
        writing.execute("PRAGMA foreign_keys=OFF")
        for (name,) in writing.execute("SELECT name FROM sqlite_master WHERE type = 'trigger'").fetchall():
            writing.execute(f"DROP TRIGGER {_quoted(name)}")
        writing.execute("BEGIN")
        tables = _tables(writing)
        for table in tables:  # parents before children: children point to the new parents as well
            for column in table.columns:
                _fill_pool(writing, table, column, constants.get(column.name.lower(), set()), rng)
            _change(writing, table, rng)
            _add(writing, table, rng)
        writing.execute("COMMIT")
    finally:
        writing.close()
        reading.close()


def _make_twin(source: Path, target: Path) -> bool:
    """The same data in the opposite order of rows, and no INTEGER PRIMARY KEY, which would sort them again: what differs between
    the two is what a query's text leaves open. Not for databases with virtual tables."""
    connection = sqlite3.connect(target, isolation_level=None)
    try:
        connection.text_factory = lambda raw: raw.decode(errors="surrogateescape")
        connection.execute("ATTACH ? AS source", (str(source),))
        listed = connection.execute("SELECT type, name, sql FROM source.sqlite_master WHERE sql IS NOT NULL").fetchall()
        if any(sql.lstrip().upper().startswith("CREATE VIRTUAL") for _, _, sql in listed):
            return False
        connection.execute("PRAGMA journal_mode=OFF")
        connection.execute("PRAGMA synchronous=OFF")
        connection.execute("BEGIN")
        for kind, name, sql in listed:
            if kind != "table" or name.lower().startswith("sqlite_"):
                continue
            tokens = [{"integer": "INT", "autoincrement": ""}.get(token.lower(), token) for token in TOKEN.findall(sql)]
            connection.execute("".join(tokens))
            columns = [c[1] for c in connection.execute(f"PRAGMA table_xinfo({_quoted(name)})").fetchall() if c[6] == 0]
            names = ", ".join(map(_quoted, columns))
            keys = [c[1] for c in connection.execute(f"PRAGMA source.table_info({_quoted(name)})").fetchall() if c[5]]
            order = (
                ", ".join(f"{_quoted(key)} DESC" for key in keys) if "WITHOUT ROWID" in sql.upper() else "rowid DESC"
            )
            connection.execute(
                f"INSERT INTO main.{_quoted(name)} ({names}) SELECT {names} FROM source.{_quoted(name)} ORDER BY {order}"
            )
        for kind, _, sql in listed:
            if kind in ("index", "view"):
                connection.execute(sql)
        connection.execute("COMMIT")
        return True
    except sqlite3.Error:  # a table whose text only SQLite itself can read back: judged without a twin
        return False
    finally:
        connection.close()


def _tables(connection: sqlite3.Connection) -> list[Table]:
    """Ordinary tables with their declared constraints, referenced tables first as far as that is possible."""
    listed = connection.execute("SELECT name, sql FROM sqlite_master WHERE type = 'table'").fetchall()
    virtual = [name for name, sql in listed if sql and sql.lstrip().upper().startswith("CREATE VIRTUAL")]
    tables: dict[str, Table] = {}
    parents: dict[str, set[str]] = {}
    for name, sql in listed:
        if not sql or name.lower().startswith("sqlite_") or any(name == v or name.startswith(v + "_") for v in virtual):
            continue
        info = connection.execute(f"PRAGMA table_xinfo({_quoted(name)})").fetchall()
        columns = [Column(c[1], c[2].upper(), not c[3] and not c[5], bool(c[5])) for c in info if c[6] == 0]
        by_name = {column.name.lower(): column for column in columns}
        keys = [[c[1] for c in info if c[5]]]
        for index in connection.execute(f"PRAGMA index_list({_quoted(name)})").fetchall():
            if index[2]:
                keys.append(
                    [row[2] for row in connection.execute(f"PRAGMA index_info({_quoted(index[1])})").fetchall()]
                )
        for key in keys:
            for part in key:
                if part and part.lower() in by_name:
                    by_name[part.lower()].key = True
                    by_name[part.lower()].alone |= len(key) == 1
        for reference in connection.execute(f"PRAGMA foreign_key_list({_quoted(name)})").fetchall():
            column = by_name.get(reference[3].lower())
            if column is None or column.parent:
                continue
            target = reference[4] or next(
                (c[1] for c in connection.execute(f"PRAGMA table_xinfo({_quoted(reference[2])})").fetchall() if c[5]),
                None,
            )
            if target:
                column.parent = (reference[2], target)
                parents.setdefault(name, set()).add(reference[2].lower())
        rows = connection.execute(f"SELECT count(*) FROM {_quoted(name)}").fetchone()[0]
        tables[name] = Table(name, columns, "WITHOUT ROWID" not in sql.upper(), rows)
    ordered: list[Table] = []
    while tables:
        left = {name.lower() for name in tables}
        ready = [n for n in tables if not (parents.get(n, set()) & left) - {n.lower()}] or [next(iter(tables))]
        ordered += [tables.pop(name) for name in ready]
    return ordered


def _values(connection: sqlite3.Connection, table: str, column: str, limit: int) -> list:
    try:
        return [
            row[0]
            for row in connection.execute(
                f"SELECT DISTINCT {_quoted(column)} FROM {_quoted(table)} WHERE {_quoted(column)} IS NOT NULL LIMIT {limit}"
            )
        ]
    except sqlite3.OperationalError:  # a foreign key to a table or column that does not exist
        return []


def _fill_pool(
    connection: sqlite3.Connection, table: Table, column: Column, constants: set, rng: random.Random
) -> None:
    if column.parent:
        column.pool = _values(connection, *column.parent, 5000)
        if column.pool:
            return
    column.pool = _values(connection, table.name, column.name, POOL * 5)
    numbers = _numbers(column.pool)
    texts = [value for value in column.pool if isinstance(value, str)]
    numeric = len(numbers) > len(texts) or (
        not column.pool and any(t in column.kind for t in ("INT", "REAL", "NUM", "FLOA", "DOUB", "DEC"))
    )
    edges: list = []
    near: list = []
    for constant in sorted(constants, key=repr):
        if isinstance(constant, (int, float)):
            near += [constant - 1, constant, constant, constant + 1] if numeric else [str(constant)]
        elif not numeric:
            near += [constant, constant, f"{constant} x", constant.lower()]
        else:
            near += [float(constant)] if constant.replace(".", "", 1).isdecimal() else []
    if numbers and numeric:
        low, high = min(numbers), max(numbers)
        edges += [low, high] + [low - 1, high + 1] * 5
        step = 10 ** max(0, len(str(int(abs(high)))) - 2)
        start = int(low // step)
        edges += [n * step for n in range(start, min(start + 100, int(high // step) + 1)) if n % 5 == 0]
    elif not column.pool:
        edges += [1, 2, 3, 10, 100] if numeric else ["a", "b", "A", "c d"]
    elif texts:
        some = rng.sample(texts, min(3, len(texts)))
        edges += [text + " x" for text in some] + [text.swapcase() for text in some]
    whole = numeric and bool(numbers) and all(isinstance(value, int) for value in numbers)
    column.edges, column.constants = (
        [_int64(value) if whole or isinstance(value, int) else value for value in values] for values in (edges, near)
    )


def _numbers(values: list) -> list:
    return [value for value in values if isinstance(value, (int, float)) and abs(value) != math.inf]


def _int64(value: float) -> int:
    return int(max(LOWEST, min(HIGHEST, value)))


def _pick(column: Column, rng: random.Random) -> object:
    if column.nullable and rng.random() < 0.12:
        return None
    if column.constants and rng.random() < 0.4:
        return rng.choice(column.constants)
    if column.edges and (not column.pool or rng.random() < 0.3):
        return rng.choice(column.edges)
    return rng.choice(column.pool) if column.pool else None


def _new_key(column: Column, number: int, rng: random.Random) -> object:
    if column.parent and column.pool:
        return rng.choice(column.pool)
    numbers = _numbers(column.pool)
    if "INT" in column.kind or (numbers and len(numbers) == len(column.pool)):
        key = int(max(numbers, default=0)) + 1 + number
        return key if key <= HIGHEST else rng.randint(LOWEST, HIGHEST)
    return f"{rng.choice(column.pool) if column.pool else 'k'}_{number}"


def _change(connection: sqlite3.Connection, table: Table, rng: random.Random) -> None:
    columns = [column for column in table.columns if not column.key]
    if not table.rowid or not columns or any(column.name.lower() == "rowid" for column in table.columns):
        return
    rowids = [row[0] for row in connection.execute(f"SELECT rowid FROM {_quoted(table.name)}")]
    for rowid in rng.sample(rowids, min(len(rowids), MAX_CHANGED)):
        changed = [column for column in columns if rng.random() < 0.25]
        if changed:
            sets = ", ".join(f"{_quoted(column.name)} = ?" for column in changed)
            values = [_pick(column, rng) for column in changed]
            connection.execute(f"UPDATE OR IGNORE {_quoted(table.name)} SET {sets} WHERE rowid = ?", [*values, rowid])


def _add(connection: sqlite3.Connection, table: Table, rng: random.Random) -> None:
    """New rows; every second one repeats an existing row but for its keys and one value."""
    count = min(MAX_ADDED, max(8, table.rows // 2))
    names = ", ".join(_quoted(column.name) for column in table.columns)
    marks = ", ".join("?" * len(table.columns))
    old = connection.execute(f"SELECT {names} FROM {_quoted(table.name)} LIMIT 2000").fetchall()
    for number in range(count):
        row = [_pick(column, rng) for column in table.columns]
        if old and number % 2:
            copied, kept = rng.choice(old), rng.randrange(len(row))
            row = [row[i] if i == kept else value for i, value in enumerate(copied)]
        for index, column in enumerate(table.columns):
            if column.alone:
                row[index] = _new_key(column, number, rng)
            elif row[index] is None and not column.nullable:
                row[index] = rng.choice(column.pool or column.edges or [number])
        connection.execute(f"INSERT OR IGNORE INTO {_quoted(table.name)} ({names}) VALUES ({marks})", row)

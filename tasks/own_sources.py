"""Your data, wherever it is, as one SQLite file for the sandbox: a snapshot, taken once, read-only at its source.

    snapshot("shop.sqlite" | "shop.duckdb" | "folder with .csv and .parquet files" | "postgresql://...", target)

Tables, columns, primary and foreign keys are kept; types become SQLite's (dates and times as ISO text, decimals as
numbers, nested values as JSON text). Views are copied as tables, except from SQLite, which is copied whole. Rows travel
in batches, so memory stays bounded. Not covered: other schemas' access rights, functions and triggers of the source, and
SQL that only the source understands: gold queries are run on the snapshot.
"""

import datetime
import decimal
import json
import os
import re
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

BATCH = 5000  # rows in memory at once
MAX_ROWS = 5_000_000  # of one table; more is an error, because an agent's query would not end in time either


@dataclass
class Source:
    """One table of a source; `rows` is read once."""

    name: str
    columns: list[tuple[str, str]]  # (name, type as the source calls it)
    rows: Iterator[list[tuple]]  # batches
    primary: list[str] = field(default_factory=list)
    foreign: list[tuple[str, str, str]] = field(default_factory=list)  # (column, table, column)


def snapshot(source: str, target: Path) -> str:
    """Write the SQLite file `target` whole, or not at all; gives the SQL dialect of the source (sqlglot's name)."""
    fresh = target.with_name(f".{target.name}.new{os.getpid()}")
    fresh.unlink(missing_ok=True)
    try:
        dialect, tables = _open(source)
        if tables is None:
            _copy_sqlite(Path(source).expanduser(), fresh)
        else:
            _write(fresh, tables)
        with closing(sqlite3.connect(fresh)) as db:
            if not db.execute("SELECT count(*) FROM sqlite_master WHERE type = 'table'").fetchone()[0]:
                raise ValueError(f"{source} holds no table")
        os.replace(fresh, target)
    finally:
        fresh.unlink(missing_ok=True)
    return dialect


def _open(source: str) -> tuple[str, Iterator[Source] | None]:
    """(dialect, tables); None for a SQLite file, which is copied whole."""
    if re.match(r"postgres(ql)?://", source):
        return "postgres", _postgres(source)
    path = Path(source).expanduser()
    if path.is_dir():
        return "duckdb", _folder(path)
    if not path.is_file():
        raise FileNotFoundError(
            f"no database at {path}; pass a SQLite or DuckDB file, a folder with .csv or .parquet files, or a"
            " postgresql:// URL"
        )
    with path.open("rb") as file:
        head = file.read(16)
    if head == b"SQLite format 3\0":
        return "sqlite", None
    if head[8:12] == b"DUCK":
        return "duckdb", _duckdb(path)
    raise ValueError(f"{path} is neither a SQLite nor a DuckDB file (for .csv and .parquet files pass their folder)")


def _copy_sqlite(path: Path, target: Path) -> None:
    """By SQLite's own backup, which also takes what still stands in a write-ahead log."""
    try:
        with closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)) as db:
            with closing(sqlite3.connect(target)) as out:
                db.backup(out)
                out.execute("PRAGMA journal_mode = DELETE")  # the sandbox opens the file read-only
    except sqlite3.DatabaseError as error:
        raise ValueError(f"{path} cannot be read as a SQLite database: {error}") from error


def _write(target: Path, tables: Iterator[Source]) -> None:
    with closing(sqlite3.connect(target)) as db:
        for table in tables:
            references = {column: f" REFERENCES {_q(other)}({_q(key)})" for column, other, key in table.foreign}
            lines = [f"{_q(name)} {_affinity(kind)}{references.get(name, '')}" for name, kind in table.columns]
            if table.primary:
                lines.append(f"PRIMARY KEY ({', '.join(map(_q, table.primary))})")
            db.execute(f"CREATE TABLE {_q(table.name)} ({', '.join(lines)})")
            insert, number = f"INSERT INTO {_q(table.name)} VALUES ({', '.join('?' * len(table.columns))})", 0
            for batch in table.rows:
                number += len(batch)
                if number > MAX_ROWS:
                    raise ValueError(
                        f"table {table.name} has more than {MAX_ROWS} rows; make a smaller copy of it first"
                    )
                db.executemany(insert, [tuple(map(_value, row)) for row in batch])
        db.commit()


def _q(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def _affinity(kind: str) -> str:
    kind = kind.upper()
    if re.match(r"(U?(BIG|SMALL|TINY|HUGE)?INT|INT\d|SERIAL|BOOL)", kind):
        return "INTEGER"
    if re.match(r"(REAL|FLOAT|DOUBLE|DECIMAL|NUMERIC)", kind):
        return "REAL"
    return "BLOB" if re.match(r"(BLOB|BYTEA)", kind) else "TEXT"


def _value(value):
    """What SQLite can hold; anything it cannot becomes readable text."""
    if value is None or isinstance(value, str | float | bytes):
        return value
    if isinstance(value, bool):
        return int(value)
    if isinstance(value, int):
        return value if -(2**63) <= value < 2**63 else str(value)
    if isinstance(value, decimal.Decimal):
        return float(value)
    if isinstance(value, datetime.datetime):
        return value.isoformat(sep=" ")
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, dict | list | tuple):
        return json.dumps(value, ensure_ascii=False, default=str)
    return bytes(value) if isinstance(value, bytearray | memoryview) else str(value)


def _batches(cursor) -> Iterator[list[tuple]]:
    while batch := cursor.fetchmany(BATCH):
        yield batch


def _read(path: Path, cursor) -> Iterator[list[tuple]]:
    import duckdb

    try:
        yield from _batches(cursor)
    except duckdb.Error as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: Exception) -> ValueError:
    said = " ".join(re.split(r"\nPossible|\nThe search space", str(error))[0].split())[:300]
    return ValueError(f"{path} cannot be read: {said}; correct the file, or take it out of the folder")


def _csv(db, file: str) -> str:
    """Types are guessed from the first 20,000 rows; from all of them where a later row is of another type."""
    import duckdb

    try:
        db.execute(f"SELECT count(COLUMNS(*)) FROM read_csv({file})")
    except duckdb.ConversionException:
        return f"read_csv({file}, sample_size = -1)"
    return f"read_csv({file})"


def _folder(folder: Path) -> Iterator[Source]:
    import duckdb

    files = sorted(p for p in folder.iterdir() if p.suffix.lower() in (".csv", ".tsv", ".parquet"))
    if not files:
        found = ", ".join(sorted(p.name for p in folder.iterdir())[:8]) or "nothing"
        raise FileNotFoundError(f"{folder} has no .csv, .tsv or .parquet file; it holds {found}")
    seen: dict[str, Path] = {}
    with closing(duckdb.connect()) as db:
        for path in files:
            name = re.sub(r"\W+", "_", path.stem).strip("_") or "data"
            if name.lower() in seen:
                raise ValueError(f"{path.name} and {seen[name.lower()].name} would both become the table {name}")
            seen[name.lower()] = path
            file = "'" + str(path).replace("'", "''") + "'"
            try:
                reader = f"read_parquet({file})" if path.suffix.lower() == ".parquet" else _csv(db, file)
                cursor = db.cursor().execute(f"SELECT * FROM {reader}")
            except duckdb.Error as error:
                raise _unreadable(path, error) from error
            yield Source(name, [(d[0], str(d[1])) for d in cursor.description], _read(path, cursor))


def _duckdb(path: Path) -> Iterator[Source]:
    import duckdb

    with closing(duckdb.connect(str(path), read_only=True)) as db:
        names = db.execute(
            "SELECT table_name FROM information_schema.tables WHERE table_schema = 'main' ORDER BY table_type, table_name"
        ).fetchall()
        constraints = db.execute(
            "SELECT table_name, constraint_type, constraint_column_names, referenced_table, referenced_column_names"
            " FROM duckdb_constraints() WHERE schema_name = 'main'"
        ).fetchall()
        for (name,) in names:
            cursor = db.cursor().execute(f"SELECT * FROM {_q(name)}")
            table = Source(name, [(d[0], str(d[1])) for d in cursor.description], _batches(cursor))
            for owner, kind, columns, other, keys in constraints:
                if owner == name and kind == "PRIMARY KEY":
                    table.primary = list(columns)
                elif owner == name and kind == "FOREIGN KEY" and len(columns) == 1:
                    table.foreign.append((columns[0], other, keys[0]))
            yield table


_PG_TABLES = """
SELECT n.nspname, c.relname, c.oid FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
WHERE c.relkind IN ('r', 'p', 'v', 'm', 'f') AND NOT c.relispartition
  AND n.nspname NOT IN ('pg_catalog', 'information_schema') AND n.nspname NOT LIKE 'pg_%' ORDER BY 1, 2"""
_PG_KEYS = """
SELECT k.contype::text, (SELECT array_agg(a.attname::text ORDER BY x.i) FROM unnest(k.conkey) WITH ORDINALITY x(n, i)
         JOIN pg_attribute a ON a.attrelid = k.conrelid AND a.attnum = x.n),
       n.nspname, r.relname, (SELECT array_agg(a.attname::text ORDER BY x.i)
         FROM unnest(k.confkey) WITH ORDINALITY x(n, i) JOIN pg_attribute a ON a.attrelid = k.confrelid AND a.attnum = x.n)
FROM pg_constraint k LEFT JOIN pg_class r ON r.oid = k.confrelid LEFT JOIN pg_namespace n ON n.oid = r.relnamespace
WHERE k.conrelid = %s AND k.contype IN ('p', 'f')"""


def _postgres(url: str) -> Iterator[Source]:
    """In one read-only transaction, so that the tables fit together and nothing can be changed."""
    try:
        import psycopg
    except ImportError as error:
        raise ImportError('a postgresql:// URL needs one more package: pip install "psycopg[binary]==3.3.9"') from error
    shown = re.sub(r"//[^@/]*@", "//...@", url)  # no password in an error
    try:
        connection = psycopg.connect(url, connect_timeout=15)
    except psycopg.OperationalError as error:
        reason = str(error).strip().splitlines()[-1]
        raise ValueError(
            f"cannot connect to {shown}: {reason}; check the URL, and that the server is reachable"
        ) from error
    with connection:
        connection.read_only = True
        connection.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        for schema, relation, oid in connection.execute(_PG_TABLES).fetchall():
            name = _pg_name(schema, relation)
            with connection.cursor(name="snapshot") as cursor:  # on the server: batches, not the whole table
                cursor.execute(f"SELECT * FROM {_q(schema)}.{_q(relation)}")
                kinds = [(d.name, d.type_display) for d in cursor.description]
                table = Source(name, kinds, _batches(cursor))
                for kind, columns, other_schema, other, keys in connection.execute(_PG_KEYS, [oid]).fetchall():
                    if kind == "p":
                        table.primary = columns
                    elif len(columns) == 1:
                        table.foreign.append((columns[0], _pg_name(other_schema, other), keys[0]))
                yield table


def _pg_name(schema: str, relation: str) -> str:
    return relation if schema == "public" else f"{schema}_{relation}"


def infer_keys(db_path: Path) -> list[tuple[str, str, str, str]]:
    """Foreign keys that nobody declared (CSV files have none): (table, column, table, column).

    A column named after another table's key (`customer_id` for customer.id or customer.customer_id) whose values all
    occur in it.
    """
    with closing(sqlite3.connect(f"{Path(db_path).resolve().as_uri()}?mode=ro&immutable=1", uri=True)) as db:
        names = [
            n
            for (n,) in db.execute(
                "SELECT name FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite!_%' ESCAPE '!'"
            )
        ]
        columns = {n: [r[1] for r in db.execute(f"PRAGMA table_info({_q(n)})")] for n in names}
        declared = {(n, r[3].lower()) for n in names for r in db.execute(f"PRAGMA foreign_key_list({_q(n)})")}
        found = []
        for parent in names:
            key = _key_of(parent, columns[parent])
            if key is None or not _unique(db, parent, key):
                continue
            wanted = {key.lower()} if key.lower() != "id" else set()
            wanted |= {f"{form}_id" for form in _singulars(parent)} | {f"{form}id" for form in _singulars(parent)}
            for child in names:
                for column in columns[child]:
                    known = child == parent or (child, column.lower()) in declared
                    if not known and column.lower() in wanted and _contained(db, child, column, parent, key):
                        found.append((child, column, parent, key))
        return found


def _singulars(table: str) -> set[str]:
    name = table.lower()
    return {name, name.removesuffix("s"), name.removesuffix("es"), re.sub("ies$", "y", name)}


def _key_of(table: str, columns: list[str]) -> str | None:
    names = {"id"} | {f"{form}_id" for form in _singulars(table)} | {f"{form}id" for form in _singulars(table)}
    return next((c for c in columns if c.lower() in names), None)


def _unique(db: sqlite3.Connection, table: str, column: str) -> bool:
    rows, different = db.execute(f"SELECT count(*), count(DISTINCT {_q(column)}) FROM {_q(table)}").fetchone()
    return 0 < rows == different


def _contained(db: sqlite3.Connection, child: str, column: str, parent: str, key: str) -> bool:
    lost = (
        f"SELECT {_q(column)} FROM {_q(child)} WHERE {_q(column)} IS NOT NULL EXCEPT SELECT {_q(key)} FROM {_q(parent)}"
    )
    some = db.execute(f"SELECT count({_q(column)}) FROM {_q(child)}").fetchone()[0]
    return some > 0 and db.execute(f"SELECT 1 FROM ({lost}) LIMIT 1").fetchone() is None

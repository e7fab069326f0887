"""The SQL sandbox under attack: a real SQLite file, real worker processes, limits that must fire."""

import os
import sqlite3
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from envs.sqlite_exec import QueryError, run_query

FOREVER = "WITH RECURSIVE r(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM r) "
DOUBLING = (
    "WITH a0(x) AS (SELECT 1)"
    + "".join(f", a{i}(x) AS (SELECT p.x FROM a{i - 1} p, a{i - 1} q)" for i in range(1, 30))
    + " SELECT * FROM a29"
)


def make_database(path: Path) -> str:
    connection = sqlite3.connect(path)
    connection.executescript(
        """PRAGMA synchronous = OFF;
        CREATE TABLE person (id INTEGER PRIMARY KEY, name TEXT, age INT, note BLOB);
        INSERT INTO person VALUES (1, 'Ann', 30, x'00ff'), (2, 'Bob', NULL, NULL), (3, 'Zoe', 41, 'x');
        CREATE VIEW adults AS SELECT name FROM person WHERE age >= 18;
        CREATE TABLE broken (t TEXT);
        INSERT INTO broken VALUES (CAST(x'61ff62' AS TEXT)), ('fine');"""
    )
    connection.commit()
    connection.close()
    settle(path)
    return str(path)


def settle(path: Path) -> None:
    """The sandbox keeps a connection only for a file that is older than the clock's tick."""
    os.utime(path, (time.time() - 10, time.time() - 10))


@pytest.fixture
def db(tmp_path: Path) -> str:
    return make_database(tmp_path / "people.sqlite")


def kind_of(db: str, sql: str, **limits) -> str:
    with pytest.raises(QueryError) as caught:
        run_query(db, sql, **limits)
    return caught.value.kind


def test_rows_columns_and_types(db):
    result = run_query(db, "SELECT id, name, age, note FROM person ORDER BY id")
    assert result.columns == ["id", "name", "age", "note"]
    assert result.rows == [(1, "Ann", 30, b"\x00\xff"), (2, "Bob", None, None), (3, "Zoe", 41, "x")]
    assert not result.truncated and result.tables == {"person"} and result.steady
    assert run_query(db, "SELECT random()").steady is False
    assert run_query(db, "SELECT * FROM adults").tables == {"person"}


def test_tables_are_known_whatever_their_letters(tmp_path):
    path = tmp_path / "names.sqlite"
    with sqlite3.connect(path) as connection:
        connection.execute('CREATE TABLE "Übung" (n INT)')
    assert run_query(str(path), 'SELECT count(n) FROM "Übung"').tables == {"übung"}


def test_rows_are_cut_and_said(db):
    assert run_query(db, "SELECT * FROM person", max_rows=3).truncated is False
    cut = run_query(db, "SELECT id FROM person ORDER BY id", max_rows=2)
    assert cut.rows == [(1,), (2,)] and cut.truncated
    assert run_query(db, "SELECT id FROM person", max_rows=0).truncated
    endless = run_query(db, FOREVER + "SELECT i FROM r", max_rows=5)
    assert endless.rows == [(1,), (2,), (3,), (4,), (5,)] and endless.truncated


def test_bytes_are_bounded(db):
    result = run_query(db, FOREVER + "SELECT printf('%.*c', 1000, 'x') FROM r", max_rows=10_000, max_bytes=20_000)
    assert result.truncated and 0 < len(result.rows) < 21
    assert kind_of(db, "SELECT zeroblob(50000)", max_bytes=20_000) == "limit"


def test_text_that_is_not_utf8_does_not_raise(db):
    assert run_query(db, "SELECT t FROM broken").rows == [("a\ufffdb",), ("fine",)]
    assert run_query(db, "SELECT name FROM person WHERE id = 1").rows == [("Ann",)]


@pytest.mark.parametrize(
    ("sql", "message"),
    [
        ("SELEC 1", 'near "SELEC": syntax error'),
        ("SELECT nme FROM person", "no such column: nme"),
        ("SELECT * FROM persons", "no such table: persons"),
        ("SELECT ?", "Incorrect number of bindings supplied"),
        ("SELECT 'a\0b'", "null character"),
        ("SELECT '\ud800'", "surrogates"),
        ("SELECT abs(-9223372036854775808)", "integer overflow"),
    ],
)
def test_errors_read_as_sqlite_says_them(db, sql, message):
    with pytest.raises(QueryError, match=message) as caught:
        run_query(db, sql)
    assert caught.value.kind == "sql"


DENIED = [
    "DROP TABLE person", "DELETE FROM person", "UPDATE person SET age = 0", "INSERT INTO person(id) VALUES (9)",
    "REPLACE INTO person(id) VALUES (1)", "CREATE TABLE x(a)", "CREATE TEMP TABLE x AS SELECT 1", "CREATE VIEW v AS SELECT 1",
    "CREATE INDEX i ON person(name)", "CREATE TRIGGER t AFTER INSERT ON person BEGIN SELECT 1; END", "ALTER TABLE person RENAME TO p",
    "CREATE VIRTUAL TABLE v USING fts5(a)", "VACUUM INTO '{folder}/made.db'", "ATTACH '{folder}/made.db' AS m",
    "ATTACH ':memory:' AS m", "DETACH main", "BEGIN", "COMMIT", "SAVEPOINT s", "REINDEX", "ANALYZE",
    "PRAGMA journal_mode = WAL", "PRAGMA journal_mode", "PRAGMA writable_schema = 1", "PRAGMA query_only = 0",
    "PRAGMA user_version = 5", "PRAGMA cache_size = 9", "PRAGMA temp_store_directory = '{folder}'", "PRAGMA database_list",
    "PRAGMA hard_heap_limit = 1", "PRAGMA mmap_size = 1", "SELECT * FROM pragma_database_list", "SELECT load_extension('x')",
    "SELECT fts3_tokenizer('simple')", "SELECT sql FROM sqlite_stmt", "SELECT count(*) FROM sqlite_stmt", "SELECT 1; SELECT 2",
    "SELECT 1; DROP TABLE person", "EXPLAIN DROP TABLE person", "WITH d AS (SELECT 1) DELETE FROM person",
]  # fmt: skip


@pytest.mark.parametrize("sql", DENIED)
def test_nothing_but_reading(db, sql, tmp_path):
    before = Path(db).read_bytes(), Path(db).stat().st_mtime_ns, sorted(os.listdir(tmp_path))
    assert kind_of(db, sql.replace("{folder}", str(tmp_path))) == "denied"
    assert (Path(db).read_bytes(), Path(db).stat().st_mtime_ns, sorted(os.listdir(tmp_path))) == before


NOT_THERE = [
    "SELECT readfile('/etc/passwd')", "SELECT writefile('{folder}/x', 'y')", "SELECT edit('x')", "SELECT * FROM fsdir('/')",
    "UPDATE sqlite_master SET sql = 'x'", "DELETE FROM sqlite_master", ".read /etc/passwd", "SELECT * FROM csv('/etc/passwd')",
    "SELECT 'a' REGEXP '(a+)+$'",
]  # fmt: skip


@pytest.mark.parametrize("sql", NOT_THERE)
def test_no_file_functions(db, sql, tmp_path):
    before = sorted(os.listdir(tmp_path))
    assert kind_of(db, sql.replace("{folder}", str(tmp_path))) in ("sql", "denied")
    assert sorted(os.listdir(tmp_path)) == before


@pytest.mark.parametrize(
    "sql",
    [
        "PRAGMA table_info(person)", "SELECT name FROM pragma_table_info('person')", "PRAGMA table_list", "PRAGMA user_version",
        "EXPLAIN QUERY PLAN SELECT * FROM person", "EXPLAIN SELECT 1", "SELECT value FROM json_each('[1, 2]')",
        "WITH c AS (SELECT * FROM person) SELECT count(*) FROM c", "VALUES (1), (2)", "SELECT sql FROM sqlite_master",
        "SELECT 1; -- done", "/* first */ SELECT 1",
    ],
)  # fmt: skip
def test_reading_is_allowed(db, sql):
    assert run_query(db, sql).rows


SLOW = {
    "loop of VM steps": FOREVER + "SELECT count(*) FROM r",
    "cartesian product": "SELECT count(*) FROM person a" + "".join(f", person b{i}" for i in range(30)),
    "rows into a sort": FOREVER + "SELECT i FROM r ORDER BY i * 7919 % 100003",
    "LIKE on a long string": "SELECT hex(zeroblob(3500000)) LIKE '%' || hex(zeroblob(2400)) || '1'",
    "GLOB on a long string": "SELECT hex(zeroblob(3500000)) GLOB '*' || hex(zeroblob(2400)) || '1'",
    "instr": "SELECT instr(hex(zeroblob(4000000)), hex(zeroblob(2000000)) || '1')",
    "replace": "SELECT replace(hex(zeroblob(4000000)), hex(zeroblob(2000000)) || '1', '')",
    "trim": "SELECT trim(hex(zeroblob(2000000)), replace(hex(zeroblob(1000000)), '0', '1') || '0')",
    "printf": "SELECT length(printf('%.*c', 900000000, 'x'))",
    "random blobs": "SELECT sum(length(randomblob(8000000))) FROM person a, person b, person c, person d, person e, person f",
    "preparing takes 2^30 steps": DOUBLING,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW)
def test_the_clock_stops_even_one_long_step(db, name):
    run_query(db, "SELECT 1")  # a worker is up
    started = time.monotonic()
    assert kind_of(db, SLOW[name], timeout=1.0) in ("timeout", "limit")
    assert time.monotonic() - started < 1.2
    assert run_query(db, "SELECT 1").rows == [(1,)]


def test_vm_steps_are_bounded(db):
    started = time.monotonic()
    with pytest.raises(QueryError, match="more than 100000 steps") as caught:
        run_query(db, SLOW["loop of VM steps"], timeout=30, max_steps=100_000)
    assert caught.value.kind == "timeout" and time.monotonic() - started < 2


@pytest.mark.parametrize(
    "sql",
    [
        "SELECT zeroblob(2000000000)", "SELECT randomblob(1000000000)", "SELECT hex(zeroblob(8000000))",
        "SELECT group_concat(a.x) FROM (" + FOREVER + "SELECT hex(zeroblob(1000)) x FROM r LIMIT 100000) a",
        "SELECT 1 WHERE '" + "a" * 120_000 + "' = ''",
        "SELECT hex(zeroblob(3000)) LIKE hex(zeroblob(3000))", "SELECT replace(hex(zeroblob(4000)), '0', hex(zeroblob(2000)))",
    ],
)  # fmt: skip
def test_large_values_are_refused(db, sql):
    assert kind_of(db, sql) == "limit"


@pytest.mark.slow
def test_memory_of_a_query_is_bounded_and_not_ours(db):
    """A sort in memory runs into SQLite's heap limit (or the clock); this process keeps its size."""

    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    before = resident()
    sql = FOREVER + "SELECT hex(zeroblob(20000)) || i AS x FROM r ORDER BY x"
    assert kind_of(db, sql, timeout=20.0) in ("limit", "timeout")
    assert resident() - before < 20 << 20
    assert run_query(db, "SELECT count(*) FROM person").rows == [(3,)]


@pytest.mark.parametrize("depth", [300, 5000])
def test_deep_nesting(db, depth):
    sql = "SELECT " + "(" * depth + "1" + ")" * depth
    with pytest.raises(QueryError) as caught:
        run_query(db, sql)
    assert caught.value.kind in ("sql", "limit")
    assert run_query(db, "SELECT 1").rows


@pytest.mark.parametrize(("sql", "kind"), [("", "sql"), (" \n", "sql"), ("-- nothing", "denied"), (";", "denied")])
def test_no_query_at_all(db, sql, kind):
    assert kind_of(db, sql) == kind


def test_arguments_are_checked(db):
    with pytest.raises(ValueError, match="limits must be positive"):
        run_query(db, "SELECT 1", timeout=0)
    assert kind_of(db, 5) == "sql"
    assert kind_of("/nowhere/there.sqlite", "SELECT 1") == "infrastructure"


def test_a_file_that_is_no_database(tmp_path):
    path = tmp_path / "text.sqlite"
    path.write_text("this is not a database, and long enough to have a header\n" * 100)
    assert kind_of(str(path), "SELECT * FROM x") == "infrastructure"


def test_a_name_with_special_characters(tmp_path):
    db = make_database(tmp_path / "a ?mode=rwc#%41.sqlite")
    assert run_query(db, "SELECT count(*) FROM person").rows == [(3,)]


def test_changes_of_the_file_are_seen(tmp_path):
    db = make_database(tmp_path / "changing.sqlite")
    assert run_query(db, "SELECT count(*) FROM person").rows == [(3,)]
    for number in range(10, 15):  # changes within one tick of the clock, too
        with sqlite3.connect(db) as connection:
            connection.execute("INSERT INTO person(id) VALUES (?)", (number,))
        connection.close()
        assert run_query(db, "SELECT max(id) FROM person").rows == [(number,)]
    other = make_database(tmp_path / "other.sqlite")
    with sqlite3.connect(other) as connection:
        connection.execute("DELETE FROM person")
    connection.close()
    os.replace(other, db)
    assert run_query(db, "SELECT count(*) FROM person").rows == [(0,)]


def test_unfinished_changes_are_refused_not_misread(tmp_path):
    path = tmp_path / "wal.sqlite"
    make_database(path)
    writer = sqlite3.connect(path)
    writer.execute("PRAGMA journal_mode = WAL")
    writer.execute("INSERT INTO person(id) VALUES (4)")
    writer.commit()
    with pytest.raises(QueryError, match="wal_checkpoint") as caught:
        run_query(str(path), "SELECT count(*) FROM person")
    assert caught.value.kind == "infrastructure"
    writer.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    writer.close()
    files = sorted(os.listdir(tmp_path))
    assert run_query(str(path), "SELECT count(*) FROM person").rows == [(4,)]  # a WAL database at rest is read as it is
    assert sorted(os.listdir(tmp_path)) == files  # and no -wal or -shm file was made


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.text(max_size=60) | st.text("SELECTFROM*personaWHERE();'\"-/[]`%=,0 1\n", max_size=80))
def test_any_text_gives_rows_or_a_query_error(db, text):
    try:
        assert len(run_query(db, text, max_rows=5, timeout=2.0).rows) <= 5
    except QueryError as error:
        assert error.kind in ("sql", "denied", "limit", "timeout")


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(low=st.integers(0, 40), more=st.integers(0, 40))
def test_limits_are_monotonic(db, low, more):
    """A wider limit gives the same rows and perhaps more."""
    sql = FOREVER + "SELECT i, hex(zeroblob(i % 7)) FROM r LIMIT 50"
    narrow, wide = run_query(db, sql, max_rows=low), run_query(db, sql, max_rows=low + more)
    assert wide.rows[: len(narrow.rows)] == narrow.rows and len(narrow.rows) == min(low, 50)
    assert narrow.truncated == (low < 50)
    small, large = (run_query(db, sql, max_bytes=400 + 40 * n) for n in (low, low + more))
    assert large.rows[: len(small.rows)] == small.rows

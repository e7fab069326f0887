"""Neighbours of a database: the schema's constraints hold, accidents are caught, equivalent queries are not lost."""

import os
import sqlite3
import time
from pathlib import Path

import pytest

from rewards import exec_worker, neighbours
from rewards.exec_match import _job, exec_match, exec_match_batch, neighbours_of, twin_of
from rewards.neighbours import gold_constants, make_neighbours

SCHEMA = """PRAGMA synchronous = OFF;
CREATE TABLE team (id INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE, city TEXT);
CREATE TABLE player (id INTEGER PRIMARY KEY, name TEXT, age INT CHECK (age IS NULL OR age BETWEEN 0 AND 120), team_id INT REFERENCES team(id), joined TEXT);
CREATE TABLE award (player_id INT NOT NULL REFERENCES player(id), year INT NOT NULL, prize TEXT, PRIMARY KEY (player_id, year)) WITHOUT ROWID;
CREATE TABLE empty (a INT, b TEXT);
CREATE TABLE doc (body TEXT, size INT GENERATED ALWAYS AS (length(body)) VIRTUAL);
CREATE VIEW adult AS SELECT * FROM player WHERE age >= 18;
CREATE TABLE log (t TEXT);
CREATE TRIGGER watch AFTER INSERT ON player BEGIN INSERT INTO log VALUES ('inserted'); END;
INSERT INTO team VALUES (1, 'Reds', 'Rome'), (2, 'Blues', 'Bonn'), (3, 'Greens', 'Graz');
INSERT INTO player VALUES (1, 'Ann', 31, 1, '2001-05-01'), (2, 'Bea', 45, 1, '2003-01-02'), (3, 'Cid', 52, 2, '2003-01-02'), (4, 'Dan', 38, 3, '2010-10-10');
INSERT INTO award VALUES (1, 2001, 'cup'), (1, 2002, 'medal'), (3, 2002, 'cup');
INSERT INTO doc(body) VALUES ('text'), ('more text');
CREATE VIRTUAL TABLE notes USING fts5(body);
INSERT INTO notes VALUES ('hello world');
"""


@pytest.fixture
def db(tmp_path: Path) -> str:
    path = tmp_path / "league.sqlite"
    connection = sqlite3.connect(path)
    connection.executescript(SCHEMA)
    connection.commit()
    connection.close()
    os.utime(path, (time.time() - 10, time.time() - 10))
    return str(path)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch) -> Path:
    monkeypatch.setenv("SIXSTEP_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "neighbours"


def test_constraints_hold_and_data_differ(db):
    before = Path(db).read_bytes()
    paths = make_neighbours(db, 6, seed=3)
    assert len({path.read_bytes() for path in paths}) == 6
    nulls = orphans = 0
    for path in paths:
        connection = sqlite3.connect(path)
        assert connection.execute("PRAGMA integrity_check").fetchall() == [
            ("ok",)
        ]  # NOT NULL, UNIQUE and CHECK as well
        assert connection.execute("PRAGMA foreign_key_check").fetchall() == []
        assert connection.execute("SELECT count(*) FROM empty").fetchone()[0] > 0
        assert connection.execute("SELECT count(*) FROM player").fetchone()[0] > 4
        assert connection.execute("SELECT body FROM notes WHERE notes MATCH 'hello'").fetchall() == [("hello world",)]
        nulls += connection.execute("SELECT count(*) FROM player WHERE team_id IS NULL").fetchone()[0]
        orphans += connection.execute(
            "SELECT count(*) FROM team WHERE id NOT IN (SELECT team_id FROM player WHERE team_id)"
        ).fetchone()[0]
        connection.close()
    assert nulls and orphans
    assert Path(db).read_bytes() == before


def test_made_once_named_by_content(db, cache):
    first = make_neighbours(db, 3)
    stamps = [path.stat().st_mtime_ns for path in first]
    assert make_neighbours(db, 3) == first and [path.stat().st_mtime_ns for path in first] == stamps
    assert make_neighbours(db, 4)[:3] == first
    contents = [path.read_bytes() for path in first]
    for path in first:
        path.unlink()
    assert [path.read_bytes() for path in make_neighbours(db, 3)] == contents  # the seed decides
    assert make_neighbours(db, 3, seed=1)[0] != first[0]
    assert make_neighbours(db, 1, golds=["SELECT 1 FROM player WHERE age > 40"])[0] != first[0]
    with sqlite3.connect(db) as connection:
        connection.execute("DELETE FROM award")
    connection.close()
    assert make_neighbours(db, 1)[0] != first[0]
    assert not [name for name in os.listdir(cache) if name.startswith(".")]
    assert exec_match("SELECT 1", "SELECT 1", Path(db).parent / "missing.sqlite", neighbours=2).correct is None
    with pytest.raises(ValueError, match="found k=0"):
        make_neighbours(db, 0)


def test_numbers_at_the_edge_of_64_bits(tmp_path):
    path, low, high = tmp_path / "edge.sqlite", -(2**63), 2**63 - 1
    connection = sqlite3.connect(path)
    connection.execute("CREATE TABLE t (id INTEGER PRIMARY KEY, code INT UNIQUE, n INT, mixed NUM, size REAL)")
    connection.execute(
        f"INSERT INTO t VALUES ({high}, {high}, {high}, 0.5, 9e999), (7, {low + 1}, {low}, {high}, 1e300)"
    )
    connection.commit()
    connection.close()
    golds = [f"SELECT id FROM t WHERE n > {high} OR n < {10**30} OR n = '\u00b2' OR mixed = {high} OR size < 1e999"]
    for copy in make_neighbours(path, 4, golds=golds):
        connection = sqlite3.connect(copy)
        assert connection.execute("SELECT count(*) FROM t").fetchone() == (10,)
        connection.close()
    assert exec_match("SELECT n FROM t", "SELECT n FROM t", path, neighbours=2).correct is True


def test_a_copy_that_cannot_be_made_leaves_the_verdict_open(db, monkeypatch):
    def fail(*_):
        raise OverflowError("Python int too large to convert to SQLite INTEGER")

    monkeypatch.setattr(neighbours, "make_neighbours", fail)
    assert exec_match("SELECT name FROM player", "SELECT name FROM player", db, neighbours=2).correct is None


def test_constants_of_golds():
    found = gold_constants(
        [
            "SELECT a FROM t WHERE age > 40 AND name = 'Ann' AND city LIKE '%om%'",
            'SELECT a FROM t WHERE T1.kind = "Football" AND x BETWEEN 2.5 AND 7 AND y IN (1, 2)',
            "SELECT count(*) FROM t GROUP BY z HAVING sum(w) >= 10",
            "not SQL at all (",
        ]
    )
    assert found == {
        "age": {40}, "name": {"Ann"}, "city": {"om"}, "kind": {"Football"}, "x": {2.5, 7}, "y": {1, 2}, "w": {10},
    }  # fmt: skip


ACCIDENTS = [  # prediction, gold: the same result on the database, not the same question
    ("SELECT name FROM player", "SELECT name FROM player WHERE age > 30"),
    ("SELECT name FROM player WHERE age >= 40", "SELECT name FROM player WHERE age > 40"),
    ("SELECT T.name FROM team T LEFT JOIN player P ON P.team_id = T.id", "SELECT T.name FROM team T JOIN player P ON P.team_id = T.id"),
    ("SELECT count(*) FROM team", "SELECT count(*) FROM (SELECT team_id FROM player GROUP BY team_id)"),
    ("SELECT count(team_id) FROM player", "SELECT count(*) FROM player"),
    ("SELECT 52 FROM player LIMIT 1", "SELECT max(age) FROM player"),
    ("SELECT name FROM player WHERE team_id = 1", "SELECT P.name FROM player P JOIN team T ON P.team_id = T.id WHERE T.city = 'Rome'"),
    ("SELECT name FROM player WHERE name LIKE '%Ann%'", "SELECT name FROM player WHERE name = 'Ann'"),
    ("SELECT b FROM empty", "SELECT b FROM empty WHERE a > 2"),
]  # fmt: skip

EQUIVALENT = [
    ("SELECT NAME FROM player AS p WHERE 30 < p.age", "SELECT name FROM player WHERE age > 30"),
    ("SELECT name FROM player WHERE NOT age <= 40", "SELECT name FROM player WHERE age > 40"),
    ("SELECT T.name FROM player P JOIN team T ON T.id = P.team_id", "SELECT T.name FROM team T, player P WHERE P.team_id = T.id"),
    ("SELECT name FROM player WHERE age >= 31 AND age <= 45", "SELECT name FROM player WHERE age BETWEEN 31 AND 45"),
    ("SELECT count(id) FROM player", "SELECT count(*) FROM player"),  # a primary key is never NULL
    ("SELECT count(name) FROM team", "SELECT count(*) FROM team"),  # NOT NULL
    ("SELECT A.prize FROM award A", "SELECT A.prize FROM award A JOIN player P ON A.player_id = P.id"),  # NOT NULL foreign key
    ("SELECT name FROM team", "SELECT DISTINCT name FROM team"),  # UNIQUE
    ("SELECT name FROM player WHERE id IN (SELECT player_id FROM award)", "SELECT DISTINCT P.id, P.name FROM player P JOIN award A ON A.player_id = P.id"),
    ("SELECT * FROM (SELECT name FROM player ORDER BY age DESC LIMIT 1)", "SELECT name FROM player ORDER BY age DESC LIMIT 1"),
    ("SELECT name FROM player WHERE age = (SELECT max(age) FROM player) LIMIT 1", "SELECT name FROM player WHERE age NOT NULL ORDER BY age DESC LIMIT 1"),
    ("SELECT max(age), min(age) FROM player", "SELECT min(age), max(age) FROM player"),
]  # fmt: skip


@pytest.mark.parametrize("mode", ["official", "strict"])
def test_accidents_are_caught(db, mode):
    preds, golds = [pred for pred, _ in ACCIDENTS], [gold for _, gold in ACCIDENTS]
    copies = neighbours_of([db] * len(golds), golds, 6)
    alone = exec_match_batch(preds, golds, [db] * len(golds), mode=mode)
    hardened = exec_match_batch(preds, golds, [db] * len(golds), mode=mode, neighbours=copies)
    assert [verdict.correct for verdict in alone] == [True] * len(golds)
    assert [(pred, verdict.correct) for pred, verdict in zip(preds, hardened, strict=True)] == [
        (pred, False) for pred in preds
    ]
    assert all("by accident" in verdict.reason for verdict in hardened)


@pytest.mark.parametrize("seed", range(3))
def test_equivalent_queries_are_kept(db, seed):
    rows = [(pred, gold) for pred, gold in EQUIVALENT if "player_id FROM award" not in pred]
    preds, golds = [pred for pred, _ in rows], [gold for _, gold in rows]
    copies = {db: make_neighbours(db, 8, seed=seed, golds=golds)}
    for mode in ("official", "strict"):
        hardened = exec_match_batch(preds, golds, [db] * len(golds), mode=mode, keep_distinct=True, neighbours=copies)
        assert [
            (pred, v.correct, v.reason) for pred, v in zip(preds, hardened, strict=True) if v.correct is not True
        ] == []


def test_one_pair_with_a_number_of_neighbours(db):
    assert exec_match("SELECT name FROM player", "SELECT name FROM player WHERE age > 30", db).correct is True
    assert (
        exec_match("SELECT name FROM player", "SELECT name FROM player WHERE age > 30", db, neighbours=5).correct
        is False
    )
    assert exec_match("SELECT name FROM player", "SELECT NAME FROM player", db, neighbours=5).correct is True
    assert exec_match("SELECT nope FROM player", "SELECT name FROM player", db, neighbours=5).correct is False
    assert exec_match("SELECT name FROM player", "SELECT nope FROM player", db, neighbours=5).correct is None


def test_a_tie_under_a_limit_says_nothing(tmp_path):
    path = tmp_path / "ties.sqlite"
    connection = sqlite3.connect(path)
    connection.executescript(
        """PRAGMA synchronous = OFF; CREATE TABLE t (id INTEGER PRIMARY KEY, a TEXT, b INT);
        INSERT INTO t(a, b) VALUES ('x', 1), ('y', 2), ('z', 3);"""
    )
    connection.close()
    pairs = [  # one more query for which "first" is the last: they differ wherever there is a tie
        (
            "SELECT a FROM t WHERE b = (SELECT max(b) FROM t) ORDER BY id DESC LIMIT 1",
            "SELECT a FROM t ORDER BY b DESC LIMIT 1",
        ),
        (
            "SELECT a FROM t WHERE b = (SELECT min(b) FROM t) ORDER BY id DESC LIMIT 1",
            "SELECT a FROM t WHERE b NOT NULL ORDER BY b LIMIT 1",
        ),
    ]
    copies = make_neighbours(path, 12, golds=["SELECT a FROM t WHERE b = 3 OR b = 1"])
    assert all(twin_of(copy) for copy in copies)
    alone = differing = 0
    for pred, gold in pairs:
        alone += exec_match(pred, gold, path).correct is True
        differing += sum(v.correct is False for v in exec_match_batch([pred] * 12, [gold] * 12, copies))
        assert exec_match(pred, gold, path, neighbours={str(path): copies}).correct is True
    assert alone == 2 and differing > 0
    # without ties the order of rows is no excuse
    assert (
        exec_match("SELECT a FROM t LIMIT 1", "SELECT min(a) FROM t", path, neighbours={str(path): copies}).correct
        is False
    )


def test_twins_hold_the_same_data(db):
    with sqlite3.connect(db) as connection:
        connection.execute("DROP TABLE notes")  # a virtual table: no twin
    connection.close()
    for copy in make_neighbours(db, 3):
        one, two = sqlite3.connect(copy), sqlite3.connect(twin_of(copy))
        for table in ("team", "player", "award", "empty", "doc", "adult"):
            rows, twins = (c.execute(f"SELECT * FROM {table}").fetchall() for c in (one, two))
            assert sorted(map(repr, rows)) == sorted(map(repr, twins)) and rows
        assert one.execute("SELECT * FROM player").fetchall() == two.execute("SELECT * FROM player").fetchall()[::-1]
        one.close()
        two.close()


def test_the_gold_cache_is_bounded(db, monkeypatch):
    monkeypatch.setattr(exec_worker, "GOLD_CACHE_BYTES", 300_000)
    monkeypatch.setattr(exec_worker, "_golds", type(exec_worker._golds)())
    monkeypatch.setattr(exec_worker, "_gold_bytes", 0)
    job = _job(db, "strict", False, False)
    for number in range(60):
        gold = exec_worker._gold(job, f"SELECT {number}, hex(zeroblob(2000)) FROM player", 5.0, False)
        assert exec_worker._gold_bytes <= 300_000 and len(gold.result.rows) == 4
        assert exec_worker._gold_bytes == sum(len(kept.blob) * 5 + 2000 for kept in exec_worker._golds.values())
    assert 1 < len(exec_worker._golds) < 60
    unsteady = exec_worker._gold(job, "SELECT random() FROM player", 5.0, False)
    assert unsteady not in exec_worker._golds.values()


@pytest.mark.slow
def test_on_spider(shared_data, tmp_path):
    """Four databases: copies are made, golds run on them, golds as they are still match."""
    root = shared_data / "spider" / "database"
    for name, gold in (
        ("concert_singer", "SELECT country, count(*) FROM singer GROUP BY country"),
        ("pets_1", "SELECT count(*) FROM pets WHERE weight > 10"),
        ("music_2", "SELECT title FROM songs WHERE title LIKE '% the %'"),
        ("car_1", "SELECT model FROM car_names WHERE makeid < 30"),
    ):
        path = root / name / f"{name}.sqlite"
        assert exec_match(f"SELECT * FROM ({gold})", gold, path, neighbours=3).correct is True

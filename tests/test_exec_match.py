"""The execution judge: values, rows and columns by both modes, the shared verdicts of the official tool, hostile batches."""

import contextlib
import math
import os
import random
import sqlite3
import time
from itertools import permutations
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rewards.exec_compare import (
    canonical,
    canonical_text,
    column_maps,
    official_text,
    ordered_at_top,
    same_official,
    same_strict,
)
from rewards.exec_match import Verdict, exec_match, exec_match_batch

ROOT = Path(__file__).resolve().parent.parent
FOREVER = "WITH RECURSIVE r(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM r) SELECT count(*) FROM r"


@pytest.fixture
def db(tmp_path: Path) -> str:
    path = tmp_path / "db" / "shop" / "shop.sqlite"
    path.parent.mkdir(parents=True)
    connection = sqlite3.connect(path)
    connection.executescript(
        """PRAGMA synchronous = OFF;
        CREATE TABLE item (id INTEGER PRIMARY KEY, name TEXT, price REAL, stock INT, kind TEXT);
        INSERT INTO item VALUES (1, 'pen', 1.5, 10, 'a'), (2, 'ink', 2.0, 10, 'b'), (3, 'cup', 2.0, NULL, 'a'), (4, 'pen', 9.25, 0, 'c');
        CREATE TABLE sale (item_id INT, day TEXT);
        CREATE TABLE raw (t TEXT);
        INSERT INTO raw VALUES (CAST(x'61ff' AS TEXT)), (CAST(x'61fe' AS TEXT));"""
    )
    connection.commit()
    connection.close()
    os.utime(path, (time.time() - 10, time.time() - 10))
    return str(path)


# ---- verdicts ----

RIGHT, WRONG = True, False
CASES = [  # prediction, gold, official, strict
    ("SELECT name FROM item", "select NAME from ITEM", RIGHT, RIGHT),
    ("SELECT name FROM item -- the answer", "SELECT name FROM item", RIGHT, RIGHT),
    ("SELECT name FROM item LIMIT 3", "SELECT name FROM item", WRONG, WRONG),
    ("SELECT DISTINCT name FROM item", "SELECT name FROM item", RIGHT, WRONG),  # DISTINCT is stripped from both
    ("SELECT count(DISTINCT name) FROM item", "SELECT count(name) FROM item", RIGHT, WRONG),
    ("SELECT 'DISTINCT', name FROM item", "SELECT 'distinct', name FROM item", WRONG, WRONG),  # not inside a string
    ("SELECT name FROM item ORDER BY id DESC", "SELECT name FROM item", RIGHT, RIGHT),
    ("SELECT name FROM item", "SELECT name FROM item ORDER BY name", WRONG, WRONG),
    # "order by" anywhere makes the official tool compare the order; strict looks at the outermost SELECT
    ("SELECT id FROM item ORDER BY id DESC", "SELECT id FROM item WHERE id IN (SELECT id FROM item ORDER BY id)", WRONG, RIGHT),
    ("SELECT stock, name FROM item", "SELECT name, stock FROM item", RIGHT, RIGHT),
    ("SELECT 10, stock, stock FROM item WHERE id = 1", "SELECT stock, 10, id + 9 FROM item WHERE id = 1", RIGHT, RIGHT),  # all the same
    ("SELECT stock, 1, stock FROM item WHERE id = 1", "SELECT 1, stock, 10 FROM item WHERE id = 1", RIGHT, WRONG),  # which 10 is which?
    ("SELECT price FROM item WHERE id = 2", "SELECT 2 FROM item WHERE id = 2", RIGHT, RIGHT),  # 2.0 and 2
    ("SELECT '2' FROM item WHERE id = 2", "SELECT 2 FROM item WHERE id = 2", WRONG, WRONG),  # text is not a number
    ("SELECT x'61' FROM item", "SELECT 'a' FROM item", WRONG, WRONG),  # bytes are not text
    ("SELECT NULL FROM item WHERE id = 1", "SELECT 0 FROM item WHERE id = 1", WRONG, WRONG),
    ("SELECT NULL FROM item WHERE id = 1", "SELECT stock FROM item WHERE id = 3", RIGHT, RIGHT),
    ("SELECT '' FROM item WHERE id = 1", "SELECT stock FROM item WHERE id = 3", WRONG, WRONG),
    ("SELECT -0.0 FROM item WHERE id = 1", "SELECT 0 FROM item WHERE id = 1", RIGHT, RIGHT),
    ("SELECT 0.1 + 0.2 FROM item", "SELECT 0.3 FROM item", WRONG, RIGHT),  # strict: 12 significant digits
    ("SELECT 0.300001 FROM item", "SELECT 0.3 FROM item", WRONG, WRONG),
    ("SELECT 9007199254740993 FROM item", "SELECT 9007199254740992 FROM item", WRONG, WRONG),  # integers are exact
    # quirk: values of a row are also compared sorted by their text: "10.0" < "1a" < "2" but "10" < "1a"
    ("SELECT 1.0, '1-' FROM item", "SELECT 1, '1-' FROM item", RIGHT, RIGHT),
    ("SELECT 1.0, '1.' FROM item", "SELECT 1, '1.' FROM item", WRONG, RIGHT),
    # an empty result of another table
    ("SELECT name FROM item WHERE id > 9", "SELECT item_id FROM sale", RIGHT, WRONG),
    ("SELECT day FROM sale", "SELECT item_id FROM sale", RIGHT, RIGHT),
    ("SELECT 1 WHERE 0", "SELECT item_id FROM sale", RIGHT, WRONG),
    ("SELECT 4", "SELECT count(*) FROM item", RIGHT, WRONG),  # a guess reads no table
    ("SELECT t FROM raw", "SELECT t FROM raw ORDER BY rowid", RIGHT, RIGHT),  # not UTF-8
    ("SELECT t FROM raw WHERE rowid = 1", "SELECT t FROM raw WHERE rowid = 2", RIGHT, WRONG),  # official drops the bad bytes
    ("SELECT name FROM item WHERE price > = 2", "SELECT name FROM item WHERE price >= 2", RIGHT, RIGHT),
    ("SELECT YEAR(CURDATE()) FROM item", "SELECT 2020 FROM item", RIGHT, RIGHT),
    ("SELECT name FROM item; SELECT 1", "SELECT name FROM item", RIGHT, WRONG),  # the rest is dropped with DISTINCT
    ("SELECT nme FROM item", "SELECT name FROM item", WRONG, WRONG),
    ("", "SELECT item_id FROM sale", WRONG, WRONG),
    ("-- no idea", "SELECT item_id FROM sale", WRONG, WRONG),
    ("DROP TABLE item", "SELECT item_id FROM sale", WRONG, WRONG),  # the official tool drops it and says right
    ("PRAGMA user_version", "SELECT count(*) FROM sale", RIGHT, WRONG),  # by accident 0; reads no table
    (None, "SELECT name FROM item", WRONG, WRONG),
]  # fmt: skip


@pytest.mark.parametrize(("pred", "gold", "official", "strict"), CASES)
def test_verdicts(db, pred, gold, official, strict):
    assert exec_match(pred, gold, db).correct is official
    assert exec_match(pred, gold, db, mode="strict").correct is strict


ANSWERS = [  # prediction, gold that reads no table: an answer without its query. The same in both modes
    ("SELECT min(zip) FROM place WHERE town = 'Berlin'", "VALUES (10115)", RIGHT),  # a number, because a CSV file says so
    ("SELECT min(zip) FROM place WHERE town = 'Berlin'", "SELECT 10115", RIGHT),
    ("SELECT floor FROM place WHERE town = 'Bonn'", "VALUES ('3')", RIGHT),
    ("SELECT floor * 1.0 FROM place WHERE town = 'Bonn'", "VALUES ('3')", RIGHT),
    ("SELECT town, zip, floor FROM place", "VALUES (10115, 2, 'Berlin'), ('01067', 3, 'Bonn'), (10117, 2, 'Berlin')", RIGHT),
    ("SELECT DISTINCT town FROM place", "VALUES ('Bonn'), ('Berlin')", RIGHT),
    ("SELECT count(DISTINCT town) FROM place", "VALUES (2)", RIGHT),
    ("SELECT zip FROM place WHERE town = 'Bonn'", "VALUES (1067)", WRONG),  # the text is '01067'
    ("SELECT zip FROM place WHERE floor = 2", "VALUES (10115)", WRONG),
    ("SELECT zip FROM place", "VALUES (10115), (10117), (10119)", WRONG),
    ("SELECT '10115'", "VALUES (10115)", WRONG),  # reads no table: no answer to a question about one
    ("SELECT min(zip) FROM place WHERE floor = 2", "SELECT 10115 FROM place LIMIT 1", WRONG),  # a query: nothing is laxer
    ("SELECT '3' FROM place LIMIT 1", "SELECT max(floor) FROM place", WRONG),
    ("SELECT random() FROM place LIMIT 1", "VALUES ('x')", WRONG),
]  # fmt: skip


@pytest.mark.parametrize(("pred", "gold", "right"), ANSWERS)
def test_an_answer_without_its_query_is_compared_as_written(tmp_path, pred, gold, right):
    with contextlib.closing(sqlite3.connect(tmp_path / "p.sqlite")) as connection, connection:
        connection.execute("CREATE TABLE place (zip TEXT, floor INT, town TEXT)")
        rows = [("10115", 2, "Berlin"), ("01067", 3, "Bonn"), ("10117", 2, "Berlin")]
        connection.executemany("INSERT INTO place VALUES (?, ?, ?)", rows)
    for mode in ("official", "strict"):
        assert exec_match(pred, gold, tmp_path / "p.sqlite", mode=mode).correct is right


def test_keep_distinct(db):
    pred, gold = "SELECT DISTINCT name FROM item", "SELECT name FROM item"
    assert exec_match(pred, gold, db).correct is True
    assert exec_match(pred, gold, db, keep_distinct=True).correct is False
    assert exec_match("SELECT name FROM item; ;", gold, db, keep_distinct=True).correct is False  # two statements
    # The official tool runs an empty prediction when it keeps DISTINCT: no rows. Else it crashes: wrong.
    assert exec_match("", "SELECT * FROM sale", db, keep_distinct=True).correct is True
    assert exec_match("", gold, db, keep_distinct=True).correct is False
    assert exec_match("", "SELECT * FROM sale", db, mode="strict", keep_distinct=True).correct is False


@pytest.mark.parametrize("gold", ["SELECT nope FROM item", "SELEC", "", "DROP TABLE item", None, "SELECT 1; SELECT 2"])
def test_a_failing_gold_is_undecided(db, gold):
    verdict = exec_match("SELECT name FROM item", gold, db, mode="strict")
    assert verdict.correct is None and "gold" in verdict.reason


def test_a_slow_gold_is_undecided_and_a_slow_prediction_wrong(db):
    verdict = exec_match("SELECT 1", FOREVER, db, timeout=0.3)
    assert verdict.correct is None and "gold" in verdict.reason
    verdict = exec_match(FOREVER, "SELECT count(*) FROM item", db, timeout=0.3)
    assert verdict.correct is False and "timeout" in verdict.reason


def test_infrastructure_is_undecided(tmp_path):
    assert exec_match("SELECT 1", "SELECT 1", tmp_path / "missing.sqlite").correct is None
    (tmp_path / "text.sqlite").write_text("no database at all, but long enough for a header\n" * 99)
    assert exec_match("SELECT * FROM a", "SELECT * FROM a", tmp_path / "text.sqlite").correct is None


def test_user_errors_say_what_is_wrong(db):
    with pytest.raises(ValueError, match="mode is one of official, strict, found 'loose'"):
        exec_match("SELECT 1", "SELECT 1", db, mode="loose")
    with pytest.raises(ValueError, match="found 1 2 1"):
        exec_match_batch(["a"], ["b", "c"], [db])


def test_gold_is_keyed_by_content_and_forgotten_when_the_file_changes(db, tmp_path):
    pred, gold = "SELECT 4 FROM item LIMIT 1", "SELECT count(*) FROM item"
    assert exec_match(pred, gold, db).correct is True
    for expected in (False, True, False):  # as fast as the clock ticks
        with sqlite3.connect(db) as connection:
            if expected:
                connection.execute("DELETE FROM item WHERE id > 4")
            else:
                connection.execute("INSERT INTO item(name) VALUES ('new')")
        connection.close()
        assert exec_match(pred, gold, db).correct is expected
    copy = tmp_path / "copy.sqlite"
    copy.write_bytes(Path(db).read_bytes())
    assert exec_match(pred, gold, copy).correct is False


def test_the_database_is_not_written(db):
    before = Path(db).read_bytes(), sorted(os.listdir(Path(db).parent))
    for pred in ("DROP TABLE item", "DELETE FROM item", "PRAGMA journal_mode = WAL", "VACUUM", "CREATE TABLE t(a)"):
        for mode in ("official", "strict"):
            assert exec_match(pred, "SELECT name FROM item", db, mode=mode).correct is False
    assert (Path(db).read_bytes(), sorted(os.listdir(Path(db).parent))) == before


def test_gold_does_not_leak_through_the_connection(db):
    gold = "SELECT name FROM item WHERE price > 1.75"
    for pred in ("SELECT sql FROM sqlite_stmt", "SELECT * FROM sqlite_stmt", "SELECT p4 FROM bytecode('SELECT 1')"):
        assert exec_match(pred, gold, db).correct is False


# ---- what the text says ----


@pytest.mark.parametrize(
    ("sql", "ordered"),
    [
        ("SELECT a FROM t ORDER BY a", True),
        ("SELECT a FROM t\norder/* */\tby a LIMIT 1", True),
        ("SELECT a FROM (SELECT a FROM t ORDER BY a)", False),
        ("SELECT 'order by' FROM t", False),
        ('SELECT "order by" FROM t -- ORDER BY a', False),
        ("SELECT sum(a) OVER (ORDER BY a) FROM t", False),
        ("SELECT a FROM (SELECT 1 ORDER BY 1) UNION SELECT 2 ORDER BY 1", True),
        ("SELECT border FROM t", False),
    ],
)
def test_order_is_read_from_the_outermost_select(sql, ordered):
    assert ordered_at_top(sql) is ordered


def test_official_text():
    assert (
        official_text("SELECT COUNT(DISTINCT a), 'DISTINCT' FROM \"distinct\"", False)
        == "SELECT COUNT( a), 'DISTINCT' FROM \"distinct\""
    )
    assert official_text("SELECT DISTINCT a", True) == "SELECT DISTINCT a"
    assert official_text("SELECT a; DROP TABLE t", False) == "SELECT a;"
    assert official_text("SELECT ';' , a", False) == "SELECT ';' , a"


def test_canonical_text_joins_only_what_sqlite_takes_for_the_same():
    same = ["SELECT a , b FROM t", "select A,\n\tB from T ;", "SELECT a,b /* c */ FROM t -- d"]
    assert len({canonical_text(sql) for sql in same}) == 1
    different = [
        "SELECT 'A'",
        "SELECT 'a'",
        'SELECT "a"',
        "SELECT a",
        "SELECT x'aa'",
        "SELECT x 'aa'",
        "SELECT é",
        "SELECT É",
        "SELECT a;;",
    ]
    assert len({canonical_text(sql) for sql in different}) == len(different)


# ---- comparing rows ----

VALUES = st.one_of(
    st.none(), st.integers(-3, 3), st.sampled_from([0.0, -0.0, 1.0, 0.5, math.nan, math.inf]), st.sampled_from(["", "a", "1"]), st.sampled_from([b"", b"a"])
)  # fmt: skip


@st.composite
def tables(draw, values=VALUES, columns=(1, 5), rows=(1, 7)):
    width = draw(st.integers(*columns))
    return draw(st.lists(st.tuples(*[values] * width), min_size=rows[0], max_size=rows[1]))


@given(tables(), st.randoms(use_true_random=False), st.booleans())
def test_a_result_matches_itself_in_any_order(table, rng, ordered):
    assert same_strict(table, table, ordered) is True
    shuffled = rng.sample(table, len(table))
    assert same_strict(table, shuffled, False) is True
    if not any(isinstance(value, float) for row in table for value in row):
        assert same_official(table, table, ordered) is True
        assert same_official(table, shuffled, False) is True
        order = rng.sample(range(len(table[0])), len(table[0]))
        assert same_official(table, [tuple(row[i] for i in order) for row in shuffled], False) is True
        assert same_official(table, [tuple(row[i] for i in order) for row in table], True) is True


@given(tables(), tables(), st.booleans())
def test_strict_is_symmetric(left, right, ordered):
    assert same_strict(left, right, ordered) is same_strict(right, left, ordered)


@given(tables(st.integers(0, 2), (1, 4), (1, 4)), st.data(), st.booleans())
@settings(max_examples=300)
def test_the_search_agrees_with_trying_every_permutation(left, data, ordered):
    """Few values, so that many permutations nearly fit."""
    width = len(left[0])
    right = data.draw(
        st.lists(st.tuples(*[st.integers(0, 2)] * width), min_size=len(left), max_size=len(left))
        | st.permutations(range(width)).map(lambda order: [tuple(row[i] for i in order) for row in left[::-1]])
    )

    def fits(order: tuple) -> bool:
        moved = [tuple(row[i] for i in order) for row in right]
        return left == moved if ordered else sorted(left) == sorted(moved)

    fitting = sum(fits(order) for order in permutations(range(width)))
    assert column_maps(left, right, ordered, 1) == min(1, fitting)
    assert column_maps(left, right, ordered, 2) == min(2, fitting)


def test_values():
    assert canonical(-0.0) == 0 and str(canonical(-0.0)) == "0"
    assert canonical(2.0) == 2 and canonical(2.5) == 2.5 and canonical(2.9999999999999996) == 3
    assert canonical(9007199254740991.0) == 9007199254740991
    assert canonical(math.nan) == canonical(-math.nan) and canonical(math.inf) != canonical(-math.inf)
    assert same_strict([(1, None)], [(1, 0)], False) is False
    assert same_strict([("1",)], [(1,)], False) is False
    assert same_strict([(b"a",)], [("a",)], False) is False
    assert same_strict([(1.1 + 2.2,)], [(3.3,)], False) is True


def test_bags_not_sets():
    assert same_official([(1,), (1,), (2,)], [(1,), (2,), (2,)], False) is False
    assert same_strict([(1,), (1,), (2,)], [(1,), (2,), (2,)], False) is False


def test_strict_takes_a_permutation_only_where_it_is_the_only_one():
    assert same_strict([(1, "a"), (2, "b")], [("a", 1), ("b", 2)], False) is True
    assert same_strict([(1, 2, "a")], [("a", 2, 1)], False) is True
    assert same_strict([(1, 1, "a")], [("a", 1, 1)], False) is False  # which 1 is which?
    assert same_strict([(1, 1, "a")], [(1, 1, "a")], False) is True
    assert same_strict([(1, 2, 5), (2, 1, 5)], [(5, 1, 2), (5, 2, 1)], False) is False


def _wide(kind: str, width: int) -> tuple[list, list]:
    rng = random.Random(0)
    if kind == "all the same":
        return [(1,) * width] * 50, [(1,) * width] * 50
    if kind == "each column a shuffle":
        columns = [rng.sample(range(60), 60) for _ in range(width)]
        other = [rng.sample(range(60), 60) for _ in range(width)]
        return list(zip(*columns, strict=True)), list(zip(*other, strict=True))
    if kind == "identity matrix":
        return [tuple(int(i == j) for j in range(width)) for i in range(width)], [
            tuple(int((i + 3) % width == j) for j in range(width)) for i in range(width)
        ]
    if kind == "random bits":
        rows = [tuple(rng.randrange(2) for _ in range(width)) for _ in range(60)]
        order = rng.sample(range(width), width)
        return rows, [tuple(row[i] for i in order) for row in rng.sample(rows, 60)]
    if kind == "one bit off":
        rows, other = _wide("random bits", width)
        return rows, [(1 - other[0][0], *other[0][1:]), *other[1:]]
    # two graphs of the same degrees as incidence matrices: one ring, or two rings of half the length
    ring = [tuple(int(i in (j, (j + 1) % width)) for j in range(width)) for i in range(width)]
    half = width // 2
    two = [tuple(int(j // half == i // half and (i - j) % half in (0, 1)) for j in range(width)) for i in range(width)]
    return ring, two


@pytest.mark.parametrize(
    ("kind", "same"),
    [("all the same", True), ("each column a shuffle", False), ("identity matrix", True), ("random bits", True), ("one bit off", False)],
)  # fmt: skip
@pytest.mark.parametrize("width", [4, 12, 40])
def test_wide_results_take_milliseconds(kind, same, width):
    left, right = _wide(kind, width)
    started = time.process_time()  # of this process: others may be busy
    assert same_official(left, right, False) is same
    assert time.process_time() - started < 0.25


def test_the_search_is_bounded_where_it_is_hard():
    left, right = _wide("rings", 60)
    started = time.perf_counter()
    assert same_official(left, right, False) in (False, None)
    assert time.perf_counter() - started < 3


def test_verdict_is_a_value():
    assert Verdict(True, "same") == Verdict(True, "same")

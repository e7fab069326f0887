"""tasks.spider, tasks.schema_text and tasks.hardness, on a database made here and on the real files where they are."""

import json
import re
import shutil
import sqlite3
from collections import Counter

import pytest

from envs import ENVIRONMENTS
from tasks import COLUMNS, TASKS, Rejected
from tasks.base import estimate_tokens
from tasks.hardness import hardness, level
from tasks.schema_text import Notes, mentioned_values, read_schema, schema_text
from tasks.spider import annotations, tidy_sql

SPIDER = TASKS["spider"]


@pytest.fixture
def folder(tmp_path, shop_db):
    """A small data set in Spider's official layout: two databases, one of them with an undeclared foreign key."""
    root = tmp_path / "spider"
    for name in ("shop", "club"):
        (root / "database" / name).mkdir(parents=True)
    shutil.copy(shop_db, root / "database" / "shop" / "shop.sqlite")
    with sqlite3.connect(root / "database" / "club" / "club.sqlite") as db:
        db.executescript(
            "CREATE TABLE member (mid INTEGER PRIMARY KEY, nm TEXT); CREATE TABLE visit (mid INTEGER, day TEXT);"
            "INSERT INTO member VALUES (1, 'Zoe'), (2, 'Max'); INSERT INTO visit VALUES (1, '2020-01-01');"
        )
    db.close()
    train = [
        {"question": "How many customers are there?", "query": "SELECT count(*) FROM customer", "db_id": "shop"},
        {
            "question": "Who lives in Paris?",
            "query": 'SELECT name  FROM customer WHERE city = "Paris"',
            "db_id": "shop",
        },
        {"question": "Broken gold?", "query": "SELECT height FROM customer", "db_id": "shop"},
        {"question": "Unreadable gold?", "query": "SELECT FROM WHERE (", "db_id": "shop"},
        {"question": "No database?", "query": "SELECT 1", "db_id": "gone"},
    ]
    dev = [{"question": "How many members visited?", "query": "SELECT count(DISTINCT mid) FROM visit", "db_id": "club"}]
    tables = [
        {
            "db_id": "club",
            "table_names_original": ["member", "visit"],
            "column_names_original": [[-1, "*"], [0, "mid"], [0, "nm"], [1, "mid"], [1, "day"]],
            "column_names": [[-1, "*"], [0, "member id"], [0, "name"], [1, "member id"], [1, "day"]],
            "foreign_keys": [[3, 1]],
        }
    ]
    for name, content in (("train_spider", train), ("dev", dev), ("tables", tables)):
        (root / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    return root


def rows_of(split, root, **options):
    loaded = list(SPIDER.load(split, root, **options))
    return [r for r in loaded if isinstance(r, dict)], [r for r in loaded if isinstance(r, Rejected)]


def test_rows_have_the_columns_and_bad_ones_a_reason(folder):
    rows, rejected = rows_of("train", folder)
    assert [set(r) for r in rows] == [set(COLUMNS)] * 3
    assert {r.id: r.reason for r in rejected} == {
        "spider-train-3": "gold cannot be parsed",
        "spider-train-4": "database missing",
    }
    assert rows[0]["prompt"][1]["content"].endswith("Question: How many customers are there?")
    assert "CREATE TABLE customer (id int PRIMARY KEY, name text" in rows[0]["prompt"][1]["content"]


def test_data_root_above_the_task_folder_is_found_too(folder):
    assert len(rows_of("train", folder.parent)[0]) == 3


def test_trajectory_is_run_for_real_and_gold_is_judged(folder):
    rows, _ = rows_of("train", folder)
    env = ENVIRONMENTS["sql"]()
    completion = SPIDER.trajectory(rows[1], env)
    assert completion[0]["tool_calls"][0]["function"]["arguments"] == {
        "query": "SELECT name FROM customer WHERE city = 'Paris'"
    }
    assert completion[1] == {"role": "tool", "name": "execute_sql", "content": "name\nAnn\nDora\n(2 rows)"}
    assert set(completion[2]) == {"role", "content"}
    with pytest.raises(Rejected, match="gold fails: Error: no such column: height"):
        SPIDER.trajectory(rows[2], env)


def test_keys_and_meanings_of_tables_json_reach_the_prompt(folder):
    (row,), _ = rows_of("eval", folder)
    prompt = row["prompt"][1]["content"]
    assert "mid int REFERENCES member(mid) /* member id */" in prompt
    assert "nm text /* name: 'Zoe', 'Max' */" in prompt


def test_train_others_are_read_when_they_are_there(folder):
    shutil.copy(folder / "dev.json", folder / "train_others.json")
    assert [r["id"] for r in rows_of("train", folder)[0]][-1] == "spider-others-0"


def test_limit_draws_by_seed(folder):
    ids = [
        [r.id if isinstance(r, Rejected) else r["id"] for r in SPIDER.load("train", folder, limit=2, seed=s)]
        for s in range(9)
    ]
    assert all(len(x) == 2 for x in ids) and len({tuple(x) for x in ids}) > 1
    again = [r.id if isinstance(r, Rejected) else r["id"] for r in SPIDER.load("train", folder, limit=2, seed=0)]
    assert again == ids[0]


def test_parquet_layout(folder, tmp_path):
    import pandas

    root = tmp_path / "lightning"
    (root / "database" / "shop").mkdir(parents=True)
    shutil.copy(folder / "database" / "shop" / "shop.sqlite", root / "elsewhere.sqlite")
    items = json.loads((folder / "train_spider.json").read_text())[:2]
    items[0]["db_path"] = "elsewhere.sqlite"
    items[1]["db_path"] = str(root / "elsewhere.sqlite")
    pandas.DataFrame(items).to_parquet(root / "train_spider.parquet")
    pandas.DataFrame(items[:1]).to_parquet(root / "test_dev.parquet")
    rows, rejected = rows_of("train", root)
    assert not rejected and {r["db_path"] for r in rows} == {str(root / "elsewhere.sqlite")}
    assert SPIDER.trajectory(rows[0], ENVIRONMENTS["sql"]())[1]["content"] == "count(*)\n5\n(1 row)"
    assert len(rows_of("eval", root)[0]) == 1


def test_questions_through_datasets(folder, tmp_path):
    """`hub_id` may be a folder, which is read by the same call as a hub name."""
    hub = tmp_path / "hub"
    hub.mkdir()
    items = json.loads((folder / "train_spider.json").read_text())[:2]
    (hub / "train.jsonl").write_text("\n".join(map(json.dumps, items)), encoding="utf-8")
    assert len(rows_of("train", folder, hub_id=str(hub))[0]) == 2


def test_missing_data_is_one_clear_error(tmp_path, folder):
    with pytest.raises(
        FileNotFoundError, match=r"none of train_spider.json.*neither folder exists.*\n.*recipes/demo.yaml"
    ):
        rows_of("train", tmp_path / "nowhere")
    (tmp_path / "half").mkdir()
    (tmp_path / "half" / "readme.txt").write_text("x")
    with pytest.raises(FileNotFoundError, match=r"holds readme.txt"):
        SPIDER.source(tmp_path / "half")
    shutil.rmtree(folder / "database")
    with pytest.raises(FileNotFoundError, match=r"but no database/ folder"):
        rows_of("train", folder)


def test_half_downloaded_file_is_one_clear_error(folder):
    whole = (folder / "train_spider.json").read_text()
    (folder / "train_spider.json").write_text(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=r"train_spider.json \(\d+ bytes\) is not whole"):
        rows_of("train", folder)
    (folder / "train_spider.json").write_text(json.dumps([{"question": "x", "sql": "y"}]))
    with pytest.raises(ValueError, match="a row has no db_id, query; its columns are question, sql"):
        rows_of("train", folder)
    for rows, says in (
        (5, "holds '5' where a list of rows"),
        ([{"question": None, "query": "y", "db_id": "z"}], "question is None"),
    ):
        (folder / "train_spider.json").write_text(json.dumps(rows))
        with pytest.raises(ValueError, match=says):
            rows_of("train", folder)
    (folder / "train_spider.json").write_text(whole)
    (folder / "tables.json").write_text(json.dumps([{"db_id": "shop"}]))
    annotations.cache_clear()
    with pytest.raises(ValueError, match="tables.json .* is not whole: KeyError"):
        rows_of("train", folder)


@pytest.mark.parametrize(
    ("written", "tidy"),
    [
        ("SELECT count(*) ,  avg(a)  FROM t WHERE x  >=  1 ;", "SELECT count(*), avg(a) FROM t WHERE x >= 1"),
        ('SELECT a FROM t WHERE b = "New  York"', "SELECT a FROM t WHERE b = 'New  York'"),
        ('SELECT a FROM t WHERE b = "O\'Neil"', "SELECT a FROM t WHERE b = 'O''Neil'"),
        ("SELECT \"Home Town\" FROM t WHERE b = 'a ,  b'", "SELECT \"Home Town\" FROM t WHERE b = 'a ,  b'"),
        ("SELECT count ( * ) FROM t WHERE a ! = 1", "SELECT count(*) FROM t WHERE a != 1"),
    ],
)
def test_tidy_sql_keeps_literals(written, tidy):
    assert tidy_sql(written, {"home town", "a", "b", "t"}) == tidy


# ---- schema text -----------------------------------------------------------------------------------------------------


@pytest.fixture
def wide_db(tmp_path):
    path = tmp_path / "wide.sqlite"
    with sqlite3.connect(path) as db:
        for i in range(30):
            columns = ", ".join(f"field_{i}_{j} TEXT" for j in range(12))
            db.execute(f"CREATE TABLE thing_{i} (id INTEGER PRIMARY KEY, {columns})")
        db.execute("CREATE TABLE singer (sid INTEGER PRIMARY KEY, name TEXT, country TEXT)")
        db.execute("CREATE TABLE song (id INTEGER PRIMARY KEY, sid INTEGER REFERENCES singer(sid), title TEXT)")
        db.execute("INSERT INTO singer VALUES (1, 'Joe', 'France'), (2, 'Ann', 'New Zealand')")
    db.close()
    return str(path)


@pytest.mark.parametrize("budget", [60, 100, 160, 200, 400, 1000])
def test_over_the_budget_what_the_question_names_stays(wide_db, budget):
    text = schema_text(wide_db, "Which singers come from france?", schema_tokens=budget)
    assert estimate_tokens(text + "\n") <= budget
    lines = text.splitlines()
    assert all(x.startswith("CREATE TABLE") and x.endswith(");") for x in lines[:-1])
    assert re.match(r"-- (\d+ other tables$|other tables: )", lines[-1])
    singer = next(x for x in lines if x.startswith("CREATE TABLE singer"))
    assert "country text /* 'France'" in singer
    if budget >= 200:
        assert any(x.startswith("CREATE TABLE song") for x in lines)  # joined to the relevant table


def test_a_table_without_keys_that_no_question_names_keeps_some_columns(tmp_path):
    path = str(tmp_path / "odd.sqlite")
    with sqlite3.connect(path) as db:
        db.execute(f"CREATE TABLE measures ({', '.join(f'reading_{i} REAL' for i in range(40))})")
    db.close()
    text = schema_text(path, "Which singers come from france?", schema_tokens=60)
    assert "reading_0 real" in text and "38 more columns" in text


def test_a_budget_too_small_says_what_is_needed(wide_db):
    with pytest.raises(ValueError, match=r"schema_tokens=20 is too small: .* needs \d+ tokens"):
        schema_text(wide_db, "Which singers come from france?", schema_tokens=20)


def test_pruning_does_not_look_at_gold(folder):
    """The loader passes question and database only: other gold, same prompt."""
    before, _ = rows_of("train", folder, schema_tokens=60)
    items = json.loads((folder / "train_spider.json").read_text())
    items[0]["query"] = "SELECT sum(price) FROM purchase"
    (folder / "train_spider.json").write_text(json.dumps(items))
    after, _ = rows_of("train", folder, schema_tokens=60)
    assert before[0]["gold"] != after[0]["gold"] and before[0]["prompt"] == after[0]["prompt"]


def test_values_in_the_question_are_found_in_any_case(wide_db):
    found = mentioned_values(read_schema(wide_db), "Singers from new zealand?")
    assert found == {("singer", "country"): ["New Zealand"]}


def test_schema_text_runs_as_sql(shop_db, wide_db):
    for path in (shop_db, wide_db):
        again = sqlite3.connect(":memory:")
        again.executescript(schema_text(path, "", schema_tokens=10**6, sample_values=3))
        for table in read_schema(path).tables:
            names = [r[1] for r in again.execute(f'PRAGMA table_info("{table.name}")')]
            assert names == [c.name for c in table.columns]
        again.close()


def test_odd_names_and_values_stay_one_line(tmp_path):
    path = tmp_path / "odd.sqlite"
    with sqlite3.connect(path) as db:
        db.execute('CREATE TABLE "order" ("Home Town" VARCHAR(20), "a""b" BLOB, note TEXT)')
        db.execute("INSERT INTO \"order\" VALUES ('it''s', x'00', 'two\nlines'), ('b', NULL, '*/ x')")
        db.execute("CREATE VIEW broken AS SELECT * FROM gone")
    db.close()
    text = schema_text(str(path), notes=Notes({"order.note": "free text"}))
    assert "\n" not in text and "\"Home Town\" text /* 'it''s', 'b' */" in text and "broken" not in text
    assert text.count("*/") == text.count("/*")


# ---- hardness --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sql", "expected"),
    [
        ("SELECT count(*) FROM singer", "easy"),
        ("SELECT name FROM singer WHERE age > 20", "easy"),
        ("SELECT name, age FROM singer WHERE country = 'France' ORDER BY age", "medium"),
        ("SELECT T1.name FROM a AS T1 JOIN b AS T2 ON T1.i = T2.i WHERE T2.x = 1", "medium"),
        ("SELECT name FROM singer WHERE age > (SELECT avg(age) FROM singer)", "hard"),
        ("SELECT name FROM a EXCEPT SELECT name FROM b", "hard"),
        ("SELECT a FROM t JOIN u ON t.i = u.i WHERE x = 1 GROUP BY b ORDER BY count(*) DESC LIMIT 1", "extra"),
    ],
)
def test_hardness_levels(sql, expected):
    assert hardness(sql) == expected


def official(query: dict) -> str:
    """The benchmark's counts on the parse that dev.json carries: a second way to the level, free of sqlglot."""

    def aggregates(units):
        return sum(unit[0] != 0 for unit in units)

    parts = [query["from"]["conds"], query["where"], query["having"]]
    clauses = sum(bool(query[k]) for k in ("where", "groupBy", "orderBy")) + (query["limit"] is not None)
    clauses += max(len(query["from"]["table_units"]) - 1, 0)
    clauses += sum(x == "or" for p in parts for x in p[1::2]) + sum(x[1] == 9 for p in parts for x in p[::2])
    nested = sum(isinstance(x[i], dict) for p in parts for x in p[::2] for i in (3, 4))
    nested += sum(query[k] is not None for k in ("intersect", "except", "union"))
    found = aggregates(query["select"][1]) + aggregates(query["where"][::2]) + aggregates(query["having"])
    if query["orderBy"]:
        found += aggregates([u[i] for u in query["orderBy"][1] for i in (1, 2) if u[i]])
    others = (found > 1) + (len(query["select"][1]) > 1) + (len(query["where"]) > 1) + (len(query["groupBy"]) > 1)
    return level(clauses, nested, others)


def test_hardness_agrees_with_the_official_parse_of_dev(shared_data):
    rows = json.loads((shared_data / "spider" / "dev.json").read_text())
    wrong = [
        (hardness(r["query"]), official(r["sql"]), r["query"])
        for r in rows
        if hardness(r["query"]) != official(r["sql"])
    ]
    assert not wrong
    assert Counter(hardness(r["query"]) for r in rows).keys() == {"easy", "medium", "hard", "extra"}


# ---- the real data ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_all_of_spider_is_accounted_for(shared_data):
    env = ENVIRONMENTS["sql"](max_turns=3)
    reasons, kept = Counter(), Counter()
    for split, total in (("train", 7000), ("eval", 489)):
        loaded = list(SPIDER.load(split, shared_data / "spider", schema_tokens=1024))
        assert len(loaded) == total
        for row in loaded:
            if isinstance(row, Rejected):
                reasons[split, row.reason] += 1
                continue
            assert estimate_tokens(row["prompt"][1]["content"].partition("\n\nQuestion:")[0]) <= 1024
            try:
                SPIDER.trajectory(row, env)
                kept[split] += 1
            except Rejected as reason:
                reasons[split, reason.reason.split(":")[0]] += 1
    assert reasons == {("train", "database missing"): 292, ("train", "gold fails"): 3}
    assert kept == {"train": 6705, "eval": 489}


def test_a_file_that_is_no_database_rejects_its_rows(tmp_path):
    (tmp_path / "database" / "x").mkdir(parents=True)
    (tmp_path / "database" / "x" / "x.sqlite").write_text("garbage, longer than a header of a real file would be" * 9)
    item = {"question": "How many?", "query": "SELECT count(*) FROM t", "db_id": "x"}
    (tmp_path / "train_spider.json").write_text(json.dumps([item]))
    (row,) = TASKS["spider"].load("train", str(tmp_path))
    assert isinstance(row, Rejected) and "not a database" in row.reason

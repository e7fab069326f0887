"""tasks.own_db: questions about one's own database are checked and split; the recipe it writes parses."""

import contextlib
import csv
import datetime
import json
import re
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from core.config import load_recipe
from envs import ENVIRONMENTS
from rewards import score
from tasks import TASKS, Rejected, guards
from tasks.own_db import constant, create, main, read_questions
from tasks.own_sources import snapshot
from tasks.own_split import cluster, split
from tasks.own_synth import propose
from tasks.schema_text import Notes
from tests.test_own_sources import CITIES, ORDERS, STATES, shop  # noqa: F401  (a fixture)

OWN = TASKS["own_db"]
BASE = Path(__file__).resolve().parents[1] / "recipes" / "demo.yaml"


def questions() -> list[dict]:
    out = [
        {"question": f"How many customers live in {c}?", "sql": f"SELECT count(*) FROM customers WHERE city = '{c}'"}
        for c in CITIES
    ]
    out += [
        {
            "question": f"What is the total amount of {s} orders?",
            "sql": f"SELECT sum(amount) FROM orders WHERE status = '{s}'",
        }
        for s in STATES
    ]
    return out + [
        {"question": "Which cities do people come from?", "sql": "SELECT DISTINCT city FROM customers"},
        {"question": "Who joined last?", "sql": "SELECT name FROM customers ORDER BY joined DESC LIMIT 1"},
        {"question": "Biggest payment ever made?", "sql": "SELECT max(amount) FROM orders"},
        {"question": "Average basket by state of delivery", "sql": "SELECT status, avg(amount) FROM orders GROUP BY status"},
        {"question": "Give me buyers without anything bought.", "sql": "SELECT name FROM customers WHERE customer_id NOT IN (SELECT customer_id FROM orders)"},
        {"question": "How much money is still unpaid?", "sql": "SELECT sum(amount) FROM orders WHERE paid = 0;"},
        {"question": "Number of parcels that came back", "answer": "27"},
        {"question": "Names of towns, please", "answer": '["Rome", "Oslo", "Lima"]'},
        {"question": "Broken?", "sql": "SELECT height FROM customers"},
        {"question": "Nothing there?", "sql": "SELECT name FROM customers WHERE city = 'Paris'"},
        {"question": "how many customers live in rome", "sql": "SELECT count(*) FROM customers WHERE city = 'Rome'"},
        {"question": "Unanswered?"},
    ]  # fmt: skip


def write_csv(path, items):
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, ["question", "sql", "answer"])
        writer.writeheader()
        writer.writerows(items)
    return path


@pytest.fixture
def made(shop, tmp_path):
    path = write_csv(tmp_path / "q.csv", questions())
    recipe, counts = create(str(shop), str(path), "shop", tmp_path / "raw", tmp_path / "own.yaml", BASE)
    return recipe, counts, tmp_path / "raw" / "shop"


def test_questions_are_checked_split_and_written(made):
    recipe, counts, folder = made
    assert counts["questions"] == 18 and counts["usable"] == 14 and counts["train"] + counts["eval"] == 14
    assert counts["rejected"] == {
        "gold fails": 1,
        "gold returns no rows": 1,
        "question repeated": 1,
        "neither sql nor answer": 1,
    }
    train, evaluation = (list(OWN.load(s, folder)) for s in ("train", "eval"))
    assert len(evaluation) == 3
    guards.check(OWN, train, evaluation)
    for family in ("How many customers live in", "What is the total amount of"):
        assert len({any(r["question"].startswith(family) for r in side) for side in (train, evaluation)}) == 2
    rejected = [json.loads(line) for line in (folder / "rejected.jsonl").read_text().splitlines()]
    assert [r["id"] for r in rejected] == ["15", "16", "17", "18"]
    assert load_recipe(recipe).data.roots == {"own_db": str(folder)} and load_recipe(recipe).run == "own-shop"


def test_rows_play_like_any_sql_task(made):
    env = ENVIRONMENTS["sql"]()
    rows = [r for s in ("train", "eval") for r in OWN.load(s, made[2])]
    assert "customer_id int REFERENCES customers(customer_id)" in rows[0]["prompt"][1]["content"]
    worked = 0
    for row in rows:
        if row["solution"]:
            assert score(row, OWN.trajectory(row, env))["exec_match"] == 1.0
            worked += 1
            continue
        with pytest.raises(Rejected, match="answer only") as caught:
            OWN.trajectory(row, env)
        assert caught.value.sft_only
    assert worked == 12


def test_an_answer_is_compared_by_execution(made):
    row = next(
        r for s in ("train", "eval") for r in OWN.load(s, made[2]) if r["question"].startswith("Number of parcels")
    )
    from tasks.base import call, result, say

    def play(sql):
        env = ENVIRONMENTS["sql"]()
        env.reset(**row)
        return [call("execute_sql", {"query": sql}), result("execute_sql", env.execute_sql(sql)), say("Done.")]

    right = "SELECT count(*) FROM orders WHERE status != 'back' AND paid IN (0, 1)"
    expected = sum(r[3] != "back" for r in ORDERS)
    row = row | {"gold": constant({"answer": str(expected)})}
    assert score(row, play(right))["exec_match"] == 1.0
    assert score(row, play("SELECT 1 + count(*) FROM orders"))["exec_match"] == 0.0
    assert all(v is None or 0 <= v <= 1 for v in score(row, play(right)).values())


@pytest.mark.parametrize(
    ("answer", "sql"),
    [
        ("42", "VALUES (42)"),
        ("-1.5", "VALUES (-1.5)"),
        ("01067", "VALUES ('01067')"),
        ("it's", "VALUES ('it''s')"),
        (["a", "b"], "VALUES ('a'), ('b')"),
        ('[["a", 1], ["b", null]]', "VALUES ('a', 1), ('b', NULL)"),
        (True, "VALUES (1)"),
    ],
)
def test_answers_as_queries(answer, sql, tmp_path):
    assert constant({"answer": answer}) == sql
    assert sqlite3.connect(":memory:").execute(sql).fetchall()


@pytest.mark.parametrize("answer", ["[]", [[1], [1, 2]], {"a": {}}])
def test_answers_that_are_no_table_are_rejected(answer):
    with pytest.raises(Rejected, match="answer is neither"):
        constant({"id": "1", "answer": [answer] if isinstance(answer, dict) else answer})


@pytest.mark.parametrize(
    ("name", "text", "error"),
    [
        ("q.csv", "frage,sql\na,b\n", "no column 'question'; found frage, sql"),
        ("q.csv", "question,note\na,b\n", "no column 'sql' or 'answer'; found question, note"),
        ("q.csv", "question,sql\n", "holds no question"),
        ("q.jsonl", '{"question": "a", "sq', "cannot be read as .jsonl"),
        ("none.csv", None, "no questions at"),
    ],
)
def test_question_files_that_cannot_be_read(tmp_path, name, text, error):
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises((FileNotFoundError, ValueError), match=error):
        read_questions(tmp_path / name)


def test_too_few_questions_say_what_to_do(shop, tmp_path):
    path = write_csv(tmp_path / "q.csv", questions()[:4] + questions()[14:15])
    with pytest.raises(ValueError, match=r"4 usable questions \(1 rejected.*--synthesise 200\n  5: gold fails"):
        create(str(shop), str(path), "shop", tmp_path / "raw", tmp_path / "r.yaml", BASE)
    assert not (tmp_path / "r.yaml").exists() and not list((tmp_path / "raw").iterdir())
    create(str(shop), str(path), "shop", tmp_path / "raw", tmp_path / "r.yaml", BASE, synthesise=30)
    train, evaluation = (list(OWN.load(s, tmp_path / "raw" / "shop")) for s in ("train", "eval"))
    assert len(evaluation) == 4 and all("synthetic" in r["id"] for r in train)  # one's own questions measure
    guards.check(OWN, train, evaluation)


def test_answers_alone_teach_no_tool_and_a_small_database_gets_a_recipe_that_runs(shop, tmp_path):
    words = "Apples Bridges Candles Doctors Engines Forests Gardens Hammers Islands Jackets Kettles Lanterns".split()
    answers = [{"question": f"{word} {word[::-1]} {'?' * n}", "answer": str(10**n)} for n, word in enumerate(words)]
    with pytest.raises(ValueError, match="0 training questions come with SQL, and SFT needs 5"):
        create(
            str(shop), str(write_csv(tmp_path / "a.csv", answers)), "shop", tmp_path / "raw", tmp_path / "r.yaml", BASE
        )
    path = write_csv(tmp_path / "q.csv", questions()[:20])
    large = BASE.with_name("spider-qwen2.5-coder-0.5b-24gb.yaml")
    create(str(shop), str(path), "shop", tmp_path / "raw", tmp_path / "r.yaml", large)
    recipe, count = load_recipe(tmp_path / "r.yaml"), len(list(OWN.load("train", tmp_path / "raw" / "shop")))
    config = recipe.grpo.config
    prompts = config["per_device_train_batch_size"] * config["gradient_accumulation_steps"] // config["num_generations"]
    assert recipe.data.val == 1 and 1 <= prompts <= count < 16


# ---- clusters --------------------------------------------------------------------------------------------------------


def test_quoted_names_are_not_values():
    """Tables with blanks in their names, as from CSV files, make unlike queries unlike."""
    tables = ("Customer List", "Parcels", "Staff")
    words = ("How many people buy?", "Count what was sent.", "Who works there, in numbers?")
    rows = [{"question": w, "gold": f'SELECT COUNT(*) FROM "{t}"'} for w, t in zip(words, tables, strict=True)]
    assert len(cluster(rows)) == 3
    same = [{"question": w, "gold": f'SELECT a FROM t WHERE c = "{t}"'} for w, t in zip(words, tables, strict=True)]
    assert len(cluster(same)) == 1


def test_children_are_counted_for_parents_without_any(shop):
    with contextlib.closing(sqlite3.connect(shop)) as db:
        db.execute("INSERT INTO customers (customer_id, name) VALUES (9999, 'Nobody')")
        db.commit()
        counts = [p for p in propose(shop, 200, 1, Notes()) if p["question"].startswith("How many orders does each")]
        assert counts and all(("Nobody", 0) in db.execute(p["gold"]).fetchall() for p in counts)


def test_near_duplicates_form_clusters():
    rows = [
        {"question": "How many customers live in Rome?", "gold": "SELECT 1 FROM a WHERE c = 'Rome'"},
        {"question": "How many customers live in 'New York'?", "gold": "SELECT 2 + x FROM b"},
        {"question": "Number of people, Oslo", "gold": "SELECT 1 FROM a WHERE c = 'Oslo'"},
        {"question": "Orders above 100 euro in 2020", "gold": ""},
        {"question": "Orders above 2,500.50 euro in 1999", "gold": ""},
        {"question": "住在罗马的客户有多少？", "gold": ""},
        {"question": "住在奥斯陆的客户有多少？", "gold": ""},
        {"question": "What is the mean age?", "gold": "SELECT avg(age) FROM a"},
    ]
    assert sorted(map(sorted, cluster(rows))) == [[0, 1, 2], [3, 4], [5, 6], [7]]


def test_pairs_are_those_of_the_plain_definition():
    """The index of rare words may miss nothing: compared with every pair."""
    import random

    from tasks.own_split import ALIKE, alike

    rng = random.Random(0)
    sets = [frozenset(rng.choices("abcdefghij", k=rng.randint(1, 8))) for _ in range(300)]
    plain = {(i, j) for i in range(300) for j in range(i) if len(sets[i] & sets[j]) >= ALIKE * len(sets[i] | sets[j])}
    assert {(max(p), min(p)) for p in alike(sets)} == plain and len(plain) > 100


def test_questions_of_one_kind_cannot_be_split():
    rows = [{"question": f"How many customers live in town {i}?", "gold": ""} for i in range(20)]
    with pytest.raises(ValueError, match="form 1 group of near-duplicates"):
        split(rows, 0.2, 1)


# ---- synthetic questions ---------------------------------------------------------------------------------------------


def test_synthetic_questions_are_sound_varied_and_repeatable(shop):
    pairs = propose(shop, 40, 1, Notes())
    assert len(pairs) == len({p["question"] for p in pairs}) == 40
    assert pairs == propose(shop, 40, 1, Notes())
    with contextlib.closing(sqlite3.connect(shop)) as db:
        for pair in pairs:
            rows = db.execute(pair["gold"]).fetchall()
            assert rows and all(v is not None for row in rows for v in row), pair
    text = " ".join(p["gold"] for p in pairs)
    for construct in ("JOIN", "GROUP BY", "NOT IN", "avg(", "WHERE"):
        assert construct in text
    amounts = re.compile(r"(?:sum|avg|min|max)\([^)]*customer_id")
    assert not any(amounts.search(p["gold"]) for p in pairs)  # keys are no quantities


def test_synthetic_only_is_possible_and_said(shop, tmp_path):
    recipe, counts = create(str(shop), None, "shop", tmp_path / "raw", tmp_path / "r.yaml", BASE, synthesise=40)
    assert counts["synthetic"] == 40 and counts["eval"] > 3 and counts["train"] > 20
    assert "evaluation questions are synthetic" in recipe.read_text()


def test_command_line(shop, tmp_path, monkeypatch, capsys):
    path = write_csv(tmp_path / "q.csv", questions())
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["own_db", "--own_db", str(shop), "--questions", str(path), "--base", str(BASE)])
    main()
    assert "step2_prepare_data.py --config recipes/own-shop.yaml" in capsys.readouterr().out
    assert load_recipe("recipes/own-shop.yaml").tasks == {"own_db": 1.0}
    monkeypatch.setattr(sys, "argv", ["own_db", "--own_db", "gone.sqlite", "--synthesise", "5", "--base", str(BASE)])
    with pytest.raises(SystemExit, match="1"):
        main()
    assert capsys.readouterr().err.startswith("error: no database at gone.sqlite")


def test_a_date_stays_readable(tmp_path):
    import duckdb

    with contextlib.closing(duckdb.connect(str(tmp_path / "d.duckdb"))) as db:
        db.execute("CREATE TABLE t (d DATE, t TIMESTAMP, l INTEGER[], h HUGEINT)")
        db.execute("INSERT INTO t VALUES (?, ?, [1, 2], 170141183460469231731687303715884105727)",
                   [datetime.date(2024, 1, 2), datetime.datetime(2024, 1, 2, 3, 4)])  # fmt: skip
    snapshot(str(tmp_path / "d.duckdb"), tmp_path / "c.sqlite")
    with contextlib.closing(sqlite3.connect(tmp_path / "c.sqlite")) as db:
        expected = ("2024-01-02", "2024-01-02 03:04:00", "[1, 2]", float(2**127))
        assert db.execute("SELECT * FROM t").fetchall() == [expected]


def test_tools_of_the_tasks(shop, tmp_path):
    """As a user types it, in a process of its own; nothing on stderr."""
    root = Path(__file__).resolve().parents[1]

    def call(*words):
        return subprocess.run(
            [sys.executable, "-m", "tasks", *words], cwd=root, capture_output=True, text=True, timeout=120
        )

    listed = call()
    assert not listed.stderr and {line.split()[0] for line in listed.stdout.splitlines()} == set(TASKS)
    exported = call("medical", "--root", str(tmp_path / "m"), "--export", str(tmp_path / "m.parquet"))
    assert not exported.stderr and "800 questions" in exported.stdout
    wrong = call("own_db")
    assert wrong.returncode == 2 and "usage: python -m tasks own_db" in wrong.stderr
    assert call("nothing").returncode == 1

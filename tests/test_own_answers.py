"""tasks.own_db: answers without SQL are run and compared, odd characters survive, and a failure replaces nothing."""

import json
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from envs import ENVIRONMENTS
from rewards import score
from tasks import TASKS, Rejected
from tasks.base import call, result, say
from tasks.own_db import check, constant, create, read_questions

OWN = TASKS["own_db"]
BASE = Path(__file__).resolve().parents[1] / "recipes" / "demo.yaml"
TOWNS = [("Berlin", "10115", 3_700_000), ("Dresden", "01067", 560_000), ("Potsdam", "14467", 180_000)]
ASKED = "Name Mayor River Bridge Museum Station Airport Harbour Castle Theatre Stadium Market".split()


@pytest.fixture
def towns(tmp_path):
    path = tmp_path / "towns.sqlite"
    with closing(sqlite3.connect(path)) as db, db:
        db.execute("CREATE TABLE town (name TEXT, zip TEXT, people INT)")
        db.executemany("INSERT INTO town VALUES (?, ?, ?)", TOWNS)
    return path


def questions(path: Path, *more: dict) -> str:
    """Twelve unlike questions with SQL, and more."""
    rows = [{"question": f"{w} {w[::-1]} {w * 2}?", "sql": f"SELECT people AS {w} FROM town"} for w in ASKED]
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in [*rows, *more]), encoding="utf-8")
    return str(path)


def build(source, path, tmp_path):
    return create(str(source), path, "towns", tmp_path / "raw", tmp_path / "towns.yaml", BASE)


def loaded(tmp_path) -> list[dict]:
    return [row for split in ("train", "eval") for row in OWN.load(split, tmp_path / "raw" / "towns")]


def earned(row: dict, sql: str) -> float:
    env = ENVIRONMENTS["sql"]()
    env.reset(**row)
    episode = [call("execute_sql", {"query": sql}), result("execute_sql", env.execute_sql(sql)), say("Done.")]
    scores = score(row, episode)
    assert scores["exec_match"] == scores["exec_match_strict"]
    return scores["exec_match"]


def test_an_answer_may_be_text_or_number_in_the_database(towns, tmp_path):
    """A .csv file cannot tell 10115 from '10115': the right query earns 1.0 either way, and a near one nothing."""
    (tmp_path / "q.csv").write_text(
        "question,answer\nPost code of Berlin?,10115\nOf Dresden?,01067\nIts people?,560000\n"
    )
    gold = [check(item, towns)["gold"] for item in read_questions(tmp_path / "q.csv")]
    assert gold == ["VALUES (10115)", "VALUES ('01067')", "VALUES (560000)"]
    row = next(r for r in _rows(towns, tmp_path) if r["question"] == "Which codes?")
    tries = [
        (gold[0], "SELECT zip FROM town WHERE name = 'Berlin'", 1.0),
        (gold[0], "SELECT zip FROM town WHERE name = 'Potsdam'", 0.0),
        (gold[0], "SELECT CAST(zip AS INT) FROM town WHERE name = 'Berlin'", 1.0),
        (gold[1], "SELECT zip FROM town WHERE name = 'Dresden'", 1.0),
        (gold[1], "SELECT CAST(zip AS INT) FROM town WHERE name = 'Dresden'", 0.0),  # 1067 is another text
        (gold[2], "SELECT people FROM town WHERE name = 'Dresden'", 1.0),
        (gold[2], "SELECT people * 1.0 FROM town WHERE name = 'Dresden'", 1.0),
        (row["gold"], "SELECT DISTINCT zip FROM town", 1.0),
        (row["gold"], "SELECT zip FROM town LIMIT 2", 0.0),
    ]
    for answer, sql, right in tries:
        assert earned(row | {"gold": answer}, sql) == right, (answer, sql)


def _rows(towns, tmp_path) -> list[dict]:
    item = {"question": "Which codes?", "answer": [10115, "01067", "14467"]}
    build(towns, questions(tmp_path / "rows.jsonl", item), tmp_path)
    return loaded(tmp_path)


def test_every_answer_is_run(towns, tmp_path):
    many = {"question": "Which numbers?", "answer": list(range(600))}
    assert check({"id": "1", **many}, towns)["gold"] == constant(many)
    with pytest.raises(Rejected, match="gold fails: the query is longer than 100000 characters"):
        check({"id": "2", "question": "All?", "answer": ["x" * 1000] * 120}, towns)
    path = questions(tmp_path / "q.jsonl", many, {"question": "Nul?", "answer": "a\0b"})
    _, counts = build(towns, path, tmp_path)
    assert counts["rejected"] == {"gold fails": 1}
    (row,) = [r for r in loaded(tmp_path) if r["question"] == "Which numbers?"]
    numbers = "WITH RECURSIVE n(i) AS (SELECT 0 UNION ALL SELECT i + 1 FROM n WHERE i < 599) SELECT i FROM n"
    assert earned(row, f"{numbers} WHERE EXISTS (SELECT 1 FROM town)") == 1.0


def test_line_breaks_of_unicode_are_no_line_breaks_of_a_file(towns, tmp_path):
    odd = [f"a{c}b" for c in "\u2028\u2029\u0085\x0b\x0c\x1c"]
    more = [{"question": f"What is {ord(c[1])}?", "sql": f"SELECT name || '{c}' FROM town"} for c in odd]
    more.append({"question": "Which marks?", "answer": odd})
    path = questions(tmp_path / "q.jsonl", *more)
    assert len(read_questions(Path(path))) == len(ASKED) + len(more)
    _, counts = build(towns, path, tmp_path)
    assert counts["usable"] == len(loaded(tmp_path)) == len(ASKED) + len(more)
    golds = {r["gold"] for r in loaded(tmp_path)}
    assert {m["sql"] for m in more[:-1]} | {constant(more[-1])} <= golds


@pytest.mark.parametrize("wrong", ["few questions", "answers only", "no recipe", "bad source"])
def test_a_failure_replaces_nothing(towns, tmp_path, wrong):
    build(towns, questions(tmp_path / "q.jsonl"), tmp_path)
    with closing(sqlite3.connect(towns)) as db, db:
        db.execute("INSERT INTO town VALUES ('Hamm', '59063', 180000)")
    before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    path = tmp_path / "other.jsonl"
    if wrong == "few questions":
        path.write_text('{"question": "One?", "sql": "SELECT 1 FROM town"}\n{"question": "Two?", "sql": "SELECT x"}')
    elif wrong == "answers only":
        path.write_text("".join(json.dumps({"question": f"{w} {w[::-1]}?", "answer": 1}) + "\n" for w in ASKED))
    else:
        questions(path)
    source, base = path if wrong == "bad source" else towns, tmp_path / "gone" if wrong == "no recipe" else BASE
    with pytest.raises((ValueError, FileNotFoundError)):
        create(str(source), str(path), "towns", tmp_path / "raw", tmp_path / "towns.yaml", base)
    path.unlink()
    assert {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()} == before

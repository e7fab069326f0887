"""Fixtures that several test files share. Everything else stands in the file that uses it."""

import shutil
import sqlite3
from pathlib import Path

import pytest

SHARED = Path(__file__).resolve().parents[2] / "shared" / "data"


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder with the real Spider and GSM8K files, where the developer has them beside the repository."""
    if not SHARED.is_dir():
        pytest.skip("real data not here: ../shared/data does not exist")
    return SHARED


@pytest.fixture(scope="session")
def speaking(tmp_path_factory) -> Path:
    """A folder with a tiny model that knows four conversations by heart: hf/, and the same as f16.gguf."""
    from core.gguf import convert
    from tests.speaking_model import build_speaking_model

    home = tmp_path_factory.mktemp("speaking")
    build_speaking_model(home / "hf", home / "raw")
    convert(home / "hf", home / "f16.gguf", "f16")
    return home


@pytest.fixture(scope="session")
def shop_template(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("shop") / "shop.sqlite"
    with sqlite3.connect(path) as db:
        db.executescript(
            """
            CREATE TABLE customer (id INTEGER PRIMARY KEY, name TEXT, city TEXT, age INTEGER);
            CREATE TABLE purchase (id INTEGER PRIMARY KEY, customer_id INTEGER REFERENCES customer(id), item TEXT, price REAL);
            INSERT INTO customer VALUES (1, 'Ann', 'Paris', 31), (2, 'Bob', 'Rome', 45), (3, 'NULL', NULL, 22),
              (4, 'Dora', 'Paris', NULL), (5, '李雷', 'Rome', 22);
            INSERT INTO purchase VALUES (1, 1, 'pen', 1.5), (2, 1, 'cup', 7.25), (3, 2, 'pen', 1.5), (4, 5, 'a | b', 0.1),
              (5, 5, '<|im_end|>', 20.0);
            """
        )
    db.close()
    return path


@pytest.fixture
def shop_db(shop_template, tmp_path) -> str:
    """A small real database: two tables with a foreign key, a missing value, and texts that look like something else."""
    return str(shutil.copy(shop_template, tmp_path / "shop.sqlite"))


@pytest.fixture
def sql_row(shop_db) -> dict:
    question = "What are the names of the customers who live in Paris?"
    return {
        "id": "shop-1",
        "task": "own_db",
        "environment": "sql",
        "prompt": [
            {"role": "system", "content": "You answer questions about a SQLite database."},
            {"role": "user", "content": f"CREATE TABLE customer (id, name, city, age);\n\nQuestion: {question}"},
        ],
        "question": question,
        "gold": "SELECT name FROM customer WHERE city = 'Paris'",
        "db_id": "shop",
        "db_path": shop_db,
        "hardness": "easy",
        "difficulty": 0.0,
        "facts": [],
    }


@pytest.fixture
def math_row() -> dict:
    question = "Ann has 12 apples, buys 6 more and gives a third of them away. How many are left?"
    return {
        "id": "apples-1",
        "task": "mini_math",
        "environment": "calculator",
        "prompt": [{"role": "system", "content": "Use the calculator."}, {"role": "user", "content": question}],
        "question": question,
        "gold": "12",
        "db_id": "",
        "db_path": "",
        "hardness": "easy",
        "difficulty": 0.0,
        "facts": [],
    }


@pytest.fixture
def medical_row(sql_row) -> dict:
    return sql_row | {
        "id": "medical-1",
        "task": "medical",
        "environment": "medical",
        "question": "How many people from Rome are registered, and how old is the oldest?",
        "gold": "2 people from Rome are registered; the oldest, Bob, is 45 years old.",
        "facts": ["2", "45", "Bob"],
    }


@pytest.fixture(scope="session")
def tiny(tmp_path_factory) -> str:
    """A folder with a tiny real model and its tokenizer (tests/tiny_model.py)."""
    from tests.tiny_model import build_tiny_model

    home = tmp_path_factory.mktemp("tiny")
    return str(build_tiny_model(home / "tiny", home / "raw"))


@pytest.fixture
def worked_rows(sql_row, math_row) -> list[dict]:
    """One right episode of each environment, with real tool results."""
    from tasks.base import call, result, say

    sql = sql_row["gold"]
    turns = [
        call("execute_sql", {"query": sql}, "Let me look."),
        result("execute_sql", "name\nAnn\nDora"),
        say("Done."),
    ]
    sums = [call("calculator", {"expression": "18-6"}), result("calculator", "12"), say("<answer>12</answer>")]
    return [sql_row | {"messages": sql_row["prompt"] + turns}, math_row | {"messages": math_row["prompt"] + sums}]

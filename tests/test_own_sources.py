"""tasks.own_sources: every kind of source becomes the same snapshot, or an error that says why not."""

import contextlib
import csv
import json
import os
import shutil
import socket
import sqlite3
import subprocess
import tempfile
from pathlib import Path

import pytest

from envs import ENVIRONMENTS
from tasks import TASKS
from tasks.own_db import create
from tasks.own_sources import infer_keys, snapshot

OWN = TASKS["own_db"]
BASE = Path(__file__).resolve().parents[1] / "recipes" / "demo.yaml"
SCHEMA = """
CREATE TABLE customers (customer_id INTEGER PRIMARY KEY, name TEXT, city TEXT, joined DATE);
CREATE TABLE orders (order_id INTEGER PRIMARY KEY, customer_id INTEGER REFERENCES customers(customer_id),
                     amount DECIMAL(8, 2), status TEXT, paid BOOLEAN);
"""
CITIES, STATES = ("Rome", "Oslo", "Lima"), ("open", "sent", "back")
CUSTOMERS = [(i, f"Customer {chr(65 + i)}", CITIES[i % 3], f"2020-01-{i + 1:02d}") for i in range(12)]
ORDERS = [(i, i * 7 % 10, 10.5 + i * i % 37, STATES[i * i % 3], i % 2) for i in range(40)]


def fill(db, mark="?"):
    for table, rows in (("customers", CUSTOMERS), ("orders", ORDERS)):
        for row in rows:
            db.execute(f"INSERT INTO {table} VALUES ({', '.join([mark] * len(row))})", row)


@pytest.fixture
def shop(tmp_path):
    path = tmp_path / "shop.sqlite"
    with contextlib.closing(sqlite3.connect(path)) as db, db:
        db.executescript(SCHEMA)
        fill(db)
    return path


def content(path):
    with contextlib.closing(sqlite3.connect(path)) as db:
        return (
            db.execute("SELECT customer_id, name, city, joined FROM customers ORDER BY 1").fetchall(),
            db.execute("SELECT order_id, customer_id, amount, status, paid FROM orders ORDER BY 1").fetchall(),
            [tuple(r[2:5]) for r in db.execute("PRAGMA foreign_key_list(orders)")],
        )


EXPECTED = (CUSTOMERS, ORDERS, [("customers", "customer_id", "customer_id")])


def test_sqlite_file(shop, tmp_path):
    assert snapshot(str(shop), tmp_path / "copy.sqlite") == "sqlite"
    assert content(tmp_path / "copy.sqlite") == EXPECTED


def test_sqlite_file_with_a_write_ahead_log(shop, tmp_path):
    writer = sqlite3.connect(shop)
    writer.execute("PRAGMA journal_mode = WAL")
    writer.execute("UPDATE customers SET city = 'Cairo' WHERE customer_id = 3")
    writer.commit()  # stands in the log only, while the connection is open
    snapshot(str(shop), tmp_path / "copy.sqlite")
    writer.close()
    assert content(tmp_path / "copy.sqlite")[0][3][2] == "Cairo"
    assert not list(tmp_path.glob("copy.sqlite-*"))


def test_duckdb_file(tmp_path):
    import duckdb

    with contextlib.closing(duckdb.connect(str(tmp_path / "shop.duckdb"))) as db:
        db.execute(SCHEMA)
        fill(db)
    assert snapshot(str(tmp_path / "shop.duckdb"), tmp_path / "copy.sqlite") == "duckdb"
    assert content(tmp_path / "copy.sqlite") == EXPECTED


def test_folder_of_csv_and_parquet(tmp_path):
    import pandas

    folder = tmp_path / "tables"
    folder.mkdir()
    with (folder / "customers.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("customer_id", "name", "city", "joined"), *CUSTOMERS])
    pandas.DataFrame(ORDERS, columns=["order_id", "customer_id", "amount", "status", "paid"]).to_parquet(
        folder / "orders.parquet"
    )
    snapshot(str(folder), tmp_path / "copy.sqlite")
    assert content(tmp_path / "copy.sqlite") == (*EXPECTED[:2], [])
    assert infer_keys(tmp_path / "copy.sqlite") == [("orders", "customer_id", "customers", "customer_id")]
    (folder / "customers.tsv").write_text("a\tb\n1\t2\n")
    with pytest.raises(ValueError, match="customers.tsv and customers.csv would both become the table customers"):
        snapshot(str(folder), tmp_path / "again.sqlite")
    assert not (tmp_path / "again.sqlite").exists() and not list(tmp_path.glob(".again*"))


def test_csv_rows_of_another_type_far_down(tmp_path):
    """DuckDB guesses the types from the first 20,000 rows; what cannot be read is an error that names file and line."""
    (tmp_path / "tables").mkdir()
    file = tmp_path / "tables" / "codes.csv"
    file.write_text("id,code\n" + "".join(f"{i},{i}\n" for i in range(60_000)) + "60000,abc\n")
    snapshot(str(file.parent), tmp_path / "copy.sqlite")
    with contextlib.closing(sqlite3.connect(tmp_path / "copy.sqlite")) as db:
        assert db.execute("SELECT * FROM codes WHERE id > 59998").fetchall() == [(59999, "59999"), (60000, "abc")]
    whole = file.read_bytes().removesuffix(b"60000,abc\n")
    for end, says in ((b"1,2,3\n", "Line: 60002.*Columns: 2 Found: 3"), (b"1,\xff\xfe\n", "Line: 60002.*not utf-8")):
        file.write_bytes(whole + end)
        with pytest.raises(ValueError, match=rf"codes.csv cannot be read: .*{says}.*; correct the file"):
            snapshot(str(file.parent), tmp_path / "again.sqlite")
    assert not (tmp_path / "again.sqlite").exists()


@pytest.fixture(scope="module")
def postgres():
    """A real PostgreSQL server of this test's own, on a socket in a temporary folder."""
    pytest.importorskip("psycopg", reason="psycopg is not installed")
    tools = {name: shutil.which(name) for name in ("initdb", "pg_ctl")}
    if not all(tools.values()):
        pytest.skip("no PostgreSQL server here (initdb, pg_ctl)")
    user = {}
    if os.getuid() == 0:  # the server refuses to run as root
        import pwd

        try:
            user = {"user": pwd.getpwnam("postgres").pw_name}
        except KeyError:
            pytest.skip("running as root and there is no user postgres to run the server as")
    folder = Path(tempfile.mkdtemp(prefix="pg"))
    folder.chmod(0o777)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    data = str(folder / "data")
    quiet = {"check": True, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "cwd": folder, **user}
    subprocess.run([tools["initdb"], "-D", data, "-U", "tester", "-A", "trust", "-E", "UTF8", "-N"], **quiet)
    options = f"-p {port} -k {folder} -h 127.0.0.1"
    subprocess.run([tools["pg_ctl"], "-D", data, "-o", options, "-l", str(folder / "log"), "-w", "start"], **quiet)
    try:
        yield f"postgresql://tester:secret@127.0.0.1:{port}/postgres"
    finally:
        subprocess.run([tools["pg_ctl"], "-D", data, "-m", "immediate", "stop"], **quiet)
        shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.slow
def test_postgresql_url(postgres, tmp_path):
    import psycopg

    with psycopg.connect(postgres, autocommit=True) as db:
        db.execute(SCHEMA.replace("INTEGER PRIMARY KEY", "SERIAL PRIMARY KEY"))
        for table, rows in (("customers", CUSTOMERS), ("orders", [(*r[:4], bool(r[4])) for r in ORDERS])):
            for row in rows:
                db.execute(f"INSERT INTO {table} VALUES ({', '.join(['%s'] * len(row))})", row)
        db.execute(
            "CREATE SCHEMA hr; CREATE TABLE hr.staff (id uuid DEFAULT gen_random_uuid(), tags jsonb, at timestamptz)"
        )
        db.execute("INSERT INTO hr.staff (tags, at) VALUES ('[1, \"a\"]', '2024-05-06 07:08:09+00')")
    assert snapshot(postgres, tmp_path / "copy.sqlite") == "postgres"
    assert content(tmp_path / "copy.sqlite") == EXPECTED
    with contextlib.closing(sqlite3.connect(tmp_path / "copy.sqlite")) as db:
        ((id_, tags, at),) = db.execute("SELECT * FROM hr_staff").fetchall()
    assert len(id_) == 36 and json.loads(tags) == [1, "a"] and at.startswith("2024-05-06")
    items = [{"question": "Names in capitals?", "sql": "SELECT upper(name) FROM customers WHERE city ILIKE 'ROME'"}]
    (tmp_path / "q.jsonl").write_text(json.dumps(items[0]))
    create(postgres, str(tmp_path / "q.jsonl"), "pg", tmp_path / "raw", tmp_path / "r.yaml", BASE, synthesise=40)
    (row,) = OWN.load("eval", tmp_path / "raw" / "pg")
    assert "ILIKE" not in row["gold"] and len(OWN.trajectory(row, ENVIRONMENTS["sql"]())) == 3
    with pytest.raises(ValueError, match=r"cannot connect to postgresql://...@127.0.0.1:1/x") as caught:
        snapshot("postgresql://me:secret@127.0.0.1:1/x", tmp_path / "no.sqlite")
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "text", "error"),
    [
        ("gone.sqlite", None, "no database at .*gone.sqlite; pass a SQLite or DuckDB file"),
        ("notes.txt", "hello", "is neither a SQLite nor a DuckDB file"),
        ("bad.sqlite", "SQLite format 3\0" + "x" * 200, "cannot be read as a SQLite database"),
        ("empty", "", "has no .csv, .tsv or .parquet file; it holds nothing"),
    ],
)
def test_sources_that_cannot_be_read(tmp_path, name, text, error):
    path = tmp_path / name
    if text:
        path.write_text(text)
    elif text == "":
        path.mkdir()
    with pytest.raises((FileNotFoundError, ValueError), match=error):
        snapshot(str(path), tmp_path / "copy.sqlite")
    assert not (tmp_path / "copy.sqlite").exists()

"""The execution judge over whole batches: hostile queries, killed workers, twins; its command; the official tool's verdicts."""

import json
import os
import random
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from envs import sqlite_worker
from rewards.exec_match import exec_match, exec_match_batch, forget, main
from tests.test_exec_match import CASES, FOREVER, ROOT, db  # noqa: F401  (a fixture)

HOSTILE = [
    FOREVER,
    "SELECT hex(zeroblob(4000000)) LIKE '%' || hex(zeroblob(2400)) || '1'",
    "SELECT count(*) FROM item a" + "".join(f", item b{i}" for i in range(20)),
    "SELECT length(printf('%.*c', 900000000, 'x'))",
    "SELECT sum(length(randomblob(9000000))) FROM item a, item b, item c, item d, item e",
]


@pytest.mark.slow
def test_a_hostile_batch_keeps_its_limit(db):
    rng = random.Random(1)
    hostile = [rng.random() < 0.15 for _ in range(512)]
    preds = [
        f"{rng.choice(HOSTILE)} -- {n}" if bad else f"SELECT count(*), {n} FROM item" for n, bad in enumerate(hostile)
    ]
    golds = [f"SELECT 4, {n} FROM item LIMIT 1" for n in range(512)]
    started = time.monotonic()
    verdicts = exec_match_batch(preds, golds, [db] * 512, timeout=4.0, batch_timeout=4.0, workers=2)
    assert time.monotonic() - started < 4.0 * 1.2
    assert all(verdict.correct is True for verdict, bad in zip(verdicts, hostile, strict=True) if not bad)
    assert not any(verdict.correct for verdict, bad in zip(verdicts, hostile, strict=True) if bad)


def test_what_a_batch_had_no_time_for_is_undecided(db):
    preds = [f"{FOREVER} -- {n}" for n in range(12)] + ["SELECT name FROM item"]
    started = time.monotonic()
    verdicts = exec_match_batch(
        preds, ["SELECT name FROM item"] * 13, [db] * 13, timeout=5.0, batch_timeout=0.6, workers=1
    )
    assert time.monotonic() - started < 1.2
    assert verdicts[-1].correct is True
    assert None in {verdict.correct for verdict in verdicts[:-1]} <= {False, None}


@pytest.mark.slow
def test_killed_workers_do_not_lose_the_batch(db):
    forget()
    sqlite_worker.stop_workers()
    preds = [f"SELECT count(*) FROM item a, item b, item c, item d, item e WHERE a.id < {n}" for n in range(3000)]
    golds = [f"SELECT count(*) FROM item b, item a, item c, item d, item e WHERE a.id < {n}" for n in range(3000)]
    stop, killed = threading.Event(), []

    def kill_children() -> None:
        while not stop.wait(0.3):
            children = Path(f"/proc/self/task/{main_thread}/children").read_text().split()
            if children:
                os.kill(int(random.choice(children)), signal.SIGKILL)
                killed.append(children)

    main_thread = threading.main_thread().native_id
    thread = threading.Thread(target=kill_children)
    thread.start()
    try:
        verdicts = exec_match_batch(preds, golds, [db] * 3000, batch_timeout=60.0, workers=2)
    finally:
        stop.set()
        thread.join()
    assert killed
    undecided = [v for v in verdicts if v.correct is None]
    assert all("were killed" in v.reason for v in undecided) and len(undecided) < 3
    assert sum(v.correct is True for v in verdicts) == 3000 - len(undecided)


def test_one_batch_over_several_databases_and_twins(db, tmp_path):
    copies = []
    for number in range(3):
        copy = tmp_path / f"{number}.sqlite"
        copy.write_bytes(Path(db).read_bytes())
        with sqlite3.connect(copy) as connection:
            connection.execute("INSERT INTO item(name) VALUES (?)", (f"new {number}",))
        connection.close()
        copies.append(str(copy))
    pred, gold = "SELECT name FROM item WHERE id = 5", "SELECT 'new 1' FROM item LIMIT 1"
    verdicts = exec_match_batch([pred] * 30, [gold] * 30, copies * 10)
    assert [verdict.correct for verdict in verdicts] == [False, True, False] * 10


def test_limits_are_monotonic(db):
    """A verdict that a short limit reaches is the one a long limit reaches."""
    pairs = [(pred, gold) for pred, gold, _, _ in CASES if pred]
    answers = {}
    for timeout in (0.5, 2.0, 10.0):
        forget()
        verdicts = exec_match_batch([p for p, _ in pairs], [g for _, g in pairs], [db] * len(pairs), timeout=timeout)
        answers[timeout] = [verdict.correct for verdict in verdicts]
    assert answers[0.5] == answers[2.0] == answers[10.0]


def test_verdicts_do_not_hang_on_how_they_are_asked(db):
    """Alone, in a batch, again from the cache: the same."""
    pairs = [(pred, gold) for pred, gold, _, _ in CASES]
    alone = [exec_match(pred, gold, db).correct for pred, gold in pairs]
    forget()
    for _ in range(2):
        batch = exec_match_batch([p for p, _ in pairs], [g for _, g in pairs], [db] * len(pairs), workers=2)
        assert [verdict.correct for verdict in batch] == alone


NAMES = st.sampled_from(["id", "name", "price", "stock", "kind"])


@st.composite
def queries(draw):
    columns = draw(st.lists(NAMES, min_size=1, max_size=3, unique=True))
    where = draw(
        st.sampled_from(
            ["", " WHERE stock > 0", " WHERE price >= 2", " WHERE kind = 'a'", " WHERE stock IS NULL", " WHERE id > 9"]
        )
    )
    distinct = draw(st.sampled_from(["", "DISTINCT "]))
    return columns, f"SELECT {distinct}{', '.join(columns)} FROM item{where}"


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(queries(), queries())
def test_properties_of_queries(db, one, other):
    (columns, left), (_, right) = one, other
    reverse = left.replace(", ".join(columns), ", ".join(columns[::-1]))
    preds = [left, reverse, f"{left} ORDER BY 1", left, right]
    golds = [left, left, left, right, left]
    same, turned, sorted_, there, back = exec_match_batch(preds, golds, [db] * 5, mode="strict")
    assert same.correct and sorted_.correct and there.correct is back.correct
    official = exec_match_batch(preds, golds, [db] * 5)
    assert official[1].correct is True and official[0].correct is True
    assert turned.correct is True or len(columns) > 1  # strict refuses where two columns cannot be told apart


# ---- the command ----


def test_command_line(db, tmp_path, capsys):
    pairs = tmp_path / "pairs.jsonl"
    rows = [
        {
            "db_id": "shop",
            "gold": "SELECT name FROM item",
            "pred": "SELECT DISTINCT name FROM item",
            "note": "kept\u2028",
        },
        {"db_id": "shop", "gold": "SELECT nope FROM item", "pred": "SELECT 1"},
        {"db_id": "shop", "gold": "SELECT id FROM item", "pred": ""},
        {"db_id": "absent", "gold": "SELECT 1", "pred": "SELECT 1"},
    ]
    pairs.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    out = tmp_path / "out.jsonl"
    root = str(Path(db).parent.parent)
    main(["--pairs", str(pairs), "--db_root", root, "--out", str(out), "--workers", "1"])
    summary = json.loads(capsys.readouterr().out.strip().split("\n")[-1])
    assert {k: summary[k] for k in ("pairs", "correct", "undecided")} == {"pairs": 4, "correct": 1, "undecided": 2}
    assert set(summary) == {"pairs", "correct", "undecided", "seconds", "pairs_per_s"}
    judged = [json.loads(line) for line in out.read_text(encoding="utf-8").split("\n") if line]
    assert [row["correct"] for row in judged] == [True, None, False, None]
    assert judged[0]["note"] == "kept\u2028" and all(row["reason"] for row in judged)
    assert sorted(os.listdir(tmp_path)) == ["db", "out.jsonl", "pairs.jsonl"]
    main(["--pairs", str(pairs), "--db_root", root, "--keep_distinct"])
    assert json.loads(capsys.readouterr().out.strip().split("\n")[-1])["correct"] == 0
    with pytest.raises(SystemExit, match="no such folder"):
        main(["--pairs", str(pairs), "--db_root", str(tmp_path / "nowhere")])
    pairs.write_text('{"db_id": "shop", "gold": "SELECT 1"}\n')
    with pytest.raises(SystemExit, match=r"pairs.jsonl:1: no pred in this row"):
        main(["--pairs", str(pairs), "--db_root", root])


def test_python_dash_m(db, tmp_path):
    pairs = tmp_path / "pairs.jsonl"
    pairs.write_text(json.dumps({"db_id": "shop", "gold": "SELECT id FROM item", "pred": "SELECT id FROM item"}) + "\n")
    command = [
        sys.executable,
        "-m",
        "rewards.exec_match",
        "--pairs",
        pairs,
        "--db_root",
        Path(db).parent.parent,
        "--mode",
        "strict",
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.strip().split("\n")[-1])["correct"] == 1


@pytest.mark.slow
@pytest.mark.parametrize("keep_distinct", [False, True])
def test_agreement_with_the_official_tool(keep_distinct, shared_data):
    """All 6,000 agree. "error:IndexError" is its crash on an empty prediction: wrong."""
    spider = shared_data / "spider"
    rows = [
        json.loads(line)
        for line in (spider / "exec_match_verdicts.jsonl").read_text(encoding="utf-8").split("\n")
        if line
    ]
    paths = [spider / "database" / row["db_id"] / f"{row['db_id']}.sqlite" for row in rows]
    verdicts = exec_match_batch(
        [row["pred"] for row in rows],
        [row["gold"] for row in rows],
        paths,
        keep_distinct=keep_distinct,
        batch_timeout=None,
    )
    key = "official_keep_distinct" if keep_distinct else "official"
    different = [
        (row, verdict) for row, verdict in zip(rows, verdicts, strict=True) if verdict.correct is not (row[key] == 1)
    ]
    assert not different, different[:3]


def test_works_where_many_files_are_open(db):
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 1400:
        pytest.skip(f"this machine allows {hard} open files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 1400), hard))
    code = (
        "import os, sys; held = [os.open(os.devnull, 0) for _ in range(1100)]; from envs.sqlite_exec import run_query; "
    )
    code += "print(run_query(sys.argv[1], 'SELECT 7').rows)"
    try:
        done = subprocess.run([sys.executable, "-c", code, db], capture_output=True, text=True, timeout=60)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert done.stdout == "[(7,)]\n", done.stderr

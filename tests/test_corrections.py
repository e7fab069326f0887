"""tasks.corrections: every slip is really wrong, shows it, and ends in the gold trajectory."""

import json
import os
import random
import sqlite3
import subprocess
import sys
from collections import Counter

import pytest

from envs import ENVIRONMENTS
from rewards import score
from rewards.exec_match import exec_match
from tasks import TASKS, Rejected
from tasks.corrections import SLIPS, is_wrong, slips

SPIDER = TASKS["spider"]


@pytest.fixture
def correction(sql_row):
    def make(gold, seed=0):
        row = sql_row | {"gold": gold}
        return row, SPIDER.correct(row, ENVIRONMENTS["sql"](), random.Random(seed))

    return make


def kinds_of(row) -> dict[str, list[str]]:
    out = {}
    for seed in range(6):
        for slip in slips(row, random.Random(seed)):
            out.setdefault(slip.kind, []).append(slip.sql)
    return out


def test_a_correction_is_wrong_call_real_outcome_thought_gold(correction):
    row, messages = correction("SELECT name FROM customer WHERE city = 'Paris'")
    wrong, outcome, right, found, final = messages
    assert wrong["train"] is False and "train" not in right and "train" not in final
    bad = wrong["tool_calls"][0]["function"]["arguments"]["query"]
    assert exec_match(bad, row["gold"], row["db_path"]).correct is False
    env = ENVIRONMENTS["sql"]()
    env.reset(**row)
    assert outcome["content"] == env.execute_sql(bad)
    assert right["content"] and right["tool_calls"][0]["function"]["arguments"]["query"] == row["gold"]
    assert found["content"] == "name\nAnn\nDora\n(2 rows)"
    assert score(row, messages)["exec_match"] == 1.0


def test_the_same_seed_gives_the_same_correction(correction):
    gold = "SELECT T1.name FROM customer AS T1 JOIN purchase AS T2 ON T1.id = T2.customer_id WHERE T2.item = 'pen'"
    texts = [str(correction(gold, seed)[1]) for seed in range(8)]
    assert texts == [str(correction(gold, seed)[1]) for seed in range(8)] and len(set(texts)) > 3


def test_every_kind_is_made_and_its_outcome_shows_it(sql_row):
    golds = (
        "SELECT DISTINCT T1.name FROM customer AS T1 JOIN purchase AS T2 ON T1.id = T2.customer_id WHERE T2.item = 'pen'",
        "SELECT city, count(*) FROM customer GROUP BY city",
        "SELECT DISTINCT item FROM purchase",
    )
    env, seen = ENVIRONMENTS["sql"](max_turns=1), set()
    for gold in golds:
        row = sql_row | {"gold": gold}
        for seed in range(5):
            for slip in slips(row, random.Random(seed)):
                env.reset(**row)
                answer = env.execute_sql(slip.sql)
                if slip.sign(answer) and is_wrong(slip.sql, row, slip.kind):
                    seen.add(slip.kind)
                    if slip.kind in (
                        "wrong table",
                        "wrong column",
                        "wrong table name",
                        "missing join",
                        "syntax",
                        "ambiguous column",
                    ):
                        assert answer.startswith("Error")
    assert seen == set(SLIPS)


def test_a_slip_that_happens_to_be_right_is_skipped(sql_row, tmp_path):
    """One group only: without GROUP BY the result is the same, so it is no mistake."""
    path = tmp_path / "one.sqlite"
    with sqlite3.connect(path) as db:
        db.executescript("CREATE TABLE t (a TEXT); INSERT INTO t VALUES ('x'), ('x');")
    db.close()
    row = sql_row | {"gold": "SELECT a, count(*) FROM t GROUP BY a", "db_path": str(path)}
    found = kinds_of(row)["group by"]
    assert found and not any(is_wrong(sql, row, "group by") for sql in found)


def test_what_cannot_be_read_or_does_not_run_gives_no_correction(sql_row):
    assert not list(slips(sql_row | {"gold": "SELECT FROM ("}, random.Random(0)))
    with pytest.raises(Rejected, match="gold fails"):
        SPIDER.correct(sql_row | {"gold": "SELECT height FROM customer"}, ENVIRONMENTS["sql"](), random.Random(0))


def test_the_same_seed_makes_the_same_mistakes_in_every_process(sql_row):
    program = (
        "import json, random, sys\nfrom tasks.corrections import slips\n"
        "print([slip.sql for slip in slips(json.loads(sys.argv[1]), random.Random(0))])"
    )
    row = sql_row | {"gold": "SELECT name FROM customer WHERE city = 'New York' OR city = 'Paris'"}
    words, found = [sys.executable, "-c", program, json.dumps(row)], set()
    for hashes in "123":
        env = os.environ | {"PYTHONHASHSEED": hashes, "PYTHONPATH": "."}
        found.add(subprocess.run(words, env=env, capture_output=True, text=True, check=True).stdout)
    assert len(found) == 1 and "SELECT" in found.pop()


@pytest.mark.slow
def test_corrections_of_real_rows(shared_data):
    env, made, kinds = ENVIRONMENTS["sql"](max_turns=3), 0, Counter()
    rng = random.Random(42)
    rows = [r for r in SPIDER.load("train", shared_data / "spider", limit=300) if not isinstance(r, Rejected)]
    for row in rows:
        messages = SPIDER.correct(row, env, rng)
        if messages is None:
            continue
        made += 1
        bad = messages[0]["tool_calls"][0]["function"]["arguments"]["query"]
        kinds["Error" if messages[1]["content"].startswith("Error") else "result"] += 1
        strict = exec_match(bad, row["gold"], row["db_path"], mode="strict")
        assert strict.correct is False and messages[2]["content"]
    assert made >= 0.95 * len(rows) and min(kinds.values()) > 20

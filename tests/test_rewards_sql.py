"""Rewards of the SQL tasks: what is read as the answer, what each dimension pays, and that being right dominates."""

import json
import random
import time
from pathlib import Path

import pytest

import rewards
from envs import SQLEnv
from rewards import REWARDS, WEIGHTS, score, score_batch, total
from rewards.sql import final_sql, runs

GOLD = "SELECT name FROM customer WHERE city = 'Paris'"
ALIAS = "SELECT c.name FROM customer AS c WHERE c.city = 'Paris'"


def call(query, content: str = "", tool: str = "execute_sql", **more) -> dict:
    function = {"name": tool, "arguments": {"query": query, **more}}
    return {"role": "assistant", "content": content, "tool_calls": [{"type": "function", "function": function}]}


def result(content: str) -> dict:
    return {"role": "tool", "name": "execute_sql", "content": content}


def say(content, **more) -> dict:
    return {"role": "assistant", "content": content, **more}


def play(row: dict, *queries: str, final: str | None = "The query above answers the question.") -> list[dict]:
    env, out = SQLEnv(max_turns=20), []
    env.reset(**row)
    for query in queries:
        out += [call(query), result(env.execute_sql(query))]
    return out if final is None else [*out, say(final)]


@pytest.mark.parametrize(
    "completion, sql",
    [
        ([call("SELECT 1"), result("1"), say("Done.")], "SELECT 1"),
        ([call("SELECT 1"), result("1"), call("SELECT 2"), result("2"), say("Done.")], "SELECT 2"),
        ([call("SELECT 1"), result("1"), say("Better:\n```sql\nSELECT 3\n```")], "SELECT 3"),
        ([say("```sql\nSELECT 3\n```\nno:\n```SQL\nSELECT 4;\n```")], "SELECT 4;"),
        ([say("```sqlite\nSELECT 3\n```")], "SELECT 3"),
        ([say("```sql SELECT 3```")], "SELECT 3"),
        ([call("SELECT 1"), result("1"), say("```sql\nSELECT 3")], "SELECT 1"),  # the block is not closed
        ([call("SELECT 1"), result("1"), say("```python\nSELECT 3\n```")], "SELECT 1"),
        ([call("SELECT 1"), result("1"), say("<think>```sql\nSELECT 3\n```</think>ok")], "SELECT 1"),
        ([say("<think>```sql\nSELECT 3\n```")], ""),
        ([say("", reasoning_content="```sql\nSELECT 3\n```")], ""),
        ([say("```sql\nSELECT 3\n```"), call("SELECT 1"), result("1")], "SELECT 1"),  # no final message
        ([say("```sql\nSELECT 3\n```"), say("Done.")], ""),
        ([call("SELECT 1", content="```sql\nSELECT 3\n```")], "SELECT 1"),  # a message with a call is not final
        ([call("SELECT 1"), {"role": "tool", "content": "```sql\nSELECT 3\n```"}], "SELECT 1"),
        ([call("SELECT 1"), result("1"), call("SELECT 2", tool="python"), result("?"), say("x")], "SELECT 1"),
        ([call("SELECT 1"), result("1"), call("SELECT 2", limit=3), result("?"), say("x")], "SELECT 1"),
        ([call("SELECT 1"), result("1"), call(7), result("?"), say("x")], "SELECT 1"),
        ([say("SELECT 3")], ""),
        ([say(None)], ""),
        ([{"role": "assistant"}], ""),
        ([], ""),
    ],
)
def test_final_sql(completion, sql):
    assert final_sql(completion) == sql


def test_arguments_may_come_as_json_text():
    message = call("x")
    message["tool_calls"][0]["function"]["arguments"] = json.dumps({"query": "SELECT 5"})
    assert final_sql([message]) == "SELECT 5"


def test_a_right_answer_earns_everything(sql_row):
    for query in (GOLD, ALIAS):
        assert score(sql_row, play(sql_row, query)) == {
            "exec_match": 1.0,
            "exec_match_strict": 1.0,
            "executes": 1.0,
            "schema_linking": 1.0,
            "sql_format": 1.0,
            "turn_economy": 1.0,
        }


@pytest.mark.parametrize(
    "query, executes, linking",
    [
        ("SELECT name FROM customer WHERE city = 'Rome'", 1.0, 1.0),
        ("SELECT name FROM customer", 1.0, 0.8),
        ("SELECT count(*) FROM customer", 1.0, 0.5),
        ("SELECT item FROM purchase", 1.0, 0.0),
        ("SELECT nam FROM customer WHERE city = 'Paris'", 0.0, 0.8),
        ("SELECT 1", 0.0, 0.0),
        ("SELECT name FROM (SELECT name, city FROM customer) WHERE 0", 1.0, 1.0),
        ('SELECT name FROM customer WHERE city = "Rome"', 1.0, 1.0),  # SQLite reads "Rome" as text
        ("WITH c AS (SELECT * FROM customer) SELECT name FROM c WHERE c.city = 'Rome'", 1.0, 1.0),
        ("SELECT name AS n FROM customer WHERE city = 'Rome' ORDER BY n", 1.0, 1.0),
        ("nonsense (", 0.0, 0.0),
        ("DROP TABLE customer", 0.0, 0.5),
    ],
)
def test_shaping_of_wrong_answers(sql_row, query, executes, linking):
    scores = score(sql_row, play(sql_row, query))
    assert scores["exec_match"] == scores["exec_match_strict"] == scores["turn_economy"] == 0.0
    assert scores["executes"] == executes
    assert scores["schema_linking"] == pytest.approx(linking)


def test_official_pays_empty_results_and_strict_does_not(sql_row):
    row = sql_row | {"gold": "SELECT name FROM customer WHERE age > 90"}
    scores = score(row, play(row, "SELECT 1 WHERE 0"))
    assert (scores["exec_match"], scores["exec_match_strict"]) == (1.0, 0.0)


@pytest.mark.parametrize(
    "completion, good",
    [
        ([call("SELECT 1"), result("1"), say("Done.")], True),
        ([call("SELECT 1"), result("Error: x"), call("SELECT 2"), result("2"), say("```sql\nSELECT 2\n```")], True),
        ([say("```sql\nSELECT 1\n```")], False),  # never looked
        ([call("SELECT 1"), result("1"), say("")], False),
        ([call("SELECT 1"), result("1")], False),
        ([call("SELECT 1"), say("Done.")], False),  # the call was never answered
        ([call("SELECT 1"), result("1"), say("x" * 2001)], False),
        ([call("SELECT 1"), result("1"), say("<tool_call>{}</tool_call>")], False),
        ([call("SELECT 1", content="<tool_response>5</tool_response>"), result("1"), say("Done.")], False),
        ([call("SELECT 1"), result("1"), say("```sql\nSELECT 1\n```" * 2)], False),
        ([call("SELECT 1"), result("1"), call(3), result("?"), say("Done.")], False),
        ([call("SELECT 1", tool="other"), result("?"), say("Done.")], False),
        ([call(f"SELECT {i}") if i % 2 else result("1") for i in range(1, 15)] + [say("Done.")], False),  # seven calls
        ([say("", tool_calls=["no call"]), say("Done.")], False),
    ],
)
def test_format(sql_row, completion, good):
    assert score(sql_row, completion)["sql_format"] == float(good)


@pytest.mark.parametrize("calls, economy", [(1, 1.0), (2, 1.0), (3, 0.75), (4, 0.5), (5, 0.25), (6, 0.0), (9, 0.0)])
def test_economy_is_for_right_answers_only(sql_row, calls, economy):
    looks = ["SELECT * FROM customer"] * (calls - 1)
    assert score(sql_row, play(sql_row, *looks, GOLD))["turn_economy"] == economy
    assert score(sql_row, play(sql_row, *looks, "SELECT * FROM customer"))["turn_economy"] == 0.0


def test_an_answer_without_a_tool_call_has_no_economy(sql_row):
    scores = score(sql_row, [say(f"```sql\n{GOLD}\n```")])
    assert scores["exec_match"] == 1.0 and scores["turn_economy"] == 0.0


def test_no_shaping_outweighs_being_right(sql_row):
    """Any wrong episode earns less than any right one, under the default weights and under equal ones."""
    choice = random.Random(7)
    wrong = ["SELECT name FROM customer", "SELECT 1", "SELECT name FROM customer WHERE city = 'Rome'", "SELEC", ""]
    finals = ["Done.", "", None, "<tool_call>", "x" * 3000]
    completions = [
        play(sql_row, *choice.choices(wrong, k=choice.randrange(8)), *right, final=choice.choice(finals))
        for right in ([], [GOLD], [ALIAS])
        for _ in range(60)
    ]
    scores = score_batch([sql_row] * len(completions), completions)
    right = [total(s, "sql") for s in scores if s["exec_match"] == 1.0]
    missed = [total(s, "sql") for s in scores if s["exec_match"] == 0.0]
    assert len(right) >= 120 and len(missed) >= 50
    assert max(missed) <= 0.3 < 1.0 <= min(right)


def test_undecided_is_none_not_zero(sql_row):
    broken_gold = sql_row | {"gold": "SELECT nothing FROM nowhere"}
    scores = score(broken_gold, play(sql_row, GOLD))
    assert scores["exec_match"] is None and scores["exec_match_strict"] is None and scores["turn_economy"] is None
    assert scores["executes"] == 1.0
    lost = sql_row | {"db_path": "nowhere.sqlite"}
    scores = score(lost, play(sql_row, GOLD))
    assert [scores[n] for n in ("exec_match", "executes", "schema_linking", "turn_economy")] == [None] * 4


def test_rows_of_other_environments_get_none(sql_row, math_row):
    rows, completions = [sql_row, math_row], [play(sql_row, GOLD), [say("<answer>12</answer>")]]
    columns = {key: [row[key] for row in rows] for key in sql_row}
    for name, function in REWARDS.items():
        values = function(completions=completions, **columns, prompts=[], trainer_state=None)
        assert len(values) == 2
        assert (values[0] is None) == (name not in WEIGHTS["sql"] and name != "exec_match_strict")
        assert (values[1] is None) == (name not in WEIGHTS["calculator"])


def test_every_weight_names_a_reward_and_every_environment_has_a_primary_one():
    assert all(name in REWARDS for weights in WEIGHTS.values() for name in weights)
    assert set(WEIGHTS) == set(rewards.PRIMARY) == set(rewards.BY_ENVIRONMENT)
    for kind, weights in WEIGHTS.items():
        assert weights[rewards.PRIMARY[kind]] == max(weights.values())


def test_an_unknown_environment_is_an_error(sql_row):
    with pytest.raises(ValueError, match="environment chess: known are sql, calculator, medical"):
        score(sql_row | {"environment": "chess"}, [])


HOSTILE = {
    "nested": "SELECT " + "(" * 50_000,
    "cases": "SELECT " + "CASE WHEN 1 THEN " * 2000,
    "long": "SELECT name FROM customer WHERE " + "id = 1 OR " * 20_000 + "1",
    "nots": "SELECT " + "NOT " * 990 + "1",
    "unions": " UNION ALL ".join(["SELECT name FROM customer"] * 150),
    "joins": "SELECT * FROM customer " + "JOIN customer " * 250,  # exponential in sqlglot's parser
    "quotes": "'" * 3999,
    "brackets": "[" * 3999,
    "comments": "/*" * 1999,
    "nul": "SELECT '\x00' FROM customer",
    "surrogate": "SELECT '\ud800' FROM customer",
    "json path": "SELECT name -> '$[[[[' FROM customer",
    "templates": "SELECT {{ name }} FROM customer",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_queries_cost_little(sql_row, name):
    completion = [call(HOSTILE[name]), result("?"), say("Done.")]
    score(sql_row, completion)  # the workers and the parser are loaded once
    hostile = [call(HOSTILE[name] + " "), result("?"), say("Done.")]
    started = time.perf_counter()
    scores = score(sql_row, hostile)
    assert time.perf_counter() - started < 2
    assert scores["exec_match"] == 0.0


@pytest.mark.parametrize(
    "name", ["locked", "malformed", '"disk I/O"', '"not a database"', '"unable to open"', '"out of memory"']
)
def test_an_error_text_cannot_be_chosen_to_escape_the_verdict(sql_row, name):
    """`SELECT x.locked` is told "no such column: x.locked": wrong, and not a broken database, which would be undecided."""
    for query in (
        f"SELECT customer.{name} FROM customer",
        f"SELECT name FROM {name}",
        f"SELECT {name}(1) FROM customer",
    ):
        scores = score(sql_row, play(sql_row, query))
        assert (scores["exec_match"], scores["exec_match_strict"], scores["executes"]) == (0.0, 0.0, 0.0), query


@pytest.mark.slow
def test_a_batch_of_endless_queries_is_bounded(sql_row):
    endless = "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + {} FROM c) SELECT sum(x), name FROM c, customer"
    completions = [[call(endless.format(i)), result("?"), say("Done.")] for i in range(1, 17)] + [play(sql_row, GOLD)]
    started = time.perf_counter()
    columns = {key: [sql_row[key]] * len(completions) for key in sql_row}
    matches = REWARDS["exec_match"](completions=completions, **columns)
    first = time.perf_counter() - started
    REWARDS["executes"](completions=completions, **columns)
    assert first < 14 and time.perf_counter() - started < 28
    assert matches[-1] == 1.0 and not any(matches[:-1])


def test_real_gold_earns_everything(shared_data):
    """200 real rows: gold played through the environment is right in every dimension."""
    root = shared_data / "spider"
    items = json.loads((root / "dev.json").read_text(encoding="utf-8"))
    rows = []
    for i, item in enumerate(random.Random(3).sample(items, 200)):
        path = root / "database" / item["db_id"] / f"{item['db_id']}.sqlite"
        rows.append(
            {
                "id": str(i),
                "environment": "sql",
                "gold": item["query"],
                "db_path": str(path),
                "question": item["question"],
            }
        )
    scores = score_batch(rows, [play(row, row["gold"]) for row in rows])
    assert [s["exec_match"] for s in scores] == [1.0] * len(rows)
    low = [(r["gold"], s) for r, s in zip(rows, scores, strict=True) if total(s, "sql") < 1.35 - 1e-9]
    assert not low


def test_what_failed_beside_the_policy_is_undecided(sql_row):
    """The database is away while the episode is played and there again when it is judged."""
    from core.config import Agent
    from core.rollout import Episode

    lock = Path(sql_row["db_path"] + "-wal")
    lock.write_bytes(b"x")
    episode = Episode(sql_row, SQLEnv(), None, Agent())
    (told,) = episode.accept_message(call(GOLD))
    lock.unlink()
    assert "not available" in told["content"] and str(lock) not in told["content"]
    assert "is not empty" in episode.error
    assert not Episode(sql_row, episode.env, None, Agent()).error  # the next one starts anew


def test_a_query_cut_by_the_batchs_time_is_undecided(sql_row):
    slow = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n LIMIT 9000000) SELECT count(*), name FROM n, customer"
    assert runs(sql_row["db_path"], slow, time.monotonic() + 0.2) is None
    assert runs(sql_row["db_path"], GOLD, time.monotonic() + 5) == 1.0


def test_an_answer_without_its_query_is_found_and_not_repeated(sql_row):
    row = sql_row | {"gold": "SELECT 2"}
    count = "SELECT count(*) FROM customer WHERE city = 'Paris'"
    for query, strict in ((count, 1.0), ("SELECT 2", 0.0), ("SELECT 1 + 1", 0.0)):
        found = score(row, play(row, query))
        assert found["exec_match"] == 1.0 and found["exec_match_strict"] == strict, query

"""tasks.guards: each guard is violated on purpose, and holds on the real data."""

import pytest

from envs import ENVIRONMENTS
from tasks import TASKS, Rejected, guards
from tasks.guards import LeakError

SPIDER, GSM8K = TASKS["spider"], TASKS["gsm8k"]


def other(row, **changes):
    return row | {"id": "other", "question": "Something else?"} | changes


def test_shared_database_is_found(sql_row):
    with pytest.raises(LeakError, match="databases in train and in eval: 1 rows\n  other: shop") as caught:
        guards.check(SPIDER, [other(sql_row)], [sql_row])
    assert [r["id"] for r in caught.value.rows] == ["other"]
    guards.check(SPIDER, [other(sql_row, db_id="club")], [sql_row])


def test_one_database_is_fine_for_a_task_of_one_database(sql_row):
    own = TASKS["gsm8k"]
    assert not own.unseen_databases
    guards.check(own, [other(sql_row)], [sql_row])


@pytest.mark.parametrize(
    "variant",
    [
        "what are the NAMES of the customers, who live in paris",
        "  What are the names of\nthe customers who live in Paris ?",
        "Ｗhat are the names of the customers who live in Paris？",
    ],
)
def test_shared_question_is_found_whatever_its_spelling(sql_row, variant):
    with pytest.raises(LeakError, match="questions in train and in eval: 1 rows\n  other asks what shop-1 asks"):
        guards.check(SPIDER, [other(sql_row, question=variant, db_id="club")], [sql_row])


@pytest.mark.parametrize(
    "shown",
    ["SELECT name FROM customer WHERE city = 'Paris'", 'hint: select NAME from customer\nwhere city="Paris";'],
)
def test_gold_in_the_prompt_is_found(sql_row, shown):
    system, user = sql_row["prompt"]
    for prompt in (
        [system, user | {"content": f"{user['content']}\n{shown}"}],
        [{"role": "system", "content": shown}, user],
    ):
        row = other(sql_row, prompt=prompt, db_id="club")
        with pytest.raises(LeakError, match="gold stands in what the model reads before it answers: 1 rows\n  other: "):
            guards.check(SPIDER, [row], [])
        with pytest.raises(LeakError):
            guards.check(SPIDER, [], [row])


def test_gold_in_a_tool_result_before_the_answer_is_found(sql_row):
    gold = sql_row["gold"]
    call = {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": {"name": "execute_sql", "arguments": {"query": "SELECT 1"}}}],
    }
    right = {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": {"name": "execute_sql", "arguments": {"query": gold}}}],
    }
    leak = {"role": "tool", "name": "execute_sql", "content": f"Error: expected {gold}"}
    clean = leak | {"content": "Error: no such column: x"}
    done = {"role": "assistant", "content": "Done."}
    with pytest.raises(LeakError, match="tool: ...select name"):
        guards.check(SPIDER, [sql_row | {"messages": sql_row["prompt"] + [call, leak, right, clean, done]}], [])
    guards.check(SPIDER, [sql_row | {"messages": sql_row["prompt"] + [call, clean, right, leak, done]}], [])


@pytest.mark.parametrize("shown", ["<answer>12</answer>", "#### 12", "So the answer is 12."])
def test_gold_of_maths_is_its_form_not_its_number(math_row, shown):
    guards.check(GSM8K, [math_row], [])  # the question says 12, which happens to be gold
    row = math_row | {"prompt": [{"role": "system", "content": shown}, math_row["prompt"][1]]}
    with pytest.raises(LeakError):
        guards.check(GSM8K, [row], [])


def test_reference_answer_of_medical_is_found(medical_row):
    guards.check(GSM8K, [medical_row], [])
    row = medical_row | {"prompt": [{"role": "user", "content": f"Say: {medical_row['gold']}"}]}
    with pytest.raises(LeakError):
        guards.check(GSM8K, [row], [])


def test_separate_makes_train_give_way_and_names_the_reason(sql_row):
    leaky = [sql_row["prompt"][0] | {"content": sql_row["gold"]}]
    train = [
        other(sql_row, id="same database"),
        other(sql_row, id="same question", db_id="club", question=sql_row["question"].upper()),
        other(sql_row, id="kept", db_id="club", question="Kept?"),
        other(sql_row, id="repeated", db_id="club", question="kept"),
        other(sql_row, id="shows gold", db_id="club", question="Gold?", prompt=leaky),
        other(sql_row, id="same words, other database", db_id="pub", question="Kept?"),
    ]
    kept, evaluation, rejected = guards.separate(SPIDER, train, [sql_row, other(sql_row, prompt=leaky, db_id="bar")])
    assert [r["id"] for r in kept] == ["kept", "same words, other database"] and evaluation == [sql_row]
    assert [r.reason for r in rejected] == [
        "database also in eval",
        "question also in eval",
        "question repeated",
        "gold stands in the prompt",
        "gold stands in the prompt",
    ]
    guards.check(SPIDER, kept, evaluation)


def real(task, folder, **options):
    rows = {s: [r for r in task.load(s, folder, **options) if not isinstance(r, Rejected)] for s in ("train", "eval")}
    return rows["train"], rows["eval"]


@pytest.mark.slow
def test_real_spider(shared_data):
    train, evaluation = real(SPIDER, shared_data / "spider")
    with pytest.raises(LeakError, match="spider-train-\\d+ asks what spider-dev-\\d+ asks: How many employees"):
        guards.check(SPIDER, train, evaluation)  # the published split has one; separate() takes it out
    train, evaluation, rejected = guards.separate(SPIDER, train, evaluation)
    assert sorted(r.reason for r in rejected) == ["question also in eval"] + ["question repeated"] * 10
    assert (len(train), len(evaluation)) == (6697, 489)
    env = ENVIRONMENTS["sql"](max_turns=3)
    with_messages = [r | {"messages": r["prompt"] + SPIDER.trajectory(r, env)} for r in train[:300]]
    guards.check(SPIDER, with_messages + train[300:], evaluation)


def test_real_gsm8k(shared_data):
    train, evaluation = real(GSM8K, shared_data / "gsm8k")
    guards.check(GSM8K, train, evaluation)
    assert guards.separate(GSM8K, train, evaluation)[2] == []

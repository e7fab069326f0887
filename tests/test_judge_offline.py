"""Free-text answers without a judge at hand: the offline rule, and what the medical rewards make of both."""

import pytest

import rewards
from envs import MedicalEnv
from rewards import judge as judge_module
from rewards import score, total
from rewards.facts import Case, offline_scores
from rewards.judge import JudgeConfig, config_from_environment
from rewards.medical import copied
from tests.test_judge import CASE, server  # noqa: F401  (a fixture)


@pytest.mark.parametrize(
    "answer, low, high",
    [
        (CASE.answer, 0.99, 1),
        ("Two facts: 2 registered; 45; Bob.", 0.99, 1),
        ("45 years (Bob); 2 people", 0.99, 1),
        ("2 people.", 0.5, 0.9),  # part of the answer
        ("3 people from Rome are registered, the oldest is Bob, aged 46.", 0, 0.2),
        ("The oldest is Bob.", 0, 0.2),
        ("Registered people from Rome, and how old is the oldest?", 0, 0),  # the question again
        ("I do not know.", 0, 0),
        (" ".join(map(str, range(100))) + " Bob", 0, 0.1),
        ("2, 3, 4, 45, 46, 47, Bob, Ann, Eve", 0, 0.5),
        ("2 45 Bob " + "and so on " * 500, 0, 0.2),
    ],
)
def test_offline_scores(answer, low, high):
    value = offline_scores(Case(CASE.question, CASE.reference, CASE.facts, answer)).overall
    assert low <= value <= high


def test_naming_everything_is_no_answer():
    names = "Aventis Bayer Cipla Daiichi Eisai Fresenius".split()
    case = Case("Which manufacturer makes Doloxan?", "Doloxan is made by Cipla.", ("Cipla",), "")
    for text, right in (("Cipla.", True), ("Yes, according to the table, Cipla makes it.", True),
                        (", ".join(names), False), ("It is " + " or ".join(names), False)):  # fmt: skip
        score = offline_scores(Case(case.question, case.reference, case.facts, text)).overall
        assert rewards.holds({"medical_judge": score}, "medical_judge") is right, text
    hedge = Case("What dose is usual?", "40 mg are usual.", ("40",), "It is 40 mg or 20 mg.")
    assert not rewards.holds({"medical_judge": offline_scores(hedge).overall}, "medical_judge")


def test_offline_scores_without_facts_and_in_chinese():
    case = Case("罗马有多少人？", "罗马有2人登记，最大的45岁。", (), "登记的有2人，最大的是45岁。")
    assert offline_scores(case).overall > 0.8
    assert offline_scores(Case(case.question, case.reference, (), "登记的有7人。")).overall < 0.3


def play(row: dict, *queries: str, final: str) -> list[dict]:
    env, out = MedicalEnv(), []
    env.reset(**row)
    for query in queries:
        function = {"name": "query_database_by_sql", "arguments": {"query": query}}
        out.append({"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]})
        out.append({"role": "tool", "name": function["name"], "content": env.query_database_by_sql(query)})
    return [*out, {"role": "assistant", "content": final}]


ROME = "SELECT count(*), max(age) FROM customer WHERE city = 'Rome'"


@pytest.fixture
def offline():
    yield judge_module.use(JudgeConfig())
    judge_module._current = None


def test_medical_rewards(medical_row, offline):
    scores = score(medical_row, play(medical_row, ROME, final=CASE.answer))
    assert scores == {"medical_rule": 0.1, "medical_judge": pytest.approx(1.0)}
    assert total(scores, "medical") == pytest.approx(1.1)
    assert score(medical_row, [{"role": "assistant", "content": CASE.answer}])["medical_rule"] == 0.0
    for useless in ("SELECT 1", "SELEC", "DROP TABLE customer"):
        assert score(medical_row, play(medical_row, useless, final="?")) == {"medical_rule": 0.0, "medical_judge": 0.0}
    assert score(medical_row, play(medical_row, "SELEC", ROME, final="?"))["medical_rule"] == 0.1
    assert score(medical_row | {"db_path": "gone"}, play(medical_row, ROME, final="?"))["medical_rule"] is None


def test_copies_are_no_answer(medical_row, offline):
    shown = play(medical_row, ROME, final="")[1]["content"]
    for final in (shown, f"Here you are:\n{shown}", ROME, f"```sql\n{ROME}\n```", "<tool_call>2 45 Bob</tool_call>"):
        assert copied(play(medical_row, ROME, final=final))
        assert score(medical_row, play(medical_row, ROME, final=final))["medical_judge"] == 0.0
    assert not copied(play(medical_row, ROME, final=CASE.answer))
    assert not copied(play(medical_row, "SELECT count(*) FROM customer", final="5"))


@pytest.mark.parametrize(
    ("final", "query"),
    [
        ("With food, twice a day.", False),
        ("With meals as (always) advised.", False),
        ("Select one tablet a day.", False),
        ("with t AS (SELECT 1) SELECT * FROM t", True),
        ('WITH RECURSIVE "a b" (x, y) AS MATERIALIZED (VALUES (1, 2)) SELECT x FROM "a b"', True),
        ("```\nselect name\nfrom customer\n```", True),
    ],
)
def test_a_query_is_known_by_its_shape_and_not_by_its_first_word(final, query):
    assert copied([{"role": "assistant", "content": final}]) is query


def test_a_failing_judge_leaves_the_rule(medical_row, server):
    server.always = 500
    judge_module.use(JudgeConfig(base_url=server.url, model="m", retries=0, cache=""))
    try:
        assert score(medical_row, play(medical_row, ROME, final=CASE.answer)) == {
            "medical_rule": 0.1,
            "medical_judge": None,
        }
    finally:
        judge_module._current = None


def test_settings_come_from_the_environment(monkeypatch):
    assert config_from_environment() == JudgeConfig()
    monkeypatch.setenv("JUDGE_BASE_URL", "http://localhost:1/v1")
    with pytest.raises(ValueError, match="JUDGE_MODEL is not"):
        config_from_environment()
    monkeypatch.setenv("JUDGE_MODEL", "m")
    monkeypatch.setenv("JUDGE_CONCURRENCY", "3")
    monkeypatch.setenv("JUDGE_TIMEOUT", "1.5")
    config = config_from_environment()
    assert (config.model, config.concurrency, config.timeout) == ("m", 3, 1.5)
    monkeypatch.setenv("JUDGE_CONCURRENCY", "many")
    with pytest.raises(ValueError, match="JUDGE_CONCURRENCY='many' is no int"):
        config_from_environment()

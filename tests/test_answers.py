"""Votes and first attempts, on a real database: never by gold, never by text where results can be compared."""

from rewards import answer_text, first_attempt, vote_groups
from tasks.base import call, result, say


def query(sql):
    return [call("execute_sql", {"query": sql}), result("execute_sql", "..."), say("Done.")]


def test_votes_go_by_result(sql_row):
    samples = [
        query("SELECT name FROM customer WHERE city = 'Paris'"),
        query("select c.name from customer as c where c.city like 'paris'"),  # another text, the same rows
        query("SELECT name FROM customer WHERE city = 'Rome'"),
        query("SELECT nam FROM customer"),  # fails: no vote, though it is twice the same text
        query("SELECT nam FROM customer"),
        [say("I do not know.")],
        query("SELECT name FROM customer WHERE city = 'Paris' ORDER BY age DESC"),
    ]
    paris, same, rome, *others, ordered = vote_groups([sql_row], [samples])[0]
    assert paris == same == ordered != rome and rome is not None and others == [None] * 3
    assert vote_groups([sql_row | {"gold": "SELECT 1"}], [samples]) == vote_groups([sql_row], [samples])


def test_votes_on_numbers_go_by_value_and_free_text_has_none(math_row, medical_row):
    samples = [[say(f"<answer>{text}</answer>")] for text in ("12", "12.0", "13", "$12", "many")]
    groups = vote_groups([math_row, medical_row], [[*samples, [say("hm")]], samples])
    assert groups[0][0] == groups[0][1] == groups[0][3] != groups[0][2] and groups[0][-1] is None and groups[1] is None


def test_the_first_attempt_ends_with_the_first_query(sql_row, math_row):
    episode = [say("Let me think."), *query("SELECT 1")[:2], *query("SELECT 2")]
    assert answer_text(sql_row, episode) == "SELECT 2"
    assert answer_text(sql_row, first_attempt(sql_row, episode)) == "SELECT 1"
    assert answer_text(sql_row, first_attempt(sql_row, [say("```sql\nSELECT 3\n```"), *episode])) == "SELECT 3"
    assert first_attempt(math_row, episode) is None

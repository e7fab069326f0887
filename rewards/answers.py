"""What an episode answers: as text, at its first attempt, and which answers of several episodes are the same.

Nothing here looks at gold. `vote_groups` serves the majority vote: two SQL answers are the same where they give the same result
on the database (the strict judge, with one of them in gold's place), two numbers where they are the same value. A query that
fails and a missing number are no answers and have no vote; free text has none either.
"""

from rewards import episode, sql
from rewards.math import final_answer, math_equal

SQL_SECONDS = 10.0  # limit of one query


def answer_text(row: dict, completion: list[dict]) -> str:
    """The answer as the judge reads it; empty where the episode has none."""
    if row["environment"] == "sql":
        return sql.final_sql(completion)
    final = episode.final_message(completion) or ""
    return (final_answer(final) or "") if row["environment"] == "calculator" else final


def first_attempt(row: dict, completion: list[dict]) -> list[dict] | None:
    """The episode as if it had ended with its first query; None where attempts are not told apart (numbers, free text)."""
    if row["environment"] != "sql":
        return None
    for end, message in enumerate(completion, 1):
        if message.get("role") == "assistant" and sql.final_sql([message]):
            return completion[:end]
    return completion


def vote_groups(rows: list[dict], samples: list[list[list[dict]]]) -> list[list[int | None] | None]:
    """For each row, the group of each of its completions: equal numbers are equal answers, None is no answer. None for free text."""
    texts = [[answer_text(row, c) for c in completions] for row, completions in zip(rows, samples, strict=True)]
    same: list[dict[str, int | None]] = [{} for _ in rows]
    for i, row in enumerate(rows):
        if row["environment"] == "calculator":
            same[i] = _by_value(texts[i])
    _by_result(rows, texts, same)
    voting = [row["environment"] in ("sql", "calculator") for row in rows]
    return [[same[i].get(text) for text in found] if voting[i] else None for i, found in enumerate(texts)]


def _by_value(texts: list[str]) -> dict[str, int | None]:
    heads: list[str] = []
    groups = {}
    for text in dict.fromkeys(filter(None, texts)):
        groups[text] = next((n for n, head in enumerate(heads) if math_equal(text, head)), len(heads))
        if groups[text] == len(heads):
            heads.append(text)
    return groups


def _by_result(rows: list[dict], texts: list[list[str]], same: list[dict]) -> None:
    """Rounds over all rows at once, so that the judge gets large batches: each round compares with the first query left."""
    from rewards.exec_match import exec_match_batch

    left = {i: [t for t in dict.fromkeys(texts[i]) if t] for i, row in enumerate(rows) if row["environment"] == "sql"}
    number = 0
    while left := {i: queries for i, queries in left.items() if queries}:
        pairs = [(i, query, queries[0]) for i, queries in left.items() for query in queries]
        verdicts = exec_match_batch(
            [query for _, query, _ in pairs], [head for _, _, head in pairs], [rows[i]["db_path"] for i, _, _ in pairs],
            mode="strict", timeout=SQL_SECONDS, batch_timeout=None,
        )  # fmt: skip
        for (i, query, head), verdict in zip(pairs, verdicts, strict=True):
            if verdict.correct:
                same[i][query] = number
            if verdict.correct or query == head:  # a head that does not equal itself fails: it is no answer
                left[i].remove(query)
        number += 1

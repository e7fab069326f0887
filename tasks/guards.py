"""Leak guards: what evaluation measures must not stand in the training rows, and gold must not stand in a prompt.

`separate` takes out of the training rows what would leak (each with its reason); `check` then asserts, on the rows that
will be written, that nothing is left, and raises LeakError with the offending rows otherwise.

Covered: databases shared between train and eval, questions equal after normalisation, gold verbatim (letter case, spaces
and SQL punctuation aside) in the messages before the model's own answer. Not covered: paraphrased questions, gold that
is written differently, and what the base model learnt in its pre-training.
"""

import re
import unicodedata
from collections.abc import Iterable

from tasks.base import Rejected, Task

SHOWN = 5  # offending rows spelled out in the error


class LeakError(Exception):
    """A guard failed. `.rows` are the offending rows; the text names the first of them."""

    def __init__(self, what: str, rows: list[dict], details: list[str]):
        lines = "".join(f"\n  {d}" for d in details[:SHOWN]) + ("\n  ..." if len(details) > SHOWN else "")
        super().__init__(f"{what}: {len(rows)} rows{lines}")
        self.rows = rows


def normalise(question: str) -> str:
    """Letter case, width, accents' encoding, punctuation and spaces do not make a different question."""
    text = unicodedata.normalize("NFKC", question).casefold()
    return " ".join(re.findall(r"\w+", text))


def flat(text: str) -> str:
    """A query (or any text) reduced to its words and marks, so that layout and letter case do not hide it."""
    return " ".join(re.findall(r"\w+|[^\w\s;]", unicodedata.normalize("NFKC", text).casefold().replace('"', "'")))


def separate(task: Task, train: list[dict], evaluation: list[dict]) -> tuple[list[dict], list[dict], list[Rejected]]:
    """(train, evaluation, rejected): evaluation stays whole, train gives way; repeated training rows go as well."""
    databases = {row["db_id"] for row in evaluation if row["db_id"]} if task.unseen_databases else set()
    questions = {normalise(row["question"]) for row in evaluation}
    kept, rejected, seen = [], [], set()
    for row in train:
        key = (row["db_id"], normalise(row["question"]))
        if row["db_id"] in databases:
            rejected.append(Rejected(row, "database also in eval"))
        elif key[1] in questions:
            rejected.append(Rejected(row, "question also in eval"))
        elif key in seen:
            rejected.append(Rejected(row, "question repeated"))
        elif shows_gold(row, row["prompt"]):
            rejected.append(Rejected(row, "gold stands in the prompt"))
        else:
            seen.add(key)
            kept.append(row)
    clean = []
    for row in evaluation:
        if shows_gold(row, row["prompt"]):
            rejected.append(Rejected(row, "gold stands in the prompt"))
        else:
            clean.append(row)
    return kept, clean, rejected


def check(task: Task, train: list[dict], evaluation: list[dict]) -> None:
    """Every guard on the rows as they will be written; raises LeakError."""
    if task.unseen_databases:
        no_shared_database(train, evaluation)
    no_shared_question(train, evaluation)
    no_gold_in_prompt([*train, *evaluation])


def no_shared_database(train: Iterable[dict], evaluation: Iterable[dict]) -> None:
    known = {row["db_id"] for row in evaluation if row["db_id"]}
    bad = [row for row in train if row["db_id"] in known]
    if bad:
        raise LeakError("databases in train and in eval", bad, [f"{row['id']}: {row['db_id']}" for row in bad])


def no_shared_question(train: Iterable[dict], evaluation: Iterable[dict]) -> None:
    known = {normalise(row["question"]): row["id"] for row in evaluation}
    bad = [row for row in train if normalise(row["question"]) in known]
    if bad:
        details = [f"{row['id']} asks what {known[normalise(row['question'])]} asks: {row['question']}" for row in bad]
        raise LeakError("questions in train and in eval", bad, details)


def no_gold_in_prompt(rows: Iterable[dict]) -> None:
    bad, details = [], []
    for row in rows:
        if place := shows_gold(row, row["prompt"] + before_gold(row)):
            bad.append(row)
            details.append(f"{row['id']}: {place}")
    if bad:
        raise LeakError("gold stands in what the model reads before it answers", bad, details)


def before_gold(row: dict) -> list[dict]:
    """The tool results of an SFT row that come before the call with gold (a self-correction has some)."""
    out = []
    for message in row.get("messages", [])[len(row["prompt"]) :]:
        calls = [call["function"]["arguments"] for call in message.get("tool_calls", ())]
        if any(flat(str(value)) == flat(row["gold"]) for arguments in calls for value in arguments.values()):
            return out
        if message["role"] == "tool":
            out.append(message)
    return out if row["environment"] == "sql" else []


def shows_gold(row: dict, messages: list[dict]) -> str:
    """The message that shows gold ("user: ...fragment..."), or "" when none does."""
    for message in messages:
        content = flat(message["content"])
        for secret in secrets(row):
            if secret and f" {secret} " in f" {content} ":
                return f"{message['role']}: ...{secret[:80]}..."
    return ""


def secrets(row: dict) -> list[str]:
    """What must not be readable. A bare number may stand in a question, so for maths it is the answer's form."""
    gold = row["gold"]
    if row["environment"] == "calculator":
        return [flat(f"<answer>{gold}</answer>"), flat(f"#### {gold}"), flat(f"the answer is {gold}")]
    asked = f" {flat(row['question'])} "
    facts = [fact for fact in map(flat, row["facts"]) if f" {fact} " not in asked]
    return [text for text in (flat(gold), *facts) if len(text) >= 8]  # shorter answers ("12", "yes") occur by chance

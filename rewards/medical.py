"""Rewards of the medical tasks: 0.1 for a query that worked, 0 to 1 for the final message by a judge.

Default weights: medical_rule 1.0, medical_judge 1.0. The rule is worth a tenth of a full answer, so querying for its own
sake never pays more than answering. A final message that copies a tool result or is nothing but SQL is no answer.
"""

import re
import time

from rewards import episode, judge
from rewards.facts import Case
from rewards.sql import BATCH_SECONDS, runs

TOOL, ARGUMENT = "query_database_by_sql", "query"
RULE = 0.1
MAX_TRIED = 5  # queries of an episode that may earn the rule's reward

_QUERY = re.compile(  # and not 'With food, twice a day.'
    r"(?:```\w*)?\s*(?:select\b.*\bfrom\b|with\s+(?:recursive\s+)?(?:\w+|\"[^\"]+\")\s*(?:\([^)]*\)\s*)?"
    r"as\s+(?:(?:not\s+)?materialized\s+)?\(\s*(?:select|values|with)\b)",
    re.DOTALL | re.IGNORECASE,
)


def medical_rule(completions, environment, gold, db_path, **columns) -> list[float | None]:
    """0.1 where a query of the episode ran and read a table of the database."""
    deadline = time.monotonic() + BATCH_SECONDS
    rows = zip(completions, environment, db_path, strict=True)
    return [_rule(c, p, deadline) if e == "medical" else None for c, e, p in rows]


def medical_judge(completions, environment, gold, question, facts, **columns) -> list[float | None]:
    """0 to 1: accuracy, completeness, clarity and professionalism of the final message, by the current judge."""
    places, cases = [], []
    for i, (completion, kind) in enumerate(zip(completions, environment, strict=True)):
        if kind == "medical":
            places.append(i)
            answer = "" if copied(completion) else episode.final_message(completion) or ""
            cases.append(Case(question[i], gold[i], tuple(str(f) for f in facts[i] or ()), answer))
    out: list[float | None] = [None] * len(completions)
    for i, value in zip(places, judge.current().overall(cases) if cases else (), strict=True):
        out[i] = value
    return out


def _rule(completion: list[dict], db_path: str, deadline: float) -> float | None:
    queries = [
        query
        for call in episode.calls(completion)
        if call.result is not None and not call.result.startswith("Error")  # it ran in the episode, within its limits
        if (query := episode.argument(call, TOOL, ARGUMENT)) is not None
    ]
    outcomes = [runs(db_path, query, deadline) for query in dict.fromkeys(queries[:MAX_TRIED])]
    if any(outcomes):
        return RULE
    return None if None in outcomes else 0.0


def copied(completion: list[dict]) -> bool:
    """Whether the final message is the look of a tool result, a query, or a call that failed, instead of an answer."""
    final = episode.final_message(completion) or ""
    if episode.has_stray_tags([{"role": "assistant", "content": final}]):
        return True
    shown = {
        line.strip()
        for m in completion
        if m.get("role") == "tool"
        for line in episode.text_of(m).splitlines()
        if " | " in line or re.fullmatch(r"\((?:first )?\d+ .*rows?.*\)", line.strip())
    }
    if any(line.strip() in shown for line in final.splitlines()):
        return True
    return bool(_QUERY.match(final.strip()))

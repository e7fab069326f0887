"""Train and eval from a person's own questions, so that no question of eval has a near-duplicate in train.

Two questions belong together when they share most of their words (numbers and quoted values aside; Chinese by
characters) or when their gold queries differ in values only. Clusters go to one side whole. Not covered: paraphrases in
quite other words whose queries are also written differently.
"""

import random
import re
from collections import Counter, defaultdict

from tasks.guards import normalise
from tasks.schema_text import words

ALIKE = 0.6  # shared words of two questions, of all their words (Jaccard)


def split(rows: list[dict], eval_share: float, seed: int) -> tuple[list[dict], list[dict]]:
    """(train, eval); rows are {"question", "gold"}; about `eval_share` of them in eval, by whole clusters."""
    clusters = cluster(rows)
    random.Random(seed).shuffle(clusters)
    wanted = max(round(len(rows) * eval_share), 1)
    evaluation: list[int] = []
    for members in sorted(clusters, key=len):  # stable: a random choice among those of equal size
        if len(evaluation) + len(members) <= wanted:
            evaluation += members
    if not evaluation or len(evaluation) == len(rows):
        raise ValueError(
            f"the {len(rows)} questions form {len(clusters)} group{'s' if len(clusters) > 1 else ''} of near-duplicates, so"
            " they cannot be split into train and eval without a leak; add questions of other kinds, or use --synthesise N"
        )
    chosen = set(evaluation)
    return [r for i, r in enumerate(rows) if i not in chosen], [rows[i] for i in sorted(chosen)]


def cluster(rows: list[dict]) -> list[list[int]]:
    """Indices of rows, grouped by likeness (transitively)."""
    leader = list(range(len(rows)))

    def find(i: int) -> int:
        while leader[i] != i:
            leader[i] = leader[leader[i]]
            i = leader[i]
        return i

    first: dict[str, int] = {}
    for i, row in enumerate(rows):
        if row["gold"] and not row.get("answer_only"):  # an answer's constant query says nothing of the question
            leader[find(first.setdefault(skeleton(row["gold"]), i))] = find(i)
    for i, j in alike([tokens(row["question"]) for row in rows]):
        leader[find(i)] = find(j)
    groups = defaultdict(list)
    for i in range(len(rows)):
        groups[find(i)].append(i)
    return list(groups.values())


def tokens(question: str) -> frozenset[str]:
    text = re.sub(r"[\"'“‘][^\"'”’]*[\"'”’]|\d+(?:[.,]\d+)*", " ", question)
    found = set(words(normalise(text)))
    for run in re.findall(r"[\u3040-\u30ff\u3400-\u9fff]+", text):  # written without blanks
        found.discard(run)
        found |= set(run)
    return frozenset(found) or frozenset([normalise(question)])


def skeleton(sql: str) -> str:
    """A query without its values."""
    values = r"'(?:[^']|'')*'|(?:(?<=[=<>])|(?<=[=<>] )|(?i:(?<=like )))\"[^\"]*\"|\b\d+(?:\.\d+)?\b"  # other "words" are names
    bare = re.sub(values, "?", sql)
    return " ".join(re.findall(r"\w+|[^\w\s;]", bare.lower()))


def alike(sets: list[frozenset[str]]) -> list[tuple[int, int]]:
    """Pairs whose Jaccard index is at least ALIKE. Such a pair shares one of its rarest words, so few pairs are looked at."""
    frequency = Counter(t for s in sets for t in s)
    places: dict[str, list[int]] = defaultdict(list)
    found = []
    for i, own in enumerate(sets):
        rare = sorted(own, key=lambda t: (frequency[t], t))[: len(own) - int(ALIKE * len(own) - 1e-9)]
        for j in {j for token in rare for j in places[token]}:
            if len(own & sets[j]) >= ALIKE * len(own | sets[j]):
                found.append((i, j))
        for token in rare:
            places[token].append(i)
    return found

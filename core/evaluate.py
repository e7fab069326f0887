"""From episodes to figures one can believe: accuracy with its interval, paired tests, what self-correction and sampling bring.

All functions take the records of core/episodes.py. Undecided episodes (correct is None: the judge or the server failed) count
neither way; `undecided` says how many there are.
"""

import math
import statistics
from collections.abc import Callable


def compare(records: dict[str, list[dict]], limits: list[int], usual: int, vote_groups: Callable) -> dict:
    """Everything that step 5 says, from all records of each stage. The stages are compared at the turn limit `usual`."""
    single = {
        s: {t: [r for r in rs if r["max_turns"] == t and not r["sample"]] for t in limits} for s, rs in records.items()
    }
    usually = {stage: found[usual] for stage, found in single.items()}
    sampled = {stage: [r for r in found if r["sample"]] for stage, found in records.items()}
    names = list(records)
    return {
        "stages": {stage: summarise(found) for stage, found in usually.items()},
        "tests": {b: mcnemar(usually[a], usually[b]) for a, b in zip(names, names[1:], strict=False)},
        "turns": {stage: {str(t): summarise(r) for t, r in found.items()} for stage, found in single.items()},
        "samples": {stage: summarise_samples(found, vote_groups) for stage, found in sampled.items() if found},
    }


def summarise(records: list[dict]) -> dict:
    """The figures of one stage at one turn limit."""
    names = sorted({name for r in records for name in r["rewards"]})
    seconds = sum(r["seconds"] for r in records)
    played = [r for r in records if not r.get("error")]  # what no engine could play shows no behaviour
    tokens = [r["tokens"] for r in played if r["tokens"] is not None]
    return {
        **proportion([r["correct"] for r in records]),
        "undecided": sum(r["correct"] is None for r in records),
        "errors": sum(bool(r.get("error")) for r in records),
        "strict": proportion([r.get("strict") for r in records]),
        "by_task": accuracy_by(records, "task"),
        "by_hardness": accuracy_by(records, "hardness"),
        "rewards": {n: mean([r["rewards"].get(n) for r in records]) for n in names},
        "executable_rate": mean([r.get("executes") for r in records]),
        "format_rate": mean([r.get("well_formed") for r in records]),
        "correction": correction(records),
        "turns": mean([r["turns"] for r in played]),
        "tool_calls": mean([r["tool_calls"] for r in played]),
        "tool_error_rate": mean([r["tool_errors"] / r["tool_calls"] for r in played if r["tool_calls"]]),
        "no_tool_rate": mean([r["tool_calls"] == 0 for r in played]),
        "truncated_rate": mean([r["truncated"] for r in played]),
        "tokens": mean(tokens),
        "seconds": round(seconds, 1),
        "tokens_per_second": round(sum(tokens) / seconds, 1) if seconds and tokens else None,
    }


def proportion(verdicts: list[bool | None]) -> dict:
    """Share of yes among the decided, with its 95 % interval."""
    decided = [v for v in verdicts if v is not None]
    right, n = sum(decided), len(decided)
    return {"n": n, "correct": right, "accuracy": right / n if n else None, "interval": wilson(right, n)}


def mean(values: list) -> float | None:
    values = [v for v in values if v is not None]
    return statistics.fmean(values) if values else None


def accuracy_by(records: list[dict], key: str) -> dict[str, list[int]]:
    """value of `key` -> [right, decided]"""
    groups: dict[str, list] = {}
    for record in records:
        if record["correct"] is not None:
            groups.setdefault(record[key], []).append(record["correct"])
    return {k: [sum(v), len(v)] for k, v in sorted(groups.items())}


def wilson(right: int, n: int, z: float = 1.959964) -> list[float]:
    """95 % interval of a share (Wilson): honest for small n and near 0 and 1."""
    if n == 0:
        return [0.0, 1.0]
    p, d = right / n, 1 + z * z / n
    half = z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n)) / d
    centre = (p + z * z / (2 * n)) / d
    return [max(0.0, centre - half), min(1.0, centre + half)]


def mcnemar(before: list[dict], after: list[dict]) -> dict:
    """Paired exact test on the same questions: how many a stage fixed, how many it broke, and the two-sided p."""
    was = {r["id"]: r["correct"] for r in before}
    pairs = [(was[r["id"]], r["correct"]) for r in after if r["id"] in was]
    fixed = sum(b is False and a is True for b, a in pairs)
    broke = sum(b is True and a is False for b, a in pairs)
    n = fixed + broke
    tail = sum(math.comb(n, k) for k in range(min(fixed, broke) + 1)) / 2**n
    return {"fixed": fixed, "broke": broke, "p": min(1.0, 2 * tail)}


def correction(records: list[dict]) -> dict | None:
    """The first query of each episode against its final answer; None where no episode has attempts that can be told apart."""
    pairs = [(r.get("first_correct"), r["correct"]) for r in records]
    pairs = [(first, final) for first, final in pairs if first is not None and final is not None]
    if not pairs:
        return None
    return {
        "n": len(pairs),
        "first_correct": sum(first for first, _ in pairs),
        "final_correct": sum(final for _, final in pairs),
        "fixed": sum(final and not first for first, final in pairs),
        "broke": sum(first and not final for first, final in pairs),
    }


def pass_at_k(n: int, right: int, k: int) -> float:
    """Chance that one of k samples is right, unbiased from n >= k samples of which `right` are (Chen et al. 2021)."""
    return 1.0 - math.comb(n - right, k) / math.comb(n, k)


def summarise_samples(records: list[dict], vote_groups: Callable) -> dict:
    """pass@k for k = 1, 2, 4, ... and the majority vote; `vote_groups` says which answers of a question are the same."""
    by_id: dict[str, list[dict]] = {}
    for record in sorted(records, key=lambda r: r["sample"]):
        by_id.setdefault(record["id"], []).append(record)
    questions = list(by_id.values())
    most = max(map(len, questions))
    decided = [[r["correct"] for r in q] for q in questions if len(q) == most]
    decided = [d for d in decided if None not in d]  # the same questions for every k
    sizes = [k for k in (2**i for i in range(most.bit_length())) if k < most] + [most]
    groups = vote_groups([q[0] for q in questions], [[r["completion"] for r in q] for q in questions])
    votes = [q[elected(g)]["correct"] for q, g in zip(questions, groups, strict=True) if g is not None]
    return {
        "samples": most,
        "pass_at": {str(k): mean([pass_at_k(most, sum(d), k) for d in decided]) for k in sizes},
        "majority": proportion(votes),
    }


def elected(groups: list[int | None]) -> int:
    """The first sample of the largest group, of equal groups the one that spoke first; the first sample if none votes."""
    votes = [g for g in groups if g is not None]
    return groups.index(max(votes, key=lambda g: (votes.count(g), -votes.index(g)))) if votes else 0

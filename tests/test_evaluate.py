"""The figures of the table: intervals and tests against values from the literature, sampling against brute force."""

import itertools
import json

import pytest

from core.evaluate import compare, correction, elected, mcnemar, pass_at_k, summarise, summarise_samples, wilson
from core.table import markdown, tables


def record(i, correct, **other):
    base = {"id": str(i), "stage": "sft", "max_turns": 3, "sample": 0, "correct": correct, "task": "t", "hardness": "easy",
            "rewards": {"exec_match": correct}, "turns": 2, "tool_calls": 1, "tool_errors": 0, "truncated": False, "tokens": 5,
            "seconds": 1.0, "completion": []}  # fmt: skip
    return base | other


@pytest.mark.parametrize(
    ("right", "n", "low", "high"), [(0, 10, 0.0, 0.2775), (5, 10, 0.2366, 0.7634), (81, 263, 0.2553, 0.3662)]
)
def test_wilson(right, n, low, high):
    assert wilson(right, n) == pytest.approx([low, high], abs=5e-4)


def test_mcnemar_is_the_exact_binomial_test():
    before = [record(i, i >= 10) for i in range(20)]  # 0..9 wrong
    after = [record(i, i >= 1 and i != 15) for i in range(20)]  # fixes 1..9, breaks 15
    assert mcnemar(before, after) == {"fixed": 9, "broke": 1, "p": pytest.approx(2 * 11 / 1024)}
    assert mcnemar(before, before)["p"] == 1.0


def test_undecided_counts_neither_way():
    s = summarise([record(1, True), record(2, False), record(3, None, rewards={}, error="server down", tokens=None)])
    assert (s["n"], s["undecided"], s["errors"], s["accuracy"], s["tokens"]) == (2, 1, 1, 0.5, 5)
    nothing = summarise([record(1, None)])
    assert nothing["accuracy"] is None and nothing["interval"] == [0.0, 1.0]
    json.dumps(nothing, allow_nan=False)  # browsers read summary.json


def test_what_could_not_be_played_shows_no_behaviour():
    """A server that fails on every other question makes no model that calls no tool."""
    failed = {"error": "server down", "tokens": None, "turns": 0, "tool_calls": 0, "seconds": 99.0}
    s = summarise([record(1, True), record(2, None, truncated=True, **failed)])
    assert (s["turns"], s["tool_calls"], s["no_tool_rate"], s["truncated_rate"], s["errors"]) == (2, 1, 0, 0, 1)
    nothing = summarise([record(1, None, **failed)])
    assert nothing["turns"] is None and nothing["no_tool_rate"] is None
    assert "| turns | - |" in markdown(tables(compare({"m": [record(1, None, **failed)]}, [3], 3, None)))


@pytest.mark.parametrize(("n", "right"), [(5, 2), (4, 0), (6, 6), (7, 1)])
def test_pass_at_k_is_the_share_of_subsets_with_a_right_one(n, right):
    verdicts = [True] * right + [False] * (n - right)
    for k in range(1, n + 1):
        subsets = list(itertools.combinations(verdicts, k))
        assert pass_at_k(n, right, k) == pytest.approx(sum(map(any, subsets)) / len(subsets))


def test_the_largest_group_is_elected_and_of_equal_ones_the_first():
    assert elected([0, 1, 1, None]) == 1
    assert elected([None, 5, 3, 3, 5]) == 1
    assert elected([None, None]) == 0  # nobody answers: the first stands, wrong as it is


def test_self_correction_counts():
    pairs = [(False, True), (True, False), (True, True), (False, False), (None, True), (True, None)]
    found = correction([record(i, final, first_correct=first) for i, (first, final) in enumerate(pairs)])
    assert found == {"n": 4, "first_correct": 2, "final_correct": 2, "fixed": 1, "broke": 1}
    assert correction([record(1, True)]) is None


def test_turns_and_samples_do_not_mix():
    greedy = [record(i, t == 3, max_turns=t) for t in (1, 3) for i in range(4)]
    drawn = [record(i, i == s, sample=s) for i in range(4) for s in (1, 2, 3)]
    seen = []

    def groups(rows, completions):
        seen.append([len(c) for c in completions])
        return [[0, 1, 1]] * len(rows)

    summary = compare({"sft": greedy + drawn}, [1, 3], 3, groups)
    assert summary["stages"]["sft"]["n"] == 4 and summary["stages"]["sft"]["accuracy"] == 1.0
    assert summary["turns"]["sft"]["1"]["accuracy"] == 0.0 and seen == [[3, 3, 3, 3]]
    sampled = summary["samples"]["sft"]
    assert sampled["pass_at"] == {"1": 0.25, "2": 0.5, "3": 0.75}  # questions 1, 2 and 3 have one right sample of three
    assert sampled["majority"]["correct"] == 1  # sample 2 is elected everywhere, right for question 2 only


def test_every_table_has_a_cell_under_every_column():
    records = {
        "base": [record(1, False, task="a"), record(2, None)],
        "sft": [record(1, True, hardness="hard", strict=False, first_correct=False, max_turns=t) for t in (0, 3)],
    }
    records["base"] += [record(1, False, max_turns=0)] + [record(1, True, sample=s) for s in (1, 2)]
    found = tables(compare(records, [0, 3], 3, lambda rows, completions: [[0, 0]] * len(rows)))
    assert len(found) == 6 and all(len(row) == len(table.header) for table in found for row in table.rows)
    text = markdown(found)
    assert "1 (+1 undecided)" in text and "| no tool |" in text and "100% of 1" in text and "+1 -0, p=1" in text
    assert max(len(table.header) for table in found) <= 10


def test_pass_at_k_is_of_the_same_questions_for_every_k():
    verdicts = {"a": [False] * 4, "b": [True, True, True, None]}
    records = [
        {"id": name, "sample": n, "correct": verdict, "completion": []}
        for name, found in verdicts.items()
        for n, verdict in enumerate(found, 1)
    ]
    sampled = summarise_samples(records, lambda rows, completions: [[0] * 4 for _ in rows])
    assert sampled["pass_at"] == {"1": 0.0, "2": 0.0, "4": 0.0}  # b has an undecided sample

"""The figures of the table: intervals and paired tests against values known from the literature."""

import json
import math

import pytest

from core.evaluate import _read_records, markdown, mcnemar, summarise, table_rows, wilson


def record(i, correct, stage="sft", **other):
    base = {"id": str(i), "stage": stage, "correct": correct, "rewards": {"exec_match": correct}, "task": "t",
            "hardness": "easy", "turns": 2, "tool_calls": 1, "tool_errors": 0, "truncated": False, "tokens": 5,
            "seconds": 1.0}  # fmt: skip
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
    s = summarise([record(1, True), record(2, False), record(3, None)])
    assert (s["n"], s["undecided"], s["accuracy"]) == (2, 1, 0.5)
    assert math.isnan(summarise([record(1, None)])["accuracy"])


def test_table_has_a_cell_under_every_column():
    stages = {
        "base": summarise([record(1, False, task="a")]),
        "sft": summarise([record(1, True, task="b", hardness="hard")]),
    }
    header, rows = table_rows(stages, {"sft": mcnemar([record(1, False)], [record(1, True)])})
    assert all(len(r) == len(header) for r in rows) and "+1 -0" in rows[1][4]
    assert markdown(header, rows).count("\n") == 4


def test_a_line_cut_by_a_crash_is_dropped(tmp_path):
    path = tmp_path / "episodes.jsonl"
    path.write_text(json.dumps({"id": 1}) + '\n{"id": 2, "st')
    assert _read_records(path) == [{"id": 1}] and path.read_text() == '{"id": 1}\n'
    path.write_text('{"id": 2, "st\n' + json.dumps({"id": 1}) + "\n")
    with pytest.raises(json.JSONDecodeError):  # damage in the middle is no crash of ours: never silently skipped
        _read_records(path)

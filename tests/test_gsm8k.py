"""tasks.gsm8k: annotations become calls, wrong ones are repaired or rejected, and all of the real data is accounted for."""

import json
from collections import Counter

import pytest

from envs import ENVIRONMENTS
from rewards import score
from tasks import COLUMNS, TASKS, Rejected
from tasks.gsm8k import agrees, split_steps

GSM8K = TASKS["gsm8k"]


def load(tmp_path, *items, split="train"):
    folder = tmp_path / "gsm8k"
    folder.mkdir(exist_ok=True)
    lines = [json.dumps({"question": q, "answer": a}) for q, a in items]
    (folder / ("train.jsonl" if split == "train" else "test.jsonl")).write_text("\n".join(lines) + "\n")
    return list(GSM8K.load(split, folder))


def play(tmp_path, answer, **limits):
    (row,) = load(tmp_path, ("How many?", answer))
    completion = GSM8K.trajectory(row, ENVIRONMENTS["calculator"](**limits))
    assert score(row, completion)["math_accuracy"] == 1.0
    turns = [
        (m["content"], m["tool_calls"][0]["function"]["arguments"]["expression"]) if "tool_calls" in m else m["content"]
        for m in completion
    ]
    return turns


def test_calls_stand_where_they_belong_in_the_reasoning(tmp_path):
    turns = play(
        tmp_path, "She sold 48/2 = $<<48/2=24>>24 in May.\nThat is 48+24 = <<48+24=72>>72 altogether.\n#### 72"
    )
    assert turns == [
        ("She sold 48/2 =", "48/2"),
        "24",
        ("$24 in May.\nThat is 48+24 =", "48+24"),
        "72",
        "72 altogether.\n<answer>72</answer>",
    ]


def test_several_annotations_in_a_line_are_several_calls(tmp_path):
    turns = play(tmp_path, "It is 2*3=<<2*3=6>>6 and 6+1=<<6+1=7>>7 so 7*7=<<7*7=49>>49.\n#### 49")
    assert [t[1] for t in turns[:-1:2]] == ["2*3", "6+1", "7*7"] and turns[1::2] == ["6", "7", "49"]


def test_unmarked_equations_are_calls_too(tmp_path):
    """The last calculation often has no annotation in the data; algebra and percentages stay text."""
    turns = play(tmp_path, "He has 24/6=<<24/6=4>>4.\nSam has $4 + $6 = $10, 50% + 10% = 60%, 2x + 3 = 7.\n#### 10")
    assert [t[1] for t in turns[:-1:2]] == ["24/6", "4+6"]
    assert turns[-1] == "$10, 50% + 10% = 60%, 2x + 3 = 7.\n<answer>10</answer>"


def test_no_annotation_mark_is_left_anywhere(tmp_path):
    turns = play(tmp_path, "A 1+1=<<1+1=2>>2 b.\n#### 2")
    assert "<<" not in str(turns) and ">>" not in str(turns)


def test_wrong_annotation_is_repaired_when_the_chain_ends_right(tmp_path):
    turns = play(tmp_path, "First 3*4=<<3*4=13>>13 boxes.\nThen 13+5=<<13+5=18>>17 in all.\n#### 17")
    assert turns == [
        ("First 3*4=", "3*4"),
        "12",
        ("12 boxes.\nThen 12+5=", "12+5"),
        "17",
        "17 in all.\n<answer>17</answer>",
    ]


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ("First 3*4=<<3*4=13>>13.\nThen 13+5=<<13+5=18>>18.\n#### 18", "annotation wrong"),
        ("It is 3*4=<<3*4=12>>12.\n#### 99", "final answer is not a result of the solution"),
        ("Let x be the number. Then 6x = 30, so x is five.\n#### 5", "no calculation in the solution"),
        ("It is <<4/0=0>>0.\n#### 0", "calculator fails"),
    ],
)
def test_unsound_solutions_are_rejected_but_the_question_stays_for_rl(tmp_path, answer, reason):
    (row,) = load(tmp_path, ("How many?", answer))
    with pytest.raises(Rejected, match=reason) as caught:
        GSM8K.trajectory(row, ENVIRONMENTS["calculator"]())
    assert caught.value.sft_only


def test_more_calls_than_the_environment_allows(tmp_path):
    answer = "a 1+1=<<1+1=2>>2, 2+1=<<2+1=3>>3, 3+1=<<3+1=4>>4\n#### 4"
    assert len(play(tmp_path, answer, max_turns=3)) == 7
    with pytest.raises(Rejected, match="more calls than the environment allows: needs 3"):
        play(tmp_path, answer, max_turns=2)


def test_rows_have_the_columns_and_bad_ones_a_reason(tmp_path):
    rows = load(
        tmp_path,
        ("A?", "so <<1000+200=1200>>1200\n#### 1,200"),
        ("B?", "no mark"),
        ("C?", "x\n#### many"),
        split="eval",
    )
    assert set(rows[0]) == {*COLUMNS, "solution"} and rows[0]["gold"] == "1200" and rows[0]["id"] == "gsm8k-test-0"
    assert [r.reason for r in rows[1:]] == ["no number behind ####"] * 2


def test_the_solution_never_reaches_the_environment(tmp_path):
    class Spy(ENVIRONMENTS["calculator"]):
        def reset(self, **row):
            self._seen = row

    (row,) = load(tmp_path, ("A?", "so <<1+1=2>>2\n#### 2"))
    spy = Spy.__new__(Spy)
    Spy.__init__(spy)
    GSM8K.trajectory(row, spy)
    assert "solution" not in spy._seen


def test_parquet_and_hub_layout(tmp_path):
    import pandas

    items = [{"question": "A?", "answer": "so <<1+1=2>>2\n#### 2"}]
    pandas.DataFrame(items).to_parquet(tmp_path / "train.parquet")
    assert [r["gold"] for r in GSM8K.load("train", tmp_path)] == ["2"]
    assert [r["gold"] for r in GSM8K.load("train", "nowhere", hub_id=str(tmp_path))] == ["2"]


def test_missing_or_broken_data_is_one_clear_error(tmp_path):
    with pytest.raises(FileNotFoundError, match="none of train.jsonl, train.parquet in .*\n.*recipes/demo.yaml"):
        list(GSM8K.load("train", tmp_path))
    (tmp_path / "train.jsonl").write_text('{"question": "A?", "ans')
    with pytest.raises(ValueError, match=r"train.jsonl \(23 bytes\) is not whole"):
        list(GSM8K.load("train", tmp_path))


@pytest.mark.parametrize(
    ("value", "stated", "same"),
    [
        (0.2, 0.2, True),
        (1 / 3, 0.33, True),
        (2 / 3, 0.66, True),
        (10 / 3, 4.0, True),
        (12.0, 13.0, False),
        (0.25, 0.2, True),
        (5.5, 7.0, False),
    ],
)
def test_rounding_that_a_sentence_may_do(value, stated, same):
    assert agrees(value, stated) is same


def test_split_steps_keeps_every_character():
    solution = "A 2*3=$<<2*3=6>>6 b.\nC 6 + 1 = 7 d."
    steps, tail = split_steps(solution)
    assert "".join(s.text for s in steps) + tail == solution.replace("<<2*3=6>>", "")


@pytest.mark.slow
def test_all_of_gsm8k_is_accounted_for(shared_data):
    env = ENVIRONMENTS["calculator"](max_turns=10)
    for split, total, expected in (
        ("train", 7473, {"no calculation in the solution": 82, "final answer is not a result of the solution": 19}),
        ("eval", 660, {"no calculation in the solution": 8, "final answer is not a result of the solution": 2}),
    ):
        rows = list(GSM8K.load(split, shared_data / "gsm8k"))
        assert len(rows) == total and not any(isinstance(r, Rejected) for r in rows)
        reasons = Counter()
        for row in rows:
            try:
                completion = GSM8K.trajectory(row, env)
            except Rejected as reason:
                reasons[reason.reason] += 1
                continue
            marked = row["solution"].count("<<")
            assert sum("tool_calls" in m for m in completion) >= marked
        assert reasons == expected

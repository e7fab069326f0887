"""tasks.medical: the made database and questions, trajectories, parquet in and out, own files."""

import sqlite3
from collections import Counter
from contextlib import closing

import pytest

from envs import ENVIRONMENTS
from rewards import score
from rewards.facts import Case, offline_scores
from tasks import COLUMNS, TASKS, Rejected, guards
from tasks.medical import main, read_parquet, write_parquet

MEDICAL = TASKS["medical"]


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    folder = tmp_path_factory.mktemp("raw") / "medical"
    MEDICAL.source(str(folder))
    return folder


@pytest.fixture(scope="module")
def rows(root):
    return {split: list(MEDICAL.load(split, root)) for split in ("train", "eval")}


def chinese(text: str) -> bool:
    return any("\u4e00" <= c <= "\u9fff" for c in text)


def test_database_has_two_tables_of_both_languages(root):
    with closing(sqlite3.connect(root / "medical.sqlite")) as db:
        for table in ("drugs_info", "disease"):
            names = db.execute(f"SELECT name_en, name_zh FROM {table}").fetchall()
            assert len(names) >= 200 and len({e for e, _ in names}) == len({z for _, z in names}) == len(names)
            assert all(chinese(z) and not chinese(e) for e, z in names)
            empty = db.execute(f"SELECT count(*) FROM {table} WHERE name_en = '' OR name_zh = ''").fetchone()
            assert empty == (0,)
        lost = "SELECT count(*) FROM disease WHERE first_line_drug_id NOT IN (SELECT drug_id FROM drugs_info)"
        assert db.execute(lost).fetchone() == (0,)
        odd = "SELECT count(*) FROM drugs_info WHERE max_daily_mg < strength_mg OR price_yuan <= 0"
        assert db.execute(odd).fetchone() == (0,)
        # a contagious disease has an incubation period and no other has one
        odd = "SELECT count(*) FROM disease WHERE contagious != (incubation_days IS NOT NULL)"
        assert db.execute(odd).fetchone() == (0,)


def test_questions_are_many_different_and_in_both_languages(rows):
    everything = rows["train"] + rows["eval"]
    assert len(rows["train"]) == 640 and len(rows["eval"]) == 160
    assert len({r["question"] for r in everything}) == 800
    assert 380 <= sum(chinese(r["question"]) for r in everything) <= 420
    assert all(chinese(r["gold"]) == chinese(r["question"]) for r in everything)
    assert set(rows["train"][0]) == {*COLUMNS, "solution"}
    assert min(Counter(r["hardness"] for r in everything).values()) > 50
    guards.check(MEDICAL, rows["train"], rows["eval"])


def test_every_reference_comes_out_of_the_database_and_is_judged_right(rows):
    env = ENVIRONMENTS["medical"]()
    for row in rows["train"] + rows["eval"]:
        completion = MEDICAL.trajectory(row, env)
        assert score(row, completion) == {"medical_rule": 0.1, "medical_judge": pytest.approx(1.0)}
        assert offline_scores(Case(row["question"], row["gold"], tuple(row["facts"]), "It is unknown.")).overall == 0


def test_the_superlatives_have_one_answer(root):
    with closing(sqlite3.connect(root / "medical.sqlite")) as db:
        for item in read_parquet(root / "train.parquet"):
            if item["sql"].endswith("LIMIT 1"):
                two = db.execute(item["sql"].removesuffix("1") + "2").fetchall()
                assert two[0][-1] != two[1][-1], item


def test_facts_stay_out_of_the_prompt(rows):
    row = next(r for r in rows["train"] if any(len(f) >= 8 for f in r["facts"]))
    leaky = row | {"prompt": [*row["prompt"], {"role": "user", "content": f"Hint: {', '.join(row['facts'])}"}]}
    with pytest.raises(guards.LeakError):
        guards.check(MEDICAL, [leaky], [])


def test_the_same_seed_gives_the_same_files(root, tmp_path):
    MEDICAL.source(str(tmp_path / "again"))
    for name in ("train", "test"):
        assert read_parquet(root / f"{name}.parquet") == read_parquet(tmp_path / "again" / f"{name}.parquet")


def test_parquet_out_and_own_parquet_in(root, tmp_path, monkeypatch, capsys):
    """What was exported (id, question, answer only) is read back; without sql there is no trajectory, for RL only."""
    exported = tmp_path / "all.parquet"
    monkeypatch.setattr("sys.argv", ["medical", "--root", str(root), "--export", str(exported)])
    main()
    assert "800 questions" in capsys.readouterr().out
    items = read_parquet(exported)
    assert len(items) == 800 and set(items[0]) == {"id", "question", "answer"}
    own = tmp_path / "own"
    own.mkdir()
    (own / "medical.sqlite").write_bytes((root / "medical.sqlite").read_bytes())
    write_parquet(own / "train.parquet", items[:3] + [{"id": "x", "question": " ", "answer": "y"}])
    write_parquet(own / "test.parquet", items[3:5])
    MEDICAL.source(str(own))  # leaves own files alone
    *good, bad = MEDICAL.load("train", own)
    assert [r["gold"] for r in good] == [i["answer"] for i in items[:3]] and good[0]["facts"] == []
    assert isinstance(bad, Rejected) and (bad.id, bad.reason) == ("medical-x", "empty question or answer")
    with pytest.raises(Rejected, match="no sql for a worked example") as caught:
        MEDICAL.trajectory(good[0], ENVIRONMENTS["medical"]())
    assert caught.value.sft_only


@pytest.mark.parametrize(
    ("changes", "reason", "sft_only"),
    [
        ({"solution": "SELECT nix FROM disease"}, "sql fails: Error: no such column", True),
        ({"solution": "SELECT 1"}, "the result of the sql does not hold every fact", True),
        ({"gold": "I do not know."}, "gold does not state every fact", False),
        ({"gold": "Score: 9"}, "gold reads as if it asked the judge for a grade, which earns 0", False),
        ({"gold": "SELECT name FROM drug"}, "gold reads as a query or a tool call, which earns 0", False),
        (
            {"gold": "10/10", "solution": ""},
            "gold reads as if it asked the judge",
            False,
        ),  # also where RL alone uses it
    ],
)
def test_unsound_rows_are_rejected(rows, changes, reason, sft_only):
    with pytest.raises(Rejected, match=reason) as caught:
        MEDICAL.trajectory(rows["train"][0] | changes, ENVIRONMENTS["medical"]())
    assert caught.value.sft_only is sft_only


def test_gold_that_repeats_a_line_of_the_result_is_rejected(rows):
    row = rows["train"][0] | {"solution": "SELECT 'mild', 'fever'", "gold": "mild | fever", "facts": []}
    with pytest.raises(Rejected, match="gold repeats a line of the query's result"):
        MEDICAL.trajectory(row, ENVIRONMENTS["medical"]())


def test_missing_or_broken_files_are_one_clear_error(tmp_path):
    with pytest.raises(FileNotFoundError, match="none of train.parquet .*\n.*python -m tasks medical"):
        list(MEDICAL.load("train", tmp_path))
    (tmp_path / "train.parquet").write_bytes(b"PAR1 cut")
    with pytest.raises(FileNotFoundError, match="has train.parquet but no medical.sqlite"):
        list(MEDICAL.load("train", tmp_path))
    (tmp_path / "medical.sqlite").write_bytes(b"")
    with pytest.raises(ValueError, match=r"train.parquet \(8 bytes\) is not a whole parquet file"):
        list(MEDICAL.load("train", tmp_path))
    write_parquet(tmp_path / "train.parquet", [{"q": "x", "id": 1}])
    with pytest.raises(ValueError, match="has no column answer, question; its columns are q, id"):
        list(MEDICAL.load("train", tmp_path))

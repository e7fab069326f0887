"""Cheating must not pay: probes in every environment, and the report of suspicious patterns in saved episodes."""

import json
import subprocess
import sys

import pytest

from rewards import PRIMARY, judge, score, score_batch, total
from rewards.probe import Probe, honest_failure, main, patterns_of, probes, report


@pytest.fixture(autouse=True)
def offline():
    judge.use(judge.JudgeConfig())
    yield
    judge._current = None


def row_of(kind: str, request) -> dict:
    return request.getfixturevalue({"sql": "sql_row", "calculator": "math_row", "medical": "medical_row"}[kind])


def quick(probe: Probe) -> bool:
    return probe.name != "query: infinite"  # takes its full time limit; test_an_endless_query_earns_nothing


@pytest.mark.parametrize("kind", PRIMARY)
def test_there_are_many_different_probes(kind, request):
    found = probes(row_of(kind, request))
    assert len(found) >= 40
    assert len({p.name for p in found}) == len(found)
    assert len({json.dumps(p.completion, default=str) for p in found}) >= 0.9 * len(found)


@pytest.mark.parametrize("kind", PRIMARY)
def test_no_probe_earns_more_than_an_honest_failure(kind, request):
    row = row_of(kind, request)
    bound = total(score(row, honest_failure(row)), kind)
    cheats = [p for p in probes(row) if quick(p)]
    scores = score_batch([row] * len(cheats), [p.completion for p in cheats])
    earned = {p.name: (total(s, kind), s) for p, s in zip(cheats, scores, strict=True)}
    assert not {name: e for name, e in earned.items() if e[0] > bound + 1e-9}
    assert not [name for name, (_, s) in earned.items() if s[PRIMARY[kind]] is None]  # nor escapes its verdict


@pytest.mark.parametrize("kind", PRIMARY)
def test_doing_nothing_earns_nothing(kind, request):
    row = row_of(kind, request)
    idle = [p for p in probes(row) if not any(m.get("tool_calls") for m in p.completion) and "gold" not in p.name]
    texts = [p for p in idle if "<answer>" not in str(p.completion) and not p.name.startswith("call as text")]
    assert len(texts) >= 10
    for probe, scores in zip(texts, score_batch([row] * len(texts), [p.completion for p in texts]), strict=True):
        assert total(scores, kind) == 0.0, probe.name


@pytest.mark.parametrize("kind", PRIMARY)
def test_being_right_earns_more_than_any_probe(kind, request):
    """The other side of the bound: the probes are not low because everything is."""
    row = row_of(kind, request)
    final = {
        "sql": f"```sql\n{row['gold']}\n```",
        "calculator": f"<answer>{row['gold']}</answer>",
        "medical": row["gold"],
    }[kind]
    failed = total(score(row, honest_failure(row)), kind)
    right = total(score(row, [{"role": "assistant", "content": final}]), kind)
    assert right >= failed + 0.3


@pytest.mark.slow
def test_an_endless_query_earns_nothing(sql_row):
    (probe,) = [p for p in probes(sql_row) if not quick(p)]
    scores = score(sql_row, probe.completion)
    assert scores["exec_match"] == scores["executes"] == 0.0


def test_a_row_that_cannot_tell_right_from_wrong_is_an_error(sql_row):
    with pytest.raises(ValueError, match="cannot tell right from wrong"):
        honest_failure(sql_row | {"gold": "SELECT nothing FROM nowhere LIMIT 1"})


@pytest.mark.slow
def test_no_probe_beats_an_honest_failure_on_real_rows(shared_data):
    """Not the rows with an empty result or one small number: official mode pays those to an empty query or a guess."""
    import random

    from envs.sqlite_exec import run_query

    root = shared_data / "spider"
    items = json.loads((root / "dev.json").read_text(encoding="utf-8"))
    checked = 0
    for item in random.Random(11).sample(items, 12):
        path = str(root / "database" / item["db_id"] / f"{item['db_id']}.sqlite")
        rows = run_query(path, item["query"]).rows
        if not rows or (len(rows) == 1 and rows[0][0] in range(10)):
            continue
        row = {"id": item["query"], "environment": "sql", "prompt": [], "db_path": path, "facts": []}
        row |= {"question": item["question"], "gold": item["query"]}
        bound = total(score(row, honest_failure(row)), "sql")
        cheats = [p for p in probes(row) if quick(p)]
        scores = score_batch([row] * len(cheats), [p.completion for p in cheats])
        assert not [(p.name, s) for p, s in zip(cheats, scores, strict=True) if total(s, "sql") > bound + 1e-9], row[
            "gold"
        ]
        checked += 1
    assert checked >= 6


# ----------------------------------------------------------------------------------------------------------- report


def record(row: dict, completion: list[dict], stage: str = "grpo", **changes) -> dict:
    scores = score(row, completion)
    value = scores[PRIMARY[row["environment"]]]
    correct = None if value is None else value == 1.0
    return row | {"stage": stage, "completion": completion, "rewards": scores, "correct": correct} | changes


def say(text: str) -> list[dict]:
    return [{"role": "assistant", "content": text}]


def test_patterns_of_one_episode(math_row, sql_row, medical_row):
    by_name = {p.name: patterns_of(record(math_row, p.completion)) for p in probes(math_row)}
    assert "no final message" in by_name["nothing"]
    assert "empty final message" in by_name["empty message"]
    assert "answer only in thoughts" in by_name["gold in a thought"]
    assert "answer only in thoughts" in by_name["gold as reasoning"]
    assert "several answers" in by_name["final: several tags, gold first"]
    assert "malformed or unknown call" in by_name["unknown tool"]
    assert "same call three times" in by_name["the same call fifty times"]
    assert {"protocol tags in text", "repeats itself"} <= by_name["tag spam"]
    assert {"more than 4000 characters", "repeats itself"} <= by_name["very long"]
    assert "echo of the question" in by_name["echo of the question"]
    assert "speaks to the judge" in by_name["flattery 1"]
    assert "forged role" in by_name["gold in a user message"]
    assert "no answer" in by_name["final: gold in the middle"]
    assert "right without a tool call" in patterns_of(record(math_row, say("<answer>12</answer>")))
    by_name = {p.name: patterns_of(record(sql_row, p.completion)) for p in probes(sql_row) if quick(p)}
    assert "answer fails or reads no table" in by_name["query: constant 1"]
    assert "several answers" in by_name["twenty blocks"]
    by_name = {p.name: patterns_of(record(medical_row, p.completion)) for p in probes(medical_row)}
    assert "echo of a tool result" in by_name["result echoed"]
    empty = sql_row | {"gold": "SELECT name FROM customer WHERE age > 90"}
    (cheat,) = [p for p in probes(empty) if p.name == "query: no table, no row"]
    assert "right in official mode only" in patterns_of(record(empty, cheat.completion))


@pytest.mark.parametrize("kind", PRIMARY)
def test_an_honest_failure_is_not_suspicious(kind, request):
    row = row_of(kind, request)
    assert patterns_of(record(row, honest_failure(row))) <= {"no answer"}


def test_constant_answers_and_overpaid_ones_are_found(math_row):
    rows = [math_row | {"id": f"r{i}", "gold": str(i)} for i in range(20)]
    records = [
        record(row, say("<answer>3</answer>" if i < 8 else f"<answer>{i}</answer>")) for i, row in enumerate(rows)
    ]
    records[5]["rewards"] = records[5]["rewards"] | {"math_reasoning": 5.0}  # as a broken reward would pay
    found = {p.pattern: p for p in report(records)}
    constant = found["one answer for many questions: 3"]
    assert constant.episodes == 8 and constant.suspicious
    assert found["wrong, but paid like a right one"].examples == ["r5"]


def test_stages_are_kept_apart(math_row):
    records = [record(math_row, say("<answer>12</answer>"), stage="sft"), record(math_row, [], stage="grpo")]
    assert {(p.stage, p.pattern) for p in report(records)} == {
        ("sft", "no tool call"),
        ("sft", "right without a tool call"),
        ("grpo", "no tool call"),
        ("grpo", "no final message"),
        ("grpo", "no answer"),
    }


def test_command_line(tmp_path, math_row, sql_row):
    path = tmp_path / "episodes.jsonl"
    records = [record(row, p.completion) for row in (math_row, sql_row) for p in probes(row) if quick(p)]
    path.write_text("".join(json.dumps(r) + "\n" for r in records), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "rewards.probe", "--episodes", str(path), "--stage", "grpo"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stderr == ""
    assert "! grpo sql" in done.stdout
    summary = json.loads(done.stdout.splitlines()[-1])
    assert summary["episodes"] == len(records) and {p["environment"] for p in summary["patterns"]} == {
        "calculator",
        "sql",
    }


def test_command_line_says_what_is_wrong(tmp_path, math_row, capsys):
    path = tmp_path / "episodes.jsonl"
    with pytest.raises(SystemExit, match="no file .*step5_eval.py"):
        main(["--episodes", str(path)])
    path.write_text('{"id": 1}\n')
    with pytest.raises(SystemExit, match="episodes.jsonl:1 has no environment, completion"):
        main(["--episodes", str(path)])
    path.write_text('{"id": \n')
    with pytest.raises(SystemExit, match="episodes.jsonl:1 is not JSON"):
        main(["--episodes", str(path)])
    path.write_text(json.dumps(record(math_row, [])) + "\n")
    with pytest.raises(SystemExit, match="no episodes of stage base"):
        main(["--episodes", str(path), "--stage", "base"])
    main(["--episodes", str(path)])
    assert "no tool call" in capsys.readouterr().out

"""Every engine plays the same episodes: batched, alone, through a real HTTP server; and what happens when a server fails."""

import dataclasses
import json

import pytest

from core.config import Agent, UserError
from tests.tiny_server import serve

pytestmark = pytest.mark.slow  # teaches a tiny model to call a tool, once for the file


@pytest.fixture(scope="module")
def taught(tmp_path_factory):
    """(model, tokenizer, rows): a tiny model that knows by heart episodes with one, two and three calls."""
    from core.models import load_model, load_tokenizer
    from tests.speaking_model import build_speaking_model

    home, rows = tmp_path_factory.mktemp("engines"), [_row(n) for n in range(3)]
    lines = [row["prompt"] + _episode(row) for row in rows]
    source = str(build_speaking_model(home / "tiny", home / "raw", conversations=lines))
    return load_model(source).eval(), load_tokenizer(source), rows


def _row(n: int) -> dict:
    question = f"Start with {10 + 7 * n}. " + "Then double it. " * (1 + n % 3) + "What do you get?"
    gold = str((10 + 7 * n) * 2 ** (1 + n % 3))
    prompt = [{"role": "system", "content": "Use the calculator."}, {"role": "user", "content": question}]
    return {"id": f"double-{n}", "task": "double", "environment": "calculator", "question": question, "gold": gold,
            "prompt": prompt, "db_id": "", "db_path": "", "hardness": "easy", "difficulty": 0.0, "facts": []}  # fmt: skip


def _episode(row: dict) -> list[dict]:
    from tasks.base import call, result, say

    value, out = 10 + 7 * int(row["id"][-1]), []
    for _ in range(1 + int(row["id"][-1]) % 3):
        out += [call("calculator", {"expression": f"{value} * 2"}), result("calculator", str(2 * value))]
        value *= 2
    return [*out, say(f"<answer>{value}</answer>")]


AGENT = Agent(max_turns=3, max_completion_length=320)


def episodes(rows, tokenizer=None, agent=AGENT, samples=(0,)):
    from core.rollout import Episode
    from envs import CalculatorEnv

    return [Episode(row, CalculatorEnv(), tokenizer, agent, sample=s) for row in rows for s in samples]


def played(engine, found):
    return {(e.row["id"], e.sample): e for batch in engine.play(found) for e in batch}


def test_batched_alone_and_served_are_the_same_episodes(taught):
    from core.endpoint import EndpointEngine
    from core.rollout import TransformersEngine

    model, tokenizer, rows = taught
    batched = played(TransformersEngine(model, tokenizer, 4), episodes(rows, tokenizer))
    alone = played(TransformersEngine(model, tokenizer, 1), episodes(rows, tokenizer))
    with serve(TransformersEngine(model, tokenizer, 1)) as url:
        served = played(EndpointEngine(url, "tiny", concurrency=3), episodes(rows))
    assert {sum(m["role"] == "tool" for m in e.completion) for e in batched.values()} == {1, 2, 3}
    for key, e in batched.items():
        assert e.completion_ids == alone[key].completion_ids and e.completion == served[key].completion
        assert served[key].tokens == sum(e.mask) and not served[key].error  # counted by the server


def test_turn_limits(taught):
    from core.rollout import TransformersEngine

    model, tokenizer, rows = taught
    engine = TransformersEngine(model, tokenizer, 4)
    for turns in (0, 1, 2):
        agent = dataclasses.replace(AGENT, max_turns=turns)
        for e in played(engine, episodes(rows, tokenizer, agent)).values():
            assert sum(m["role"] == "tool" for m in e.completion) <= turns
            assert ("<tool_call>" in tokenizer.decode(e.prompt_ids)) == (turns > 0)


def test_sampling_does_not_hang_on_the_batch(taught):
    from core.rollout import TransformersEngine

    model, tokenizer, rows = taught
    samples = (1, 2, 3)
    whole = played(TransformersEngine(model, tokenizer, 9, 1.5), episodes(rows, tokenizer, samples=samples))
    resumed = played(TransformersEngine(model, tokenizer, 2, 1.5), episodes(rows[1:], tokenizer, samples=samples))
    assert all(whole[key].completion_ids == e.completion_ids for key, e in resumed.items())
    assert len({tuple(whole[rows[0]["id"], s].completion_ids) for s in samples}) > 1
    other = played(TransformersEngine(model, tokenizer, 9, 1.5, seed=1), episodes(rows, tokenizer, samples=samples))
    assert any(whole[key].completion_ids != e.completion_ids for key, e in other.items())


def test_what_a_server_fails_at_is_undecided_and_tried_again(taught, tmp_path):
    import rewards
    from core.endpoint import EndpointEngine
    from core.episodes import Variant, evaluate, plan, resume
    from core.rollout import TransformersEngine

    model, tokenizer, rows = taught
    path, bad = tmp_path / "episodes.jsonl", True
    wanted = plan("tiny", [], rows, AGENT, [Variant(3)], 0)

    def run(url):
        engine = EndpointEngine(url, "tiny", concurrency=2)
        engine.client = engine.client.with_options(max_retries=0)
        done = resume(path, wanted)
        fresh = set(wanted) - set(done)
        make = lambda identity: episodes([r for r in rows if r["id"] == identity[3]])[0]  # noqa: E731
        evaluate(wanted, done, make, lambda: engine, rewards, path, {}, say=lambda _: None)
        return done, fresh

    with serve(
        TransformersEngine(model, tokenizer, 1), fails=lambda b: bad and "Start with 24" in str(b["messages"])
    ) as url:
        done, _ = run(url)
        failed = done["tiny", 3, 0, "double-2"]
        assert failed["correct"] is None and "out of memory" in failed["error"]
        assert sum(r["correct"] is True for r in done.values()) == 2
        bad = False
        done, fresh = run(url)
        assert fresh == {("tiny", 3, 0, "double-2")} and all(r["correct"] for r in done.values())
        assert len(path.read_text().splitlines()) == 3


@pytest.mark.parametrize("reply", ['{"id": "1", "choices": [{"ind', '{"id": "1", "choices": []}', "null"])
def test_half_a_reply_is_nobodys_wrong_answer(taught, reply):
    from core.endpoint import EndpointEngine
    from core.rollout import TransformersEngine

    model, tokenizer, rows = taught
    with serve(TransformersEngine(model, tokenizer, 1), fails=lambda body: reply) as url:
        assert all(e.error and not e.completion for e in played(EndpointEngine(url, "tiny"), episodes(rows)).values())


def test_no_server_and_no_model_end_at_once(taught):
    from core.endpoint import EndpointEngine
    from core.rollout import TransformersEngine

    model, tokenizer, rows = taught
    with serve(TransformersEngine(model, tokenizer, 1)) as url:
        with pytest.raises(UserError, match="refuses model 'other'"):
            played(EndpointEngine(url, "other"), episodes(rows))
    gone = EndpointEngine(url, "tiny")
    gone.client = gone.client.with_options(max_retries=0)
    with pytest.raises(UserError, match="no server answers"):
        played(gone, episodes(rows))


def test_prompts_of_a_server_are_compared(taught):
    from core.chat import prompt_ids, schemas_of
    from core.rollout import TransformersEngine
    from core.served import compare_prompt
    from envs import CalculatorEnv

    model, tokenizer, rows = taught
    tools = schemas_of(CalculatorEnv())
    ids = prompt_ids(tokenizer, rows[0]["prompt"], tools)
    with serve(TransformersEngine(model, tokenizer, 1)) as url:
        assert "ids are those of training" in compare_prompt(url, "tiny", rows[0]["prompt"], tools, ids)
        assert "differs from training at token 5" in compare_prompt(
            url, "tiny", rows[0]["prompt"], tools, [*ids[:5], 7, *ids[6:]]
        )
        assert "not compared" in compare_prompt(url, "nobody", rows[0]["prompt"], tools, ids)


def test_resume_takes_over_what_is_still_true(tmp_path, math_row):
    from core.episodes import Variant, plan, resume

    rows = [math_row | {"id": str(i)} for i in range(3)]
    path = tmp_path / "episodes.jsonl"
    wanted = plan("sft", ["w"], rows, AGENT, [Variant(3), Variant(1)], 0)
    lines = [
        {"stage": i[0], "max_turns": i[1], "sample": i[2], "id": i[3], "key": key, "completion": "a\u2028b"}
        | {"error": "", "correct": False}
        for i, key in wanted.items()
    ]
    path.write_text("".join(json.dumps(x, ensure_ascii=False) + "\n" for x in lines) + '{"stage": "sf')
    assert set(resume(path, wanted)) == set(wanted)
    assert set(resume(path, plan("sft", ["w"], rows[:2], AGENT, [Variant(3)], 0))) == {("sft", 3, 0, x) for x in "01"}
    assert len(path.read_text().split("\n")) == 3 and set(resume(path, wanted)) == set(wanted)  # nothing was lost
    said, other = [], plan("sft", ["other weights"], rows, AGENT, [Variant(3)], 0)
    assert not resume(path, other, say=said.append) and path.read_text() == ""
    assert said[0].startswith(f"3 episodes of other weights or settings wait in {tmp_path}/earlier.jsonl")
    assert set(resume(path, wanted)) == set(wanted)  # going back takes them up again
    changed = [rows[0] | {"gold": "13"}, *rows[1:]]
    assert len(resume(path, plan("sft", ["w"], changed, AGENT, [Variant(1)], 0))) == 2
    assert (
        not plan("sft", ["w"], rows, AGENT, [Variant(1)], 0).items()
        & plan("sft", ["w"], rows, AGENT, [Variant(1, 0, 0.7)], 0).items()
    )
    undecided, failed = lines[0] | {"correct": None}, lines[1] | {"error": "the server went away"}
    path.write_text("".join(json.dumps(x) + "\n" for x in (undecided, failed, *lines[2:])))
    path.with_name("earlier.jsonl").unlink()
    text = path.read_text()
    assert set(resume(path, wanted)) == set(list(wanted)[2:])  # nobody's wrong answers are played again
    path.write_text(text)
    assert set(resume(path, other | wanted, ["base"])) == set(list(wanted)[2:])
    assert not resume(path, wanted, ["sft"]) and not resume(path, wanted)  # --restart drops them, whatever their key
    path.write_text('{"id": 2, "st\n{"id": 1}\n')
    with pytest.raises(
        UserError, match="is not JSON"
    ):  # damage in the middle is no crash of ours: never silently skipped
        resume(path, wanted)


def test_templates_tools_and_loading(tmp_path, math_row, sql_row):
    """Other tool schemas are other episodes of their environment; loading the engine is none of an episode's seconds."""
    import time

    import rewards
    from core.episodes import Variant, evaluate, plan

    rows, tools = [math_row, sql_row], {"calculator": [{"name": "a"}], "sql": [{"name": "b"}]}
    one, two = (plan("m", [], rows, AGENT, [Variant(3), Variant(0)], 0, None, t) for t in (tools, tools | {"sql": []}))
    assert {i for i in one if one[i] != two[i]} == {("m", 3, 0, sql_row["id"])}

    class Quick:
        def play(self, found):
            for e in found:
                e.accept_message({"role": "assistant", "content": "<answer>12</answer>"})
                yield [e]

    def load():
        time.sleep(1)
        return Quick()

    done, wanted = {}, plan("m", [], [math_row], AGENT, [Variant(3)], 0)
    make = lambda _: episodes([math_row])[0]  # noqa: E731
    evaluate(wanted, done, make, load, rewards, tmp_path / "episodes.jsonl", {}, say=lambda _: None)
    (record,) = done.values()
    assert record["seconds"] < 0.9 and record["judge"] == "" and record["correct"]


def test_a_column_named_error_is_no_error():
    from core.episodes import tells_error

    assert not tells_error("error_code | n\n7 | 2\n(1 row)") and not tells_error("Errors\n3\n(1 row)")
    assert tells_error("Error: no such column: nam") and tells_error("{'error': 'Tool x not found.'}")


def test_other_ids_name_the_way_out():
    from core.episodes import assert_same_prompts

    record = {"vocabulary": "v", "max_turns": 3, "id": "a", "prompt_ids": [1, 2]}
    assert_same_prompts({"base": [record], "sft": [record, record | {"vocabulary": "w", "prompt_ids": [9]}]})
    with pytest.raises(UserError, match="a: stage sft was asked with other ids than base.*--restart"):
        assert_same_prompts({"base": [record], "sft": [record | {"prompt_ids": [1, 3]}]})


def test_another_judge_makes_other_verdicts(math_row, monkeypatch):
    import rewards
    from core.episodes import Variant, plan
    from rewards import judge

    free_text = math_row | {"environment": "medical"}
    keys = {}
    for name, config in {"offline": judge.JudgeConfig(), "asked": judge.JudgeConfig("http://judge/v1", "qwen")}.items():
        monkeypatch.setattr(judge, "_current", judge.Judge(config))
        rows = [math_row | {"id": "code"}, free_text | {"id": "text"}]
        keys[name] = plan("sft", ["w"], rows, AGENT, [Variant(3)], 0, rewards)
    same = {i[3] for i in keys["offline"] if keys["offline"][i] == keys["asked"][i]}
    assert same == {"code"}

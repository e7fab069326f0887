"""The rollout's bookkeeping with a real tokenizer and a scripted policy: ids, mask, budget, and what a bad call gets."""

import json

import pytest

from core.config import Agent

pytestmark = pytest.mark.slow  # builds a tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    from core.models import load_tokenizer
    from tests.tiny_model import build_tiny_model

    home = tmp_path_factory.mktemp("rollout")
    return load_tokenizer(str(build_tiny_model(home / "tiny", home / "raw")))


def play(tokenizer, row, turns, agent=None):
    """Feed scripted turns to an episode, as an engine would."""
    from core.rollout import Episode
    from envs import ENVIRONMENTS

    episode = Episode(row, ENVIRONMENTS[row["environment"]](), tokenizer, agent or Agent())
    for turn in turns:
        if episode.accept(tokenizer(turn, add_special_tokens=False)["input_ids"][: episode.budget]) is None:
            break
    return episode


def call(tool, **arguments):
    return f"<tool_call>\n{json.dumps({'name': tool, 'arguments': arguments})}\n</tool_call><|im_end|>"


def test_ids_and_mask_are_those_of_sft(tokenizer, sql_row):
    from core.chat import render

    query = "SELECT name FROM customer WHERE city = 'Paris'"
    episode = play(tokenizer, sql_row, ["Let me look.\n" + call("execute_sql", query=query), "Ann and Dora.<|im_end|>"])
    assert [m["role"] for m in episode.completion] == ["assistant", "tool", "assistant"]
    assert "Ann" in episode.completion[1]["content"] and not episode.truncated
    ids, mask = render(tokenizer, sql_row["prompt"] + episode.completion, episode.tools)
    played = episode.prompt_ids + episode.completion_ids
    assert played == ids[: len(played)] and mask[len(episode.prompt_ids) : len(played)] == episode.mask


def test_what_a_policy_gets_wrong_is_an_answer_to_it(tokenizer, math_row):
    turns = [call("calculatr", expression="1"), call("calculator", expr="1"), call("calculator", expression="12+6")]
    episode = play(tokenizer, math_row, [*turns, "<answer>18</answer><|im_end|>"])
    results = [m["content"] for m in episode.completion if m["role"] == "tool"]
    assert "calculatr not found" in results[0] and "unexpected keyword" in results[1] and results[2] == "18"
    assert episode.turns == 4


@pytest.mark.parametrize(
    "text",
    [
        '{"name": "calculator", "arguments": ' + "[" * 3000,
        '{"name": "calculator", "arguments": {"expression": ' + "[" * 300 + "]" * 300 + "}}",
        r'{"name": "\ud800", "arguments": {}}',
        r'{"name": "calculator", "arguments": {"expression": "\ud800"}}',
    ],
)
def test_a_call_that_no_file_can_hold_is_answered_and_stored(tokenizer, math_row, tmp_path, text):
    from trl.chat_template_utils import parse_response

    from core.artifacts import read_jsonl, write_jsonl

    turn = f"<tool_call>\n{text}\n</tool_call><|im_end|>"
    episode = play(tokenizer, math_row, [turn, "<answer>18</answer><|im_end|>"], Agent(max_completion_length=9000))
    write_jsonl(tmp_path / "kept.jsonl", [{"completion": episode.completion}])
    assert read_jsonl(tmp_path / "kept.jsonl") == [{"completion": episode.completion}]
    assert episode.completion[0]["role"] == "assistant" and "18" not in str(episode.completion[:2])
    ids = tokenizer(turn, add_special_tokens=False)["input_ids"]
    assert parse_response(tokenizer, ids, prefix=episode.prompt_ids, tools=episode.tools) == episode.completion[0]


def test_a_result_must_leave_the_turns_before_it_alone(tokenizer, math_row):
    from core.config import UserError

    template = tokenizer.chat_template
    try:
        tokenizer.chat_template = "{{- messages | length }}" + template
        with pytest.raises(UserError, match="not prefix-preserving"):
            play(tokenizer, math_row, [call("calculator", expression="1")])
    finally:
        tokenizer.chat_template = template


def test_turn_limit_and_budget(tokenizer, math_row):
    again = call("calculator", expression="2*3")
    episode = play(tokenizer, math_row, [again] * 9, Agent(max_turns=2))
    assert [m["role"] for m in episode.completion] == ["assistant", "tool"] * 2 + ["assistant"]
    episode = play(tokenizer, math_row, [again] * 9, Agent(max_turns=9, max_completion_length=120))
    assert len(episode.completion_ids) == len(episode.mask) <= 120 and episode.truncated
    assert episode.completion[-1]["role"] == "assistant"  # a result that does not fit is dropped, as TRL does


def test_cut_turn_is_marked(tokenizer, math_row):
    episode = play(tokenizer, math_row, ["a long story without end " * 50], Agent(max_completion_length=40))
    assert episode.truncated and len(episode.completion_ids) == 40


def test_self_check_finds_a_template_that_differs(tokenizer, math_row):
    from core.chat import schemas_of
    from core.checks import check_rendering
    from core.config import UserError
    from envs import CalculatorEnv

    row = math_row | {"messages": math_row["prompt"] + [{"role": "assistant", "content": "<answer>12</answer>"}]}
    check_rendering(tokenizer, row, schemas_of(CalculatorEnv()))
    template = tokenizer.chat_template
    try:
        tokenizer.chat_template = template.replace("{{- turn_end }}\n{%- endmacro", "{%- endmacro")  # no stop token
        with pytest.raises(UserError, match="stop token"):
            check_rendering(tokenizer, row, schemas_of(CalculatorEnv()))
        tokenizer.chat_template = template.replace("message.content or ''", "(message.content or '') | upper")
        with pytest.raises(UserError, match="parser reads"):
            check_rendering(tokenizer, row, schemas_of(CalculatorEnv()))
    finally:
        tokenizer.chat_template = template


def test_llama_family_renders_its_own_markers():
    from jinja2 import Environment

    from core.chat import template_for

    text = template_for("llama3", training=False)
    out = (
        Environment()
        .from_string(text)
        .render(messages=[{"role": "user", "content": "hi"}], add_generation_prompt=True, bos_token="<B>")
    )
    assert out.startswith("<B><|start_header_id|>system<|end_header_id|>\n\n") and "<|im_" not in out
    assert out.endswith("hi<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n")

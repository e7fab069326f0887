"""Does a server speak as the model was trained? Ten seconds with OpenAI's client, before anyone builds on it.

Reads   data/<run>/eval.jsonl: its first questions, with the tools of training
Checks  tool calls come back as calls and not as text; results are read; streaming says the same; turns end where they should

    python serving/smoke.py --config recipes/demo.yaml --endpoint http://localhost:8000/v1 --served_model agent
"""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # run from anywhere

from core.config import UserError, load_recipe_args, run_step

PARSER = (
    "Start it with its parser (vLLM: --enable-auto-tool-choice --tool-call-parser hermes; llama.cpp: --jinja) and with the "
    "exported chat template"
)


def add_arguments(parser):
    parser.add_argument("--endpoint", required=True, metavar="URL", help="e.g. http://localhost:8000/v1")
    parser.add_argument("--served_model", required=True, metavar="NAME", help="the model's name at the endpoint")
    parser.add_argument("--questions", type=int, default=5, help="how many are asked until one is answered with a tool")


def main():
    recipe, args = load_recipe_args(__doc__, add_arguments)
    from openai import OpenAI, OpenAIError

    from core.artifacts import read_jsonl
    from core.endpoint import to_openai
    from core.rollout import Episode
    from envs import ENVIRONMENTS
    from tasks.prepare import environment_limits

    rows = read_jsonl(recipe.data_dir / "eval.jsonl", f"python step2_prepare_data.py {args.words}")
    client = OpenAI(base_url=args.endpoint, api_key=os.environ.get("OPENAI_API_KEY", "none"), timeout=300)
    for row in rows[: args.questions]:
        env = ENVIRONMENTS[row["environment"]](**environment_limits(recipe, row["environment"]))
        episode = Episode(row, env, None, recipe.agent)
        options = {"model": args.served_model, "tools": episode.tools, "temperature": 0.0}
        options["max_tokens"] = recipe.agent.max_completion_length
        print(f"asked       {row['question']}")
        try:
            used_tool = play(client, episode, options, to_openai)
        except OpenAIError as error:
            raise UserError(f"{args.endpoint} as '{args.served_model}': {error}") from error
        if used_tool:
            print("passed")
            return
    raise UserError(
        f"no tool call in {args.questions} answers: an untrained model, or not the trained template. {PARSER}"
    )


def play(client, episode, options: dict, to_openai) -> bool:
    """One conversation to its end, every turn asked twice, whole and streamed; whether a tool was used."""
    while True:
        asked = options | {"messages": to_openai(episode.row["prompt"] + episode.completion)}
        message = whole(client, asked)
        check(message)
        if (other := streamed(client, asked)) != message:
            raise UserError(f"streaming says something else.\n  whole:    {message}\n  streamed: {other}")
        show(message)
        results = episode.accept_message(message)
        if not results:
            return any(m["role"] == "tool" for m in episode.completion)
        for result in results:
            print(f"result      {result['content']}")


def whole(client, asked: dict) -> dict:
    from core.endpoint import from_openai

    return from_openai(client.chat.completions.create(**asked).choices[0].message)


def streamed(client, asked: dict) -> dict:
    """The same message out of its pieces, put together by OpenAI's client."""
    from openai.lib.streaming.chat import ChatCompletionStreamState

    from core.endpoint import from_openai

    state = ChatCompletionStreamState()
    for chunk in client.chat.completions.create(**asked, stream=True):
        state.handle_chunk(chunk)
    return from_openai(state.get_final_completion().choices[0].message)


def check(message: dict) -> None:
    text = message["content"]
    if "<tool_call>" in text:
        raise UserError(f"the call came back as text: {text!r}. {PARSER}")
    for marker in ("<|im_end|>", "<|im_start|>", "<|eot_id|>", "<|start_header_id|>", "<tool_response>"):
        if marker in text:
            raise UserError(f"the turn did not end at its end token, {marker} is in the text: {text!r}")


def show(message: dict) -> None:
    if message["content"].strip():
        print(f"said        {message['content'].strip()}")
    for call in message.get("tool_calls") or []:
        print(f"called      {call['function']['name']} {call['function']['arguments']}")


if __name__ == "__main__":
    run_step(main)

"""What we tell vLLM, read by vLLM itself: its argument parsers, its settings, its tool parser. None of it needs a GPU."""

import json
import os
import re
import shlex
from pathlib import Path

import pytest
import torch
import yaml

from tests.conversations import CONVERSATIONS, sql

if not torch.cuda.is_available():  # vLLM must be told what it is for where it finds no GPU, and before it is imported
    os.environ.setdefault("VLLM_TARGET_DEVICE", "cpu")
pytest.importorskip("vllm", reason="vLLM is not installed: ./step1_env.sh --gpu")
pytestmark = pytest.mark.slow  # importing it takes a while

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def serve():
    """vllm serve's own reading of a command line."""
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser()
    make_arg_parser(parser.add_subparsers(dest="subparser").add_parser("serve"))

    def read(words):
        args = parser.parse_args(["serve", *words])
        return args.model_tag, args

    return read


def commands() -> dict[str, list[str]]:
    """Every `vllm serve` line of the documents, and the compose file's."""
    services = yaml.safe_load((ROOT / "serving/docker-compose.yaml").read_text())["services"]
    found = {"compose": services["vllm"]["command"]}
    for name in ("README.md", "README.zh-CN.md", "core/export.py"):
        for n, line in enumerate(re.findall(r"vllm serve ([^`\n\"]+)", (ROOT / name).read_text())):
            found[f"{name} {n}"] = shlex.split(line.replace("{path}", "DIR"))
    assert len(found) >= 6
    return found


@pytest.mark.parametrize("name", commands())
def test_the_commands_we_print_are_vllms(serve, name):
    words = commands()[name]
    folder, args = serve(words)
    assert folder == words[0] and args.enable_auto_tool_choice and args.tool_call_parser == "hermes"
    from vllm.tool_parsers import ToolParserManager

    assert ToolParserManager.get_tool_parser(args.tool_call_parser)


def test_slurm_starts_trls_server_with_its_arguments():
    from transformers import HfArgumentParser
    from trl.scripts.vllm_serve import ScriptArguments

    text = (ROOT / "recipes/accelerate/slurm.sh").read_text() + (ROOT / "docs/scaling.md").read_text()
    found = re.findall(r"trl vllm-serve (.+?)(?: &)?$", text, re.M)
    assert len(found) >= 2
    for line in found:
        words = shlex.split(line.replace("${SERVER_GPUS:-1}", "1"), comments=True)
        asked = HfArgumentParser(ScriptArguments).parse_args_into_dataclasses(words)[0]
        assert asked.model and asked.data_parallel_size == asked.tensor_parallel_size == 1  # dense models


def test_the_engine_asks_for_settings_that_there_are(tmp_path, monkeypatch):
    """core/vllm_engine.py's own call, as far as the weights: vLLM's settings take it."""
    import vllm
    from vllm.engine.arg_utils import EngineArgs

    from core import vllm_engine

    asked = {}

    class Stop(Exception):
        pass

    def llm(model, **options):
        asked["args"] = EngineArgs(model=model, **options)
        raise Stop

    monkeypatch.setattr(vllm, "LLM", llm)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(Stop):
        vllm_engine.load_llm(str(tmp_path), 512)
    assert asked["args"].max_model_len == 512 and asked["args"].enable_prefix_caching


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_turn_is_asked_for_in_vllms_terms(temperature):
    """One turn of real episodes: the prompts and the SamplingParams are vLLM's; only the sampling stands in."""
    from types import SimpleNamespace

    from core.config import Agent
    from core.rollout import Episode
    from core.vllm_engine import VLLMEngine
    from envs import CalculatorEnv
    from tests.speaking_model import rows

    asked = []

    def generate(prompts, params, use_tqdm):
        asked.extend(zip(prompts, params, strict=True))
        outputs = [SimpleNamespace(token_ids=[7])]
        return [SimpleNamespace(prompt_token_ids=p["prompt_token_ids"], outputs=outputs) for p in prompts]

    tokenizer = SimpleNamespace(eos_token_id=7)
    agent = Agent(max_completion_length=50)
    episodes = [Episode(row, CalculatorEnv(), None, agent) for row in rows()]
    for episode in episodes:
        episode.prompt_ids, episode.read = [1, 2, 3], lambda ids: {"role": "assistant", "content": ""}
    engine = VLLMEngine(SimpleNamespace(generate=generate), tokenizer, temperature)
    assert engine._turn(episodes) == []
    for prompt, params in asked:
        assert prompt == {"prompt_token_ids": [1, 2, 3]}
        assert (params.max_tokens, params.stop_token_ids, params.temperature) == (50, [7], temperature)
        assert (params.seed is None) == (temperature == 0)


def test_the_hermes_parser_reads_calls_as_ours_does(tmp_path):
    """The text a policy writes, through vLLM's parser whole and as it streams, and through the one that trained it."""
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.tool_parsers import ToolParserManager

    from core.chat import parse, prompt_ids, render
    from core.models import load_tokenizer
    from tests.tiny_model import build_tiny_model

    tokenizer = load_tokenizer(str(build_tiny_model(tmp_path / "tiny", tmp_path / "raw")))
    request = ChatCompletionRequest(model="m", messages=[{"role": "user", "content": "?"}])
    compared = 0
    for messages, tools in CONVERSATIONS.values():
        for reply in (sql("SELECT \"a\", 'b' FROM t WHERE x < 3 -- é\n"), sql("SELECT 1", "Let me look.")):
            start = prompt_ids(tokenizer, messages, tools)
            ids = render(tokenizer, [*messages, reply], tools)[0][len(start) :]
            text = tokenizer.decode(ids).removesuffix("<|im_end|>\n").removesuffix("<|im_end|>")
            ours = parse(tokenizer, ids, start, tools)["tool_calls"]
            parser = ToolParserManager.get_tool_parser("hermes")(tokenizer)
            theirs = parser.extract_tool_calls(text, request).tool_calls
            assert [(c.function.name, json.loads(c.function.arguments)) for c in theirs] == [
                (c["function"]["name"], c["function"]["arguments"]) for c in ours
            ]
            compared += 1
    assert compared >= 20

"""A real llama.cpp server on an exported file: the trained prompts, tool calls, streaming, stops, and the smoke script."""

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from core.config import Agent
from tests.conversations import CONVERSATIONS

ROOT = Path(__file__).resolve().parents[1]
needs_llama = pytest.mark.skipif(importlib.util.find_spec("xllamacpp") is None, reason="xllamacpp is not installed")


@pytest.fixture(scope="module")
def server(speaking):
    from core.llama_server import llama_server

    with llama_server(speaking / "f16.gguf") as server:
        yield server


def post(server, path, body):
    import httpx

    reply = httpx.post(server.url + path, json=body, timeout=60)
    assert reply.status_code == 200, reply.text
    return reply.json()


@pytest.mark.slow
@needs_llama
def test_llama_cpp_renders_as_trained(server):
    """Its own Jinja engine reads the template out of the GGUF: the same text for every conversation, byte by byte."""
    from core.endpoint import to_openai
    from tests.test_ollama import trained

    for name, (messages, tools) in CONVERSATIONS.items():
        body = {"messages": to_openai(messages)} | ({"tools": tools} if tools else {})
        text = post(server, "/apply-template", body)["prompt"]
        assert text == trained("chatml", messages, tools, add_generation_prompt=True), name


@pytest.mark.slow
@needs_llama
def test_episodes_are_those_of_transformers(server, speaking):
    """Same words, calls, thoughts and results, though every turn goes over HTTP and is rendered and parsed anew."""
    import rewards
    from core.endpoint import EndpointEngine
    from core.models import load_model, load_tokenizer
    from core.rollout import Episode, TransformersEngine
    from core.verify import said
    from envs import CalculatorEnv
    from tests.speaking_model import rows

    tokenizer = load_tokenizer(str(speaking / "hf"))
    engines = {
        "transformers": (TransformersEngine(load_model(str(speaking / "hf")), tokenizer), tokenizer),
        "llama.cpp": (EndpointEngine(f"{server.url}/v1", "tiny", concurrency=2), None),
    }
    played = {}
    for name, (engine, tokenizer) in engines.items():
        episodes = [Episode(row, CalculatorEnv(), tokenizer, Agent()) for row in rows()]
        list(engine.play(episodes))
        assert not any(e.error for e in episodes)
        scores = rewards.score_batch([e.row for e in episodes], [e.completion for e in episodes])
        assert [s["math_accuracy"] for s in scores] == [1.0] * len(episodes)
        assert sum("reasoning_content" in e.completion[0] for e in episodes) == 2
        played[name] = [said({"completion": e.completion}) for e in episodes]
    assert played["transformers"] == played["llama.cpp"]


@pytest.mark.slow
@needs_llama
def test_stream_and_stop(server):
    from openai import OpenAI

    from core.chat import schemas_of
    from envs import CalculatorEnv
    from tests.speaking_model import messages, rows

    client = OpenAI(base_url=f"{server.url}/v1", api_key="none")
    row = rows()[0]
    prompt = {"model": "tiny", "messages": row["prompt"], "tools": schemas_of(CalculatorEnv()), "temperature": 0}
    pieces = [c.choices[0] for c in client.chat.completions.create(**prompt, stream=True) if c.choices]
    text = "".join(p.delta.content or "" for p in pieces)
    calls = [c for p in pieces for c in p.delta.tool_calls or []]
    assert text.strip() == "Add them." and "<tool_call>" not in text and len(pieces) > 5
    assert json.loads("".join(c.function.arguments or "" for c in calls)) == {"expression": "12 + 30"}
    assert pieces[-1].finish_reason == "tool_calls"

    whole = client.chat.completions.create(**prompt, stop=["them"]).choices[0]
    assert whole.finish_reason == "stop" and whole.message.content == "Add "
    cut = client.chat.completions.create(**prompt, max_tokens=2).choices[0]
    assert cut.finish_reason == "length"
    from core.endpoint import to_openai

    prompt["messages"] = to_openai(messages(row)[:-1])  # after the tool's result the turn ends by its end token
    last = client.chat.completions.create(**prompt).choices[0]
    assert last.finish_reason == "stop" and last.message.content == "<answer>42</answer>"


def smoke(folder, server):
    command = [sys.executable, "serving/smoke.py", "--config", "recipes/ci.yaml", "--data_root", folder]
    command += ["--endpoint", f"{server.url}/v1", "--served_model", "tiny"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.slow
@needs_llama
def test_smoke_script(server, speaking, tmp_path):
    from core.artifacts import write_jsonl
    from core.llama_server import llama_server
    from tests.speaking_model import rows

    write_jsonl(tmp_path / "ci" / "eval.jsonl", rows())
    code, out = smoke(tmp_path, server)
    assert code == 0 and "called      calculator" in out and "result      42" in out and out.endswith("passed\n")
    with llama_server(without_tools(speaking, tmp_path)) as other:
        code, out = smoke(tmp_path, other)
    assert code == 1 and "Traceback" not in out and "exported chat template" in out


def without_tools(speaking, tmp_path):
    """The same weights with a template that knows no tools, as a careless export would have them."""
    import shutil

    from core.gguf import convert

    folder = shutil.copytree(speaking / "hf", tmp_path / "careless")
    text = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
    (folder / "chat_template.jinja").write_text(text)
    return convert(folder, tmp_path / "careless.gguf", "f16")


@pytest.mark.slow
@needs_llama
def test_a_file_that_is_no_model_is_one_clear_error(tmp_path):
    from core.config import UserError
    from core.llama_server import llama_server

    (tmp_path / "cut.gguf").write_bytes(b"GGUF" + bytes(100))
    for file, says in (("cut.gguf", "does not load"), ("none.gguf", "no file")):
        with pytest.raises(UserError, match=says), llama_server(tmp_path / file):
            pass


def test_compose_file_names_the_versions_and_the_parser_of_the_project():
    services = yaml.safe_load((ROOT / "serving" / "docker-compose.yaml").read_text())["services"]
    version = re.search(r"^vllm==(\S+)", (ROOT / "requirements-gpu.txt").read_text(), re.M)[1]
    assert services["vllm"]["image"] == f"vllm/vllm-openai:v{version}"
    assert {"--enable-auto-tool-choice", "--tool-call-parser=hermes"} <= set(services["vllm"]["command"])
    assert all(port.startswith("127.0.0.1:") for s in services.values() for port in s["ports"])

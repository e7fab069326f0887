"""The Modelfile: its TEMPLATE, run by Go's own text/template on Ollama's data, gives what was trained, byte for byte."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from core.chat import FAMILIES, template_for
from core.config import UserError
from core.ollama import modelfile, ollama_template, write_ollama
from tests.conversations import CONVERSATIONS, say, user

BOS = {"chatml": "", "llama3": "<|begin_of_text|>"}  # llama.cpp adds it, so it is not in the Go template


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    if shutil.which("go") is None:
        pytest.skip("no Go compiler: apt-get install golang-go")
    target = tmp_path_factory.mktemp("go") / "render"
    subprocess.run(["go", "build", "-o", target, Path(__file__).parent / "ollama" / "main.go"], check=True)
    return target


def go(program, family, conversations):
    def message(m):
        return {**m, "thinking": m.get("reasoning_content", "")}

    given = [{"messages": [message(m) for m in messages], "tools": tools} for messages, tools in conversations]
    text = json.dumps({"template": ollama_template(family), "conversations": given})
    done = subprocess.run([program], input=text, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def trained(family, messages, tools, **kwargs):
    """What training renders, through transformers' own Jinja."""
    from transformers.utils.chat_template_utils import render_jinja_template

    texts, _ = render_jinja_template(
        [messages], tools=tools, chat_template=template_for(family), bos_token=BOS[family], **kwargs
    )
    return texts[0]


@pytest.mark.slow  # the Go compiler, and transformers' import
@pytest.mark.parametrize("family", FAMILIES)
def test_renders_as_trained(program, family):
    out = go(program, family, CONVERSATIONS.values())
    for (name, (messages, tools)), text in zip(CONVERSATIONS.items(), out["texts"], strict=True):
        assert BOS[family] + text == trained(family, messages, tools, add_generation_prompt=True), name
    assert out["tag"] == "<tool_call>" and out["think"] == ["<think>", "</think>"]  # what Ollama's parsers look for


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_words_begun_by_the_client_stay_open(program, family):
    messages = [user("hi"), say("The answer is")]
    (text,) = go(program, family, [(messages, None)])["texts"]
    assert BOS[family] + text == trained(family, messages, None, continue_final_message=True)


def test_modelfile():
    text = modelfile("llama3", "model-f16.gguf", 1024, 0.0, "Du bist kurz.\nSehr.")
    assert text.startswith('FROM ./model-f16.gguf\nTEMPLATE """{{- /*')
    assert '\nPARAMETER stop "<|eot_id|>"\n' in text and '\nPARAMETER stop "<|start_header_id|>"\n' in text
    settings = "PARAMETER num_ctx 1024\nPARAMETER temperature 0\nPARAMETER repeat_penalty 1\n"
    assert text.endswith(settings + 'SYSTEM """Du bist kurz.\nSehr."""\n')
    assert "<|im_" not in text and text.count('"""') == 4
    assert "SYSTEM" not in modelfile("chatml", "a.gguf", 8, 0.7)
    plain = "PARAMETER temperature 0.7\nPARAMETER repeat_penalty 1\nPARAMETER top_k 0\nPARAMETER top_p 1\nPARAMETER min_p 0\n"
    assert modelfile("chatml", "a.gguf", 8, 0.7).endswith(plain)
    for prompt in ('say """ twice', 'say "so"'):
        with pytest.raises(UserError, match="system prompt contains"):
            modelfile("chatml", "a.gguf", 8, 0.7, prompt)


@pytest.mark.slow
def test_folder_holds_model_and_modelfile(tmp_path):
    from tests.tiny_model import build_tiny_model

    hf = build_tiny_model(tmp_path / "hf", tmp_path / "raw")
    gguf = tmp_path / "Tiny-f16.gguf"
    gguf.write_bytes(b"GGUF")
    command = write_ollama(hf, gguf, tmp_path / "ollama", 2048, 0.0)
    assert command == f"ollama create tiny-f16 -f {tmp_path / 'ollama' / 'Modelfile'}"
    assert (tmp_path / "ollama" / "Tiny-f16.gguf").samefile(gguf)
    assert "<|im_start|>" in (tmp_path / "ollama" / "Modelfile").read_text()

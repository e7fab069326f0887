"""A server that is odd, wrong or hangs: what EndpointEngine and core/served.py make of it."""

import http.server
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from core.config import Agent, UserError
from core.endpoint import EndpointEngine
from core.rollout import Episode
from core.served import compare_prompt
from envs import CalculatorEnv

ROOT = Path(__file__).resolve().parent.parent
CALL = {"id": "1", "type": "function", "function": {"name": "calculator", "arguments": '{"expression": "6*7"}'}}


@pytest.fixture
def server():
    """Answers every POST with `server.reply`, a text or what makes one; `server.asked` holds the requests."""

    class Odd(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            server.asked.append(body)
            data = (server.reply(self.path, body) if callable(server.reply) else server.reply).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Odd)
    server.asked, server.reply = [], ""
    server.url = f"http://127.0.0.1:{server.server_port}/v1"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def reply(usage=None, calls=(), text="<answer>12</answer>") -> str:
    message = {"role": "assistant", "content": text} | ({"tool_calls": list(calls)} if calls else {})
    choice = {"index": 0, "message": message, "finish_reason": "stop"}
    return json.dumps({"id": "1", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice]}
                      | ({} if usage is None else {"usage": usage}))  # fmt: skip


def episode(row: dict, agent: Agent | None = None, **more) -> Episode:
    return Episode(row, CalculatorEnv(), None, agent or Agent(), **more)


def play(url: str, row: dict) -> Episode:
    ((found,),) = EndpointEngine(url, "m").play([episode(row)])
    return found


@pytest.mark.parametrize("usage", [{}, {"prompt_tokens": None, "completion_tokens": 3}, {"prompt_tokens": 4}])
def test_incomplete_counts_do_not_void_an_answer(server, math_row, usage):
    server.reply = reply(usage)
    found = play(server.url, math_row)
    assert found.error == "" and found.completion[-1]["content"] == "<answer>12</answer>" and found.tokens is None


def test_a_reply_nested_without_end_is_undecided(server, math_row):
    server.reply = "[" * 200_000
    assert "RecursionError" in play(server.url, math_row).error


@pytest.mark.parametrize("text", ["[1]", "null", '"x"', "[" * 200_000, '{"tokens": 3, "prompt": 7, "usage": [1]}'])
def test_prompts_of_an_odd_server_are_not_compared(server, text):
    server.reply = text
    assert "not compared" in compare_prompt(server.url, "m", [{"role": "user", "content": "hi"}], [], [1])


@pytest.mark.parametrize(
    "url", ["http://localhost:80x/v1", "localhost:8000/v1", "http://", "http://localhost:99999/v1"]
)
def test_what_is_no_address_is_said(url):
    with pytest.raises(UserError, match="is no address .*http://localhost:8000/v1"):
        EndpointEngine(url, "m")
    with pytest.raises(UserError, match="is no address"):
        compare_prompt(url, "m", [], [], [1])


def test_play_that_is_left_asks_and_runs_nothing_more(server, math_row):
    """Ctrl-C closes the generator: episodes under way end with their turn, and the engine can be used again."""
    gate, said = threading.Event(), []

    def slow(path, body):
        if len(body["messages"]) > 2:  # the second turn of any episode
            gate.wait(10)
        return reply(calls=[CALL] if len(body["messages"]) < 9 else ())

    server.reply = slow
    engine = EndpointEngine(server.url, "m", concurrency=3)
    quick = episode(math_row, Agent(max_turns=0))
    playing = engine.play([quick, *(episode(math_row, on_message=said.append) for _ in range(6))])
    next(playing)
    while len(server.asked) < 5:  # two or three wait at the gate
        time.sleep(0.01)
    playing.close()
    time.sleep(0.3)
    before = len(server.asked), len(said)
    gate.set()
    time.sleep(0.7)
    assert (len(server.asked), len(said)) == before
    server.reply = reply()
    assert [e.error for batch in engine.play([episode(math_row)]) for e in batch] == [""]


def test_ctrl_c_does_not_wait_for_a_server_that_hangs(server, math_row, tmp_path):
    server.reply = lambda path, body: time.sleep(60) or ""
    (tmp_path / "row.json").write_text(json.dumps(math_row))
    program = (
        "import json, signal, sys\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n"  # background jobs ignore it
        "from core.config import Agent, run_step\nfrom core.endpoint import EndpointEngine\nfrom core.rollout import Episode\n"
        "from envs import CalculatorEnv\nrow = json.load(open(sys.argv[2]))\n"
        "found = [Episode(row, CalculatorEnv(), None, Agent()) for _ in range(3)]\n"
        "run_step(lambda: list(EndpointEngine(sys.argv[1], 'm').play(found)))\n"
    )
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    words = [sys.executable, "-c", program, server.url, str(tmp_path / "row.json")]
    process = subprocess.Popen(words, cwd=ROOT, env=env, stderr=subprocess.PIPE, text=True)
    try:
        until = time.monotonic() + 90
        while len(server.asked) < 3 and time.monotonic() < until:
            time.sleep(0.05)
        began = time.monotonic()
        process.send_signal(signal.SIGINT)
        _, error = process.communicate(timeout=30)
        assert process.returncode == 130 and "interrupted" in error and time.monotonic() - began < 10, error
    finally:
        process.kill()

"""chat.py as a user meets it: a session on standard input, with a scripted server."""

import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def chat(*words: str, say: str = "", code: int = 0) -> str:
    env = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "NO_PROXY": "127.0.0.1"}
    words = [sys.executable, "chat.py", *words]
    done = subprocess.run(words, cwd=ROOT, env=env, input=say, capture_output=True, text=True, timeout=600)
    out = done.stdout + done.stderr
    assert done.returncode == code and "Traceback" not in out, out[-3000:]
    return out


@pytest.fixture
def server():
    """Speaks the protocol; plays a policy that looks first and then says what it was told. Keeps what it was asked."""

    class Policy(BaseHTTPRequestHandler):
        def do_POST(self):
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            server.asked.append(asked)
            last = asked["messages"][-1]
            message = {"role": "assistant", "content": "It says: " + last["content"].splitlines()[-1]}
            if last["role"] == "user":
                call = {"name": "execute_sql", "arguments": json.dumps({"query": "SELECT count(*) AS n FROM customer"})}
                message = {"role": "assistant", "content": "", "tool_calls": [
                    {"id": "1", "type": "function", "function": call}]}  # fmt: skip
            choice = {"index": 0, "message": message, "finish_reason": "stop"}
            body = json.dumps({"id": "1", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice]})
            self.send_response(500 if server.down else 200)
            self.send_header("Content-Type", "application/json")
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Policy)
    server.asked, server.down = [], False
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


@pytest.mark.slow
def test_a_session_with_a_server(server, shop_db):
    url = ["--endpoint", f"http://127.0.0.1:{server.server_port}/v1", "--served_model", "m", "--db", shop_db]
    lines = ["/help", "How many customers?", "And how many now?", "/reset", "Customers?", "/sql SELECT name FROM customer",
             "/sql DROP TABLE customer", "/schema", "/nonsense"]  # fmt: skip
    out = chat(*url, say="\n".join(lines))
    assert out.count("-> execute_sql: SELECT count(*)") == 3 and out.count("It says: (1 row)") == 3
    assert "Dora" in out and "Error" in out and "CREATE TABLE" in out and "no command /nonsense" in out
    questions = [[m["content"] for m in a["messages"] if m["role"] == "user"] for a in server.asked]
    assert [len(q) for q in questions] == [1, 1, 2, 2, 1, 1]  # /reset forgets
    assert all(a["messages"][0]["role"] == "system" for a in server.asked)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        ([], 2, "--db FILE.sqlite or --task"),
        (["--db", "no.sqlite"], 1, "no database file 'no.sqlite'"),
        (["--task", "spider"], 1, "pass --db"),
        (["--task", "mini_math", "--stage", "nowhere"], 1, "'nowhere' is neither"),
        (["--task", "mini_math", "--endpoint", "http://127.0.0.1:9/v1"], 2, "--served_model"),
    ],
)
def test_bad_input_is_one_clear_error(words, code, says):
    assert says in chat(*words, code=code)


def test_a_database_that_goes_away_does_not_end_the_session(shop_db, monkeypatch, capsys):
    import chat

    def lines():
        yield "/schema"
        Path(shop_db).unlink()
        yield from ("/schema", "/sql SELECT 1", "How many customers?")
        Path(shop_db).write_text("no database at all, but long enough for a header\n" * 99)
        yield from ("/schema", "How many customers?", "/help")
        raise EOFError

    said = lines()
    monkeypatch.setattr("builtins.input", lambda _: next(said))
    monkeypatch.setattr(chat, "open_engine", lambda *_: (None, None))
    monkeypatch.setattr(sys, "argv", ["chat.py", "--config", str(ROOT / "recipes/ci.yaml"), "--db", shop_db])
    chat.main()
    out = capsys.readouterr().out
    assert out.count(f"error: cannot read {shop_db}: the file is gone; put the database back there") == 3
    assert out.count("file is not a database") == 2 and out.rstrip().endswith("leave (as Ctrl-D)")


def session(engine, shop_db):
    import argparse

    import chat
    from core.config import load_recipe

    args = argparse.Namespace(db=shop_db, task=None)
    return chat.Session(load_recipe(ROOT / "recipes/ci.yaml"), args, None, engine)


class Scripted:
    """Plays what it is told to, and keeps the prompts."""

    def __init__(self, *answers):
        self.answers, self.prompts = list(answers), []

    def play(self, episodes):
        for e in episodes:
            self.prompts.append(e.row["prompt"])
            self.answers.pop(0)(e)
            yield [e]


def calls(text=""):
    call = {"type": "function", "function": {"name": "execute_sql", "arguments": {"query": "SELECT 1"}}}
    return {"role": "assistant", "content": text, "tool_calls": [call]}


def test_a_call_without_result_is_no_part_of_the_history(shop_db):
    """An answer that ends at the turn limit: servers refuse the conversation ever after."""

    def to_the_limit(text):
        def play(e):
            while e.accept_message(calls(text)):
                pass

        return play

    engine = Scripted(
        to_the_limit("Let me see."), to_the_limit(""), lambda e: e.accept_message({"role": "assistant", "content": "3"})
    )
    talk = session(engine, shop_db)
    for _ in range(3):
        talk.ask("How many?")
    for prompt in engine.prompts[1:]:
        for message, after in zip(prompt, prompt[1:], strict=False):
            assert not message.get("tool_calls") or after["role"] == "tool"
    assert engine.prompts[1][-2]["content"] == "Let me see." and engine.prompts[2][-2]["role"] == "tool"


def test_a_stopped_answer_says_nothing_more(shop_db, capsys):
    kept = []

    def stopped(e):
        kept.append(e)
        raise KeyboardInterrupt

    talk = session(Scripted(stopped), shop_db)
    with pytest.raises(KeyboardInterrupt):
        talk.ask("How many?")
    kept[0].accept_message(calls("late words"))  # its request was under way
    assert "late words" not in capsys.readouterr().out and talk.before == []


def test_a_conversation_that_a_server_refuses_names_reset(shop_db):
    from core.config import UserError

    def refused(e):
        e.error = "BadRequestError: Error code: 400 - maximum context length is 2048 tokens"

    answer = lambda e: e.accept_message({"role": "assistant", "content": "3"})  # noqa: E731
    talk = session(Scripted(refused, answer, refused), shop_db)
    with pytest.raises(UserError, match=r"tokens$"):  # nothing to forget
        talk.ask("How many?")
    talk.ask("How many?")
    with pytest.raises(UserError, match="/reset forgets"):
        talk.ask("And now?")


@pytest.mark.slow
def test_a_recipe_is_a_manifests_own(tmp_path):
    """An exported folder carries what its agent was trained with: chat uses that when no recipe is named."""
    import argparse

    from chat import usual
    from core.config import load_recipe

    recipe = load_recipe(ROOT / "recipes/ci.yaml", ["--agent.max_rows", "7"])
    (tmp_path / "manifest.json").write_text(json.dumps({"recipe": recipe.to_dict()}))
    for stage in (tmp_path, tmp_path / "merged"):
        args = argparse.Namespace(stage=str(stage), endpoint=None, db=None)
        assert load_recipe(usual(args)) == recipe

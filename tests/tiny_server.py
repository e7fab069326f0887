"""A real OpenAI-compatible server in a thread, in front of a tiny model: what vLLM and llama-server are to EndpointEngine."""

import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from core.chat import prompt_ids
from core.config import Agent
from core.rollout import Episode
from envs import CalculatorEnv


@contextmanager
def serve(engine, name: str = "tiny", fails=lambda body: False):
    """Yields the URL. `fails(body)`: answer this request with status 500, or with the text given."""
    tokenizer, lock = engine.tokenizer, threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            ids = prompt_ids(tokenizer, [_ours(m) for m in body["messages"]], body.get("tools"))
            if body["model"] != name:
                return self.reply(404, {"error": {"message": f"no model {body['model']}"}})
            if self.path == "/tokenize":
                return self.reply(200, {"tokens": ids, "count": len(ids)})
            if isinstance(instead := fails(body), str):
                return self.reply(200, instead)
            if instead:
                return self.reply(500, {"error": {"message": "out of memory"}})
            agent = Agent(max_turns=0, max_completion_length=body["max_tokens"])  # the client runs the tools
            turn = Episode({"id": "served", "prompt": []}, CalculatorEnv(), None, agent)
            turn.tokenizer, turn.prompt_ids, turn.tools = tokenizer, ids, body.get("tools")
            with lock:
                list(engine.play([turn]))
            (message,) = turn.completion
            for n, call in enumerate(message.get("tool_calls", ())):
                call["id"] = f"call_{n}"
                call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
            choice = {"index": 0, "message": message, "finish_reason": "length" if turn.truncated else "stop"}
            usage = {"prompt_tokens": len(ids), "completion_tokens": turn.tokens}
            usage["total_tokens"] = sum(usage.values())
            head = {"id": "1", "object": "chat.completion", "created": 0, "model": name}
            self.reply(200, head | {"choices": [choice], "usage": usage})

        def reply(self, status: int, body: dict | str) -> None:
            data = (body if isinstance(body, str) else json.dumps(body)).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *words):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1"
    finally:
        server.shutdown()
        server.server_close()


def _ours(message: dict) -> dict:
    """A message of the API as the template reads it: arguments as an object again."""
    calls = [c["function"] for c in message.get("tool_calls") or ()]
    calls = [{"function": {"name": f["name"], "arguments": json.loads(f["arguments"])}} for f in calls]
    return {"role": message["role"], "content": message["content"]} | ({"tool_calls": calls} if calls else {})

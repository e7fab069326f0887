"""Episodes played by a server that speaks OpenAI's protocol, and its messages: ours there and back.

core/rollout.py has the episodes, and the loop for local weights.
"""

import threading
import time
from collections.abc import Iterator
from queue import Empty, SimpleQueue
from urllib.parse import urlsplit

from core.chat import storable, visible
from core.config import UserError
from core.rollout import Episode, stream_of


class EndpointEngine:
    """Plays episodes against an OpenAI-compatible server (vLLM, Ollama, llama-server, a hosted API).

    What the server cannot do is nobody's wrong answer: the episode carries `error`. A server that is not there, does not
    know the model, or has stopped answering ends the evaluation; the same command goes on where it ended. The prompt's
    ids are the server's own (core/served.py compares them). `budget` is kept by the server's counts, one tool result late.
    """

    def __init__(self, url: str, model: str, concurrency: int = 8, temperature: float = 0.0, seed: int = 0):
        import os

        from openai import OpenAI

        check_url(url)
        self.client = OpenAI(base_url=url, api_key=os.environ.get("OPENAI_API_KEY", "none"), max_retries=3, timeout=300)
        self.url, self.model, self.concurrency = url, model, concurrency
        self.temperature, self.seed = temperature, seed

    def play(self, episodes: list[Episode]) -> Iterator[list[Episode]]:
        """Yields episodes one by one as they finish. Left early (Ctrl-C, an error), no request and no tool call follows."""
        todo, done, stop = SimpleQueue(), SimpleQueue(), threading.Event()
        failed = played = finished = 0
        for episode in episodes:
            todo.put(episode)
        for _ in range(min(self.concurrency, len(episodes))):  # daemons: at exit nobody waits for a server that hangs
            threading.Thread(target=self._work, args=(todo, done, stop), daemon=True).start()
        try:
            while finished < len(episodes):
                episode = done.get()
                if isinstance(episode, BaseException):
                    raise episode
                finished += 1
                played += not episode.error
                failed = failed + 1 if episode.error else 0
                if "APIConnectionError" in episode.error and not played:
                    raise UserError(
                        f"no server answers at {self.url} ({episode.error}). Start it, or correct --endpoint"
                    )
                if failed > 3 * self.concurrency:
                    raise UserError(
                        f"{self.url} has failed {failed} times in a row ({episode.error}). "
                        "The same command goes on from here once it works"
                    )
                yield [episode]
        finally:
            stop.set()
            if finished < len(episodes):
                self._hang_up()

    def _work(self, todo: SimpleQueue, done: SimpleQueue, stop: threading.Event) -> None:
        while not stop.is_set():
            try:
                episode = todo.get_nowait()
            except Empty:
                return
            try:
                done.put(self._play_one(episode, stop))
            except BaseException as error:  # raised where the episodes are waited for
                done.put(error)

    def _hang_up(self) -> None:
        """Close the connections, so that requests under way are not tried again; the next `play` has new ones."""
        from openai import DefaultHttpxClient

        left, self.client = self.client, self.client.copy(http_client=DefaultHttpxClient(timeout=self.client.timeout))
        left.close()

    def _play_one(self, episode: Episode, stop: threading.Event) -> Episode:
        import openai

        began, limit, prompt, used = time.perf_counter(), episode.agent.max_completion_length, None, 0
        try:
            while not stop.is_set():
                reply = self._ask(episode, limit - used)
                if stop.is_set():
                    break
                choice, counts = reply.choices[0], _counts(reply.usage)
                if counts:
                    prompt = counts[0] if prompt is None else prompt
                    used = counts[0] - prompt + counts[1]
                    episode.usage = (episode.usage or 0) + counts[1]
                episode.truncated = choice.finish_reason == "length"
                results = episode.accept_message(from_openai(choice.message))
                if results and used >= limit:
                    del episode.completion[-len(results) :]
                    episode.truncated = True
                if not results or used >= limit:
                    break
        except (openai.AuthenticationError, openai.PermissionDeniedError, openai.NotFoundError) as error:
            raise UserError(
                f"{self.url} refuses model '{self.model}' ({error}). See {self.url}/models for its names; a key goes "
                "into OPENAI_API_KEY"
            ) from error
        except (
            openai.OpenAIError,
            ValueError,
            IndexError,
            TypeError,
            AttributeError,
            RecursionError,
        ) as error:  # the last five: a reply that is no JSON, or without a message
            episode.error = f"{type(error).__name__}: {error}"[:300]
        episode.seconds = time.perf_counter() - began
        return episode

    def _ask(self, episode: Episode, budget: int):
        options = {"tools": episode.tools} if episode.tools else {}
        if self.temperature:
            options |= {"seed": stream_of(self.seed, episode).getrandbits(31), "top_p": 1.0}
        return self.client.chat.completions.create(
            model=self.model,
            messages=to_openai(episode.row["prompt"] + episode.completion),
            temperature=self.temperature,
            max_tokens=max(1, budget),
            **options,
        )


def _counts(usage) -> tuple[int, int] | None:
    """(tokens of the prompt, tokens written) as the server counted them; None where it did not, or only in part."""
    found = getattr(usage, "prompt_tokens", None), getattr(usage, "completion_tokens", None)
    return found if all(type(n) is int for n in found) else None


def check_url(url: str) -> None:
    found = urlsplit(url)
    try:
        if found.scheme in ("http", "https") and found.hostname and found.port != 0:  # port: ValueError if it is none
            return
        why = "no http:// or https:// with a host"
    except ValueError as error:
        why = str(error)
    raise UserError(f"--endpoint {url} is no address ({why}): write it like http://localhost:8000/v1")


def to_openai(messages: list[dict]) -> list[dict]:
    """Our messages as the API wants them: arguments as JSON text, calls and results joined by ids."""
    import json

    out, ids = [], []
    for n, message in enumerate(visible(messages)):
        if message["role"] == "tool":
            out.append({"role": "tool", "tool_call_id": ids.pop(0), "content": message["content"]})
        elif message.get("tool_calls"):
            ids = [f"call_{n}_{k}" for k in range(len(message["tool_calls"]))]
            calls = [
                {
                    "id": i,
                    "type": "function",
                    "function": {
                        "name": c["function"]["name"],
                        "arguments": json.dumps(c["function"]["arguments"], ensure_ascii=False),
                    },
                }
                for i, c in zip(ids, message["tool_calls"], strict=True)
            ]
            out.append({"role": "assistant", "content": message["content"], "tool_calls": calls})
        else:
            out.append({"role": message["role"], "content": message["content"]})
        if thought := message.get("reasoning_content"):  # llama.cpp's name for it, vLLM's and Ollama's
            out[-1] |= {"reasoning_content": thought, "reasoning": thought}
    return out


def from_openai(message) -> dict:
    """An assistant message of the API as ours; arguments that are no JSON object become a call the tool refuses."""
    import json

    out = {"role": "assistant", "content": message.content or ""}
    if thought := getattr(message, "reasoning_content", None) or getattr(message, "reasoning", None):
        out["reasoning_content"] = thought  # part of the turn: without it the next prompt is not the one trained on
    calls = []
    for call in message.tool_calls or []:
        try:
            arguments = storable(json.loads(call.function.arguments or "{}"))
        except (ValueError, RecursionError):
            arguments = None
        if not isinstance(arguments, dict):
            arguments = {"arguments": call.function.arguments}
        calls.append({"type": "function", "function": {"name": call.function.name, "arguments": arguments}})
    return storable(out | {"tool_calls": calls} if calls else out)

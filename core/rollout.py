"""The multi-turn loop: play episodes in batches, with real tools, on any engine.

One loop for the data step's checks, evaluation and chat, with the semantics of TRL's tool loop (same parser, same
suffix ids, same budget rule), so that what is measured is what was trained. Tokens the policy wrote are never
tokenised again; `mask` says which ids of an episode the policy wrote.
"""

import random
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field
from typing import Any

from core.chat import parse, prompt_ids, storable, tool_suffix, tools_of, visible
from core.config import Agent, UserError
from core.decode import forward, read_prompts, sample
from core.kv_cache import without_gaps
from core.tools import pool, run_calls
from core.workflow import prompt_tools, respond

PATIENCE = 0.25  # seconds that a batch waits for tools; the rows whose tools take longer are left out meanwhile


@dataclass
class Episode:
    """One conversation being played; `accept` is called with every finished turn.

    An engine that plays many takes its three steps apart: `read` and `feed` use the tokenizer, `accept_message` runs
    the tools and may be called in a thread.
    """

    row: dict
    env: Any
    tokenizer: Any
    agent: Agent
    on_message: Callable[[dict], None] | None = None
    sample: int = 0  # which of several episodes of this row; 0 where there is one
    prompt_ids: list[int] = field(default_factory=list)
    completion_ids: list[int] = field(default_factory=list)
    mask: list[int] = field(default_factory=list)
    completion: list[dict] = field(default_factory=list)  # the messages after the prompt
    turns: int = 0  # assistant turns
    truncated: bool = False  # out of tokens before the model ended its turn
    seconds: float = 0.0
    usage: int | None = None  # tokens the policy wrote, as a server counted them
    error: str = ""  # why the engine could not play it to its end: nobody's wrong answer

    def __post_init__(self):
        self.env.reset(**self.row)
        self.tools = prompt_tools(self.agent, self.env)
        if self.tokenizer is not None:
            self.prompt_ids = prompt_ids(self.tokenizer, self.row["prompt"], self.tools or None)

    @property
    def tokens(self) -> int | None:
        """Tokens the policy wrote; None where the engine did not say."""
        return sum(self.mask) if self.mask else self.usage

    @property
    def budget(self) -> int:
        return self.agent.max_completion_length - len(self.completion_ids)

    def accept(self, ids: list[int]) -> list[int] | None:
        """Take the ids of one turn; return the tool results' ids to feed next, or None when the episode is over."""
        return self.feed(self.accept_message(self.read(ids)))

    def read(self, ids: list[int]) -> dict:
        """Take the ids of one turn; the assistant message in them."""
        message = parse(self.tokenizer, ids, self.prompt_ids + self.completion_ids, self.tools)
        self.completion_ids += ids
        self.mask += [1] * len(ids)
        self.truncated = not ids or ids[-1] != self.tokenizer.eos_token_id
        return message

    def feed(self, results: list[dict]) -> list[int] | None:
        """The ids of the tool results, or None when there are none or no room for them: the episode is over."""
        if not results:
            return None
        suffix = tool_suffix(self.tokenizer, results)
        if len(suffix) >= self.budget:  # no room for the result and an answer: TRL drops the result too
            del self.completion[-len(results) :]
            self.truncated = True
            return None
        self.completion_ids += suffix
        self.mask += [0] * len(suffix)
        return suffix

    def accept_message(self, message: dict) -> list[dict]:
        """Append an assistant message and run its tool calls, up to the turn limit; returns what the model reads next."""
        found = self._workflow_turn(message) if self.agent.workflow else self._tool_turn(message)
        self.error = self.error or getattr(self.env, "trouble", "")
        return found

    def _workflow_turn(self, message: dict) -> list[dict]:
        replies = respond(self.completion, message, self.env, self.agent.max_turns)
        for each in (message, *replies):
            self._append(each)
        self.turns += 1
        return visible(replies)

    def _tool_turn(self, message: dict) -> list[dict]:
        self._append(message)
        calls = message.get("tool_calls") or []
        self.turns += 1
        if not calls or self.turns > self.agent.max_turns:
            return []
        done = run_calls(tools_of(self.env), calls, time.monotonic() + 2 * self.agent.timeout)
        results = [{"role": "tool", "name": name, "content": _told(result)} for name, _, result in done]
        for result in results:
            self._append(result)
        return results

    def _append(self, message: dict) -> None:
        self.completion.append(message)
        if self.on_message:
            self.on_message(message)


def accept_all(episodes: list[Episode], turns: list[list[int]]) -> list[list[int] | None]:
    """`accept` for one turn of each episode, with their tools side by side."""
    running = [pool().submit(e.accept_message, e.read(ids)) for e, ids in zip(episodes, turns, strict=True)]
    return [e.feed(future.result()) for e, future in zip(episodes, running, strict=True)]


def _told(result) -> str:
    """A tool's result as the model reads it; what went wrong in TRL's words."""
    return str({"error": str(result)} if isinstance(result, Exception) else result)


class TransformersEngine:
    """Plays episodes with a transformers model, token by token, in batches that share one KV cache.

    Rows of a batch may be in different turns: a row whose turn has ended is fed its tool result from a queue while the
    others go on writing, so nothing is ever prefilled twice and a slow dialogue delays nobody. Finished rows leave. The
    tools of a step run side by side; a row that waits for a slow one is fed masked padding while the others write.
    """

    def __init__(self, model, tokenizer, batch_size: int = 16, temperature: float = 0.0, seed: int = 0):
        self.model, self.tokenizer, self.batch_size = model.eval(), tokenizer, batch_size
        self.temperature, self.seed = temperature, seed

    def play(self, episodes: list[Episode]) -> Iterator[list[Episode]]:
        """Finish all episodes; yields some as they are over. Neighbours share most of their prompt, so it is read once."""
        order = sorted(episodes, key=lambda e: e.prompt_ids)
        for start in range(0, len(order), self.batch_size):
            began = time.perf_counter()
            for done in self._play_batch(order[start : start + self.batch_size]):
                for episode in done:
                    episode.seconds = (time.perf_counter() - began) / len(done)
                yield done
                began = time.perf_counter()

    def _play_batch(self, batch: list[Episode]) -> Iterator[list[Episode]]:
        """A quarter of the batch at a time, the last ones together."""
        import torch

        eos, pad, device = self.tokenizer.eos_token_id, self.tokenizer.pad_token_id, self.model.device
        active, queues, written = list(range(len(batch))), [[] for _ in batch], [[] for _ in batch]
        streams = [stream_of(self.seed, e) for e in batch]
        waiting: dict[int, Future] = {}  # rows whose tools run
        done: list[Episode] = []
        with torch.no_grad():
            logits, mask, cache = read_prompts(self.model, [e.prompt_ids for e in batch], pad)
            while True:
                writing = {i for i in active if not queues[i] and i not in waiting}
                points = [streams[i].random() if i in writing else 0.0 for i in active]
                sampled, fresh, over = sample(logits, self.temperature, points=points).tolist(), [], set()
                for slot, i in enumerate(active):
                    if i in writing:
                        written[i].append(sampled[slot])
                        if sampled[slot] == eos or len(written[i]) >= batch[i].budget:
                            waiting[i] = pool().submit(batch[i].accept_message, batch[i].read(written[i]))
                            fresh.append(waiting[i])
                        else:
                            queues[i] = [sampled[slot]]
                wait(fresh, PATIENCE)
                if len(waiting) == len(active):
                    wait(waiting.values(), return_when=FIRST_COMPLETED)
                for i in [i for i, future in waiting.items() if future.done()]:
                    suffix = batch[i].feed(waiting.pop(i).result())
                    if suffix is None:
                        over.add(i)
                    else:
                        queues[i] = [written[i][-1], *suffix]
                    written[i] = []
                if over:
                    done += [batch[i] for i in sorted(over)]
                    alive = [slot for slot, i in enumerate(active) if i not in over]
                    if not alive:
                        yield done
                        return
                    if 4 * len(done) >= len(batch):
                        yield done
                        done = []
                    alive = without_gaps(alive)
                    active = [active[slot] for slot in alive]
                    keep = torch.tensor(alive, device=device)
                    cache.batch_select_indices(keep)
                    logits, mask = logits[keep], mask[keep]
                if len(waiting) == len(active):
                    continue
                step = min(len(queues[i]) for i in active if queues[i])  # several, where all rows have some to read
                ids = torch.tensor([queues[i][:step] or [pad] * step for i in active], device=device)
                fed = torch.tensor([[int(i not in waiting)] * step for i in active], device=device)
                for i in active:
                    del queues[i][:step]
                mask = torch.cat([mask, fed], dim=1)
                logits = forward(self.model, ids, mask, cache)


class EndpointEngine:
    """Plays episodes against an OpenAI-compatible server (vLLM, Ollama, llama-server, a hosted API).

    What the server cannot do is nobody's wrong answer: the episode carries `error`. A server that is not there, does not
    know the model, or has stopped answering ends the evaluation; the same command goes on where it ended. The prompt's
    ids are the server's own (core/served.py compares them). `budget` is kept by the server's counts, one tool result late.
    """

    def __init__(self, url: str, model: str, concurrency: int = 8, temperature: float = 0.0, seed: int = 0):
        import os

        from openai import OpenAI

        self.client = OpenAI(base_url=url, api_key=os.environ.get("OPENAI_API_KEY", "none"), max_retries=3, timeout=300)
        self.url, self.model, self.concurrency = url, model, concurrency
        self.temperature, self.seed = temperature, seed

    def play(self, episodes: list[Episode]) -> Iterator[list[Episode]]:
        """Yields episodes one by one as they finish."""
        from concurrent.futures import ThreadPoolExecutor, as_completed

        pool, failed, played = ThreadPoolExecutor(self.concurrency), 0, 0
        try:
            for done in as_completed([pool.submit(self._play_one, e) for e in episodes]):
                episode = done.result()
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
            pool.shutdown(wait=False, cancel_futures=True)  # Ctrl-C does not wait for what is queued

    def _play_one(self, episode: Episode) -> Episode:
        import openai

        began, limit, prompt, used = time.perf_counter(), episode.agent.max_completion_length, None, 0
        try:
            while True:
                reply = self._ask(episode, limit - used)
                choice, usage = reply.choices[0], reply.usage
                if usage:
                    prompt = usage.prompt_tokens if prompt is None else prompt
                    used = usage.prompt_tokens - prompt + usage.completion_tokens
                    episode.usage = (episode.usage or 0) + usage.completion_tokens
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
        ) as error:  # the last four: a reply that is no JSON, or without a message
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


def stream_of(seed: int, episode: Episode) -> random.Random:
    """Random numbers of one episode: the same whatever else is in its batch, and after a resume."""
    return random.Random(f"{seed}-{episode.row['id']}-{episode.sample}-{episode.turns}")


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

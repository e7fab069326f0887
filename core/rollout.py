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

from core.chat import parse, prompt_ids, tool_suffix, tools_of, visible
from core.config import Agent
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


def stream_of(seed: int, episode: Episode) -> random.Random:
    """Random numbers of one episode: the same whatever else is in its batch, and after a resume."""
    return random.Random(f"{seed}-{episode.row['id']}-{episode.sample}-{episode.turns}")

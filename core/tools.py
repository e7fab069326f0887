"""Tools of many episodes run side by side, each round of them under a deadline: a slow query delays nobody.

TRL's tool loop calls the tools of a batch one after another (its async tools, too, are awaited episode by episode).
`ConcurrentTools` leaves that loop as it is and starts the calls of a whole round when the loop asks for the first of
them; the loop then only collects results. Environments must bear being used in threads, one thread an episode.
"""

import functools
import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

THREADS = 128  # they wait for worker processes and cost next to nothing


@functools.cache
def pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(THREADS, thread_name_prefix="tool")


def run_calls(tools: dict, calls: list[dict], until: float) -> list[tuple[str, Any, Any]]:
    """(name, arguments, result) of the calls of one message, in order; what went wrong is a result, an Exception.

    until: time.monotonic() after which no further call is started.
    """
    results = []
    for call in calls:
        name, arguments = call["function"]["name"], call["function"].get("arguments")
        try:
            if name not in tools:
                raise ValueError(f"Tool {name} not found.")
            if time.monotonic() >= until:
                raise late()
            result = tools[name](**arguments)
        except Exception as error:  # what a model can get wrong, and what an environment can, is told to the model
            result = error
        results.append((name, arguments, result))
    return results


def late() -> TimeoutError:
    return TimeoutError("the tools took too long; this call was given up")


def collect(future: Future, calls: list[dict], until: float) -> list[tuple[str, Any, Any]]:
    """The results of `run_calls`, or errors for all its calls once the deadline has passed (the thread is left alone)."""
    try:
        return future.result(max(0.0, until - time.monotonic()))
    except TimeoutError:
        return [(call["function"]["name"], call["function"]["arguments"], late()) for call in calls]


class ConcurrentTools:
    """Mixin for GRPOTrainer."""

    tool_deadline = 10.0  # seconds for one round of tools over the whole batch

    def _tool_call_loop(self, prompts, prompt_ids, completion_ids, completions, *rest):
        rounds = _Rounds(completions, self._sync_tool_dicts, self.tool_deadline)
        self._sync_tool_dicts = [
            {name: rounds.stand_in(place, name, tool) for name, tool in tools.items()}
            for place, tools in enumerate(self._sync_tool_dicts)
        ]
        return super()._tool_call_loop(prompts, prompt_ids, completion_ids, completions, *rest)


class _Rounds:
    """Stands between TRL's loop and the tools: the first call of a round starts all calls of that round."""

    def __init__(self, completions: list[list[dict]], tools: list[dict], deadline: float):
        self.completions, self.tools, self.deadline = completions, tools, deadline  # completions: grows as TRL appends
        self.running: dict[tuple[int, int], tuple[Future, list[dict], float]] = {}  # (episode, messages so far) -> ...
        self.results: dict[tuple[int, int], list] = {}

    def stand_in(self, place: int, name: str, tool):
        @functools.wraps(tool)  # errors that name the tool name the real one
        def answer(**arguments):
            return self._answer(place, name, arguments)

        return answer

    def _answer(self, place: int, name: str, arguments: dict):
        key = (place, len(self.completions[place]))
        if key not in self.running:
            self._start()
        if key not in self.results:
            self.results[key] = collect(*self.running[key])
        results = self.results[key]
        found = next(i for i, (n, a, _) in enumerate(results) if n == name and a == arguments)
        result = results.pop(found)[2]
        if isinstance(result, Exception):
            raise result
        return result

    def _start(self) -> None:
        until = time.monotonic() + self.deadline
        for place, completion in enumerate(self.completions):
            calls, key = completion[-1].get("tool_calls"), (place, len(completion))
            if calls and key not in self.running:
                # what TRL does not look up here it answers itself: unknown names, and arguments that are no mapping
                calls = [c for c in calls if c.get("type") == "function" and c["function"]["name"] in self.tools[place]]
                self.running[key] = pool().submit(run_calls, self.tools[place], calls, until), calls, until

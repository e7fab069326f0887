"""Tools side by side: a slow one holds up nobody, a round ends at its deadline, and TRL's loop reads the same results."""

import threading
import time
from types import SimpleNamespace

import pytest

from core.tools import ConcurrentTools, pool, run_calls


def call(tool, arguments):
    return {"type": "function", "function": {"name": tool, "arguments": arguments}}


class Env:
    """Says what it was asked, in the order it was asked."""

    def __init__(self, wait=lambda: None):
        self.wait, self.asked, self.threads = wait, [], set()

    def look(self, query: str) -> str:
        self.asked.append(query)
        self.threads.add(threading.get_ident())
        self.wait()
        if query == "bad":
            raise ValueError("no such thing")
        return f"{query} seen"


class Loop:
    """What TRL's tool loop does with tools and completions, over the turns that a scripted policy writes."""

    def __init__(self, envs, turns):
        self._sync_tool_dicts = [{"look": env.look} for env in envs]
        self.turns = turns  # of each episode: its assistant messages
        self.failures = 0

    def _tool_call_loop(self, prompts, prompt_ids, completion_ids, completions):
        for number in range(max(map(len, self.turns))):
            for place, completion in enumerate(completions):
                if number >= len(self.turns[place]):
                    continue
                messages = []
                for each in completion[-1]["tool_calls"]:
                    name = each["function"]["name"]
                    try:
                        result = self._sync_tool_dicts[place][name](**each["function"]["arguments"])
                    except Exception as error:
                        self.failures += 1
                        result = {"error": str(error)}
                    messages.append({"role": "tool", "name": name, "content": str(result)})
                completion += messages
            for place, completion in enumerate(completions):
                if number + 1 < len(self.turns[place]):
                    completion.append(self.turns[place][number + 1])


class Together(ConcurrentTools, Loop):
    pass


def play(kind, envs, turns):
    loop = kind(envs, turns)
    completions = [[t[0]] for t in turns]
    loop._tool_call_loop(None, None, None, completions)
    return completions, loop.failures


def says(*calls):
    return {"role": "assistant", "content": "", "tool_calls": [call("look", {"query": q}) for q in calls]}


def test_the_calls_of_a_round_run_side_by_side():
    together = threading.Barrier(20, timeout=60)  # passes when 20 calls are under way at once
    envs = [Env(together.wait) if i < 20 else Env() for i in range(64)]
    turns = [[says(f"q{i}"), says("again")] if i < 20 or i % 2 else [says(f"q{i}")] for i in range(64)]
    completions, failures = play(Together, envs, turns)
    assert failures == 0 and all(env.asked[0] == f"q{i}" for i, env in enumerate(envs))
    assert [c["content"] for c in completions[5] if c["role"] == "tool"] == ["q5 seen", "again seen"]


def test_same_messages_as_one_after_another():
    odd = {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            call("look", {"query": "bad"}),
            call("nosuch", {"query": "x"}),
            call("look", ["x"]),
            call("look", {"query": "a"}),
            call("look", {"query": "a"}),
            call("look", {"self": 1, "place": 2, "name": 3}),
        ],
    }
    turns = [[odd, says("b")], [says("c")], [says("d"), odd]]
    plain, together = (play(kind, [Env(), Env(), Env()], turns) for kind in (Loop, Together))
    assert together[0] == plain[0] and together[1] == plain[1] > 0


def test_no_call_runs_twice_and_an_episode_keeps_to_one_thread_at_a_time():
    envs = [Env() for _ in range(8)]
    play(Together, envs, [[says("a", "b", "c")] for _ in envs])
    assert all(env.asked == ["a", "b", "c"] and len(env.threads) == 1 for env in envs)


def test_a_round_ends_at_its_deadline():
    class Hurried(Together):
        tool_deadline = 0.1

    released = threading.Event()
    env = Env(lambda: released.wait(60))
    completions, failures = play(Hurried, [env], [[says("hangs", "never asked")]])
    assert failures == 2 and "took too long" in completions[0][1]["content"]
    released.set()
    pool().submit(lambda: None).result()
    assert env.asked == ["hangs"]  # the second call must not act on an environment that has moved on


def test_what_is_late_is_not_started():
    env = Env()
    results = run_calls({"look": env.look}, [call("look", {"query": "q"})], time.monotonic() - 1)
    assert isinstance(results[0][2], TimeoutError) and not env.asked


class Talk:
    """An episode of three turns as an engine sees it: its tool answers with three tokens."""

    def __init__(self, number, wait=lambda: None, over=lambda: None):
        self.row, self.sample, self.turns, self.wait, self.over = {"id": f"e{number}"}, 0, 0, wait, over
        self.prompt_ids, self.completion_ids, self.seconds = [5, 6, 7, number + 10], [], 0.0

    @property
    def budget(self):
        return 60 - len(self.completion_ids)

    def read(self, ids):
        self.completion_ids += ids
        self.turns += 1
        return {}

    def accept_message(self, message):
        if self.turns == 1:
            self.wait()
        return [] if self.turns == 3 else ["result"]

    def feed(self, results):
        suffix = [20 + self.turns, 21, 22]
        if not results or self.budget <= len(suffix):
            self.over()
            return None
        self.completion_ids += suffix
        return suffix


@pytest.mark.slow
def test_an_engine_plays_on_while_one_row_waits_and_writes_the_same():
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from core.rollout import TransformersEngine

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=30, num_key_value_heads=2, max_position_embeddings=256, **sizes))
    tokenizer = SimpleNamespace(eos_token_id=1, pad_token_id=0)

    def engine():
        return TransformersEngine(model, tokenizer, batch_size=6, temperature=1.0, seed=3)

    smooth = [Talk(i) for i in range(6)]
    list(engine().play(smooth))
    others, done = threading.Semaphore(0), threading.Event()

    def wait_for_the_others():
        for _ in range(5):
            assert others.acquire(timeout=60), "the slow tool held up the other episodes"
        done.set()

    held_up = [Talk(i, wait_for_the_others if i == 2 else lambda: None, others.release) for i in range(6)]
    list(engine().play(held_up))
    assert done.is_set() and [t.turns for t in held_up] == [t.turns for t in smooth]
    assert [t.completion_ids for t in held_up] == [t.completion_ids for t in smooth]
    assert len({tuple(t.completion_ids) for t in smooth}) == 6 and max(t.turns for t in smooth) == 3

"""The workflow agent: write -> execute -> check -> rewrite, each turn asked for by a prompt of its own.

    user       schema, question, "write the query"         assistant  a query in a fenced block        turn "write"
    user       the database's answer, "check it"           assistant  what is wrong, and a verdict     turn "check"
    user       "rewrite the query"                         assistant  a query in a fenced block        turn "rewrite"
    ... until a check keeps the query, or agent.max_turns queries have been run

The program runs the queries, so the model needs no tool-call format: any instruct model can play this, untrained too.

The turns are one growing conversation, not a fresh one each. The price is that a check reads how its query came about;
what is bought is that one episode stays one token sequence: every turn is trained in exactly the context in which it
was written, TRL's groups and advantages hold as they are, and the schema is read once. Which turns GRPO trains is said
by `agent.workflow.trained_turns`; the others carry no loss, like the prompts between them.

In a record a query also stands as a tool call and its result as a tool message, beside the text which the model wrote
and read (core.chat.visible leaves that out again): rewards, report and chat read such an episode as any other.
"""

import re
from functools import partial, wraps
from itertools import groupby

from core.chat import schemas_of, tools_of

SYSTEM = (
    "You answer questions about a SQLite database in turns: you write one SELECT query, you check what it brought back,"
    " and you rewrite it if it was wrong. You are told which turn it is."
)
NO_QUERY = "Error: no query found; write one in a ```sql block"
KEEP, REDO = "VERDICT: keep", "VERDICT: rewrite"
WRITE = "Write the query, and nothing else, in a ```sql block."
CHECK = (
    "The database answered:\n{result}\n\nCheck the query: tables and joins, conditions and values, grouping and order,"
    " repeated rows, and whether it gives exactly the columns that the question asks for. Say in one or two sentences"
    f" what you find. The last line of your answer is '{KEEP}' or '{REDO}'."
)
REWRITE = "Rewrite the query so that this is mended. Give the new query, and nothing else, in a ```sql block."

_BLOCK = re.compile(r"```[ \t]*(?:sql(?:ite)?)?[ \t]*\n?(.*?)(?:```|\Z)", re.DOTALL | re.IGNORECASE)
_BARE = re.compile(r"\s*(?:SELECT|WITH)\b", re.IGNORECASE)
_VERDICT = re.compile(r"VERDICT:\W*(keep|rewrite)", re.IGNORECASE)


def prompt_tools(agent, env) -> list[dict]:
    """The tool schemas an agent's prompt shows: none without turns, none in a workflow, where the program runs queries."""
    return [] if agent.workflow or not agent.max_turns else schemas_of(env)


def first_prompt(prompt: list[dict]) -> list[dict]:
    """The prompt of the write turn from the tool agent's [system, user] prompt with the same schema and question."""
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": f"{prompt[-1]['content']}\n\n{WRITE}"}]


def query_of(text: str) -> str:
    """The query of a write or rewrite turn: the last fenced block, or a text that is nothing but a query."""
    blocks = _BLOCK.findall(text)
    return blocks[-1].strip() if blocks else text.strip() if _BARE.match(text) else ""


def keeps(text: str, query: str) -> bool:
    """Whether a check keeps the query. Without a verdict, or with another query in its text, it does not."""
    verdicts = _VERDICT.findall(text)
    others = {" ".join(block.split()) for block in _BLOCK.findall(text)} - {" ".join(query.split())}
    return bool(verdicts) and verdicts[-1].lower() == "keep" and not others


def respond(completion: list[dict], message: dict, env, max_turns: int) -> list[dict]:
    """What follows an assistant message: the query's result, and the prompt of the next turn; [] ends the episode.

    The message is given the name of its turn, and a query also as the tool call that runs it.
    """
    message["turn"] = name = completion[-1]["turn"] if completion else "write"
    message.pop("tool_calls", None)
    before = [query_of(m["content"]) for m in completion if m["role"] == "assistant" and m["turn"] != "check"]
    if name == "check":
        return [] if before[-1] and keeps(message["content"], before[-1]) else [_ask("rewrite", REWRITE)]
    result, replies = NO_QUERY, []
    if (query := query_of(message["content"])) and max_turns:
        ((tool, run),) = tools_of(env).items()
        message["tool_calls"] = [{"type": "function", "function": {"name": tool, "arguments": {"query": query}}}]
        result = run(query)
        replies = [{"role": "tool", "name": tool, "content": result, "turn": name}]
    return replies if len(before) + 1 >= max_turns else [*replies, _ask("check", CHECK, result)]


def from_tool_calls(completion: list[dict]) -> list[dict]:
    """The worked example of a workflow from one of the tool agent: call, result, [call, result,] final message.

    What the tool agent says before a second call is what the check finds; its final message keeps the query. Every
    right turn is an example to SFT, checks too, because a verdict has to be learnt; `trained_turns` is GRPO's.
    """
    out: list[dict] = []
    for message in completion:
        if message["role"] == "tool":
            out += [message | {"turn": out[-1]["turn"]}, _ask("check", CHECK, message["content"])]
        elif message.get("tool_calls"):
            if out:
                out += [_check(message["content"], REDO), _ask("rewrite", REWRITE)]
            query = message["tool_calls"][0]["function"]["arguments"]["query"]
            out.append(message | {"content": f"```sql\n{query}\n```", "turn": out[-1]["turn"] if out else "write"})
        else:
            out.append(_check(message["content"], KEEP))
    return out


def _check(finding: str, verdict: str) -> dict:
    return {"role": "assistant", "content": f"{finding}\n{verdict}", "turn": "check"}


def _ask(turn: str, prompt: str, result: str = "") -> dict:
    return {"role": "user", "content": prompt.replace("{result}", result), "turn": turn}


def trained_mask(mask: list[int], completion: list[dict], trained_turns: str) -> list[int]:
    """An episode's mask (1 = written by the policy) with 0 also on the turns that GRPO does not train."""
    names = (m["turn"] for m in completion if m["role"] == "assistant")
    out: list[int] = []
    for written, ids in groupby(mask):  # a prompt stands between any two turns, so a run of ones is one turn
        trained = bool(written) and re.fullmatch(trained_turns, next(names)) is not None
        out += [int(trained)] * len(list(ids))
    return out


def trl_arguments(agent, reward_funcs: list, environments: dict) -> dict:
    """The arguments of GRPOTrainer that make its rollouts workflows: TRL's `rollout_func`, and what goes with it."""
    return {
        "reward_funcs": [_on_episodes(function) for function in reward_funcs],
        "environment_factory": {name: partial(_Desk, make) for name, make in environments.items()},
        "rollout_func": partial(_rollout, agent),
    }


class _Desk:
    """An environment that shows TRL no tool: the row and the real environment, for `_rollout` to play with."""

    def __init__(self, make):
        self.env = make()

    def reset(self, **row) -> None:
        self.row = row

    @property
    def trouble(self) -> str:
        return getattr(self.env, "trouble", "")


def _rollout(agent, prompts: list, trainer) -> dict:
    """Play a batch turn by turn with the trainer's own engine."""
    from core.rollout import Episode, accept_all

    episodes = [Episode(desk.row, desk.env, trainer.processing_class, agent) for desk in trainer.environments]
    logprobs: list[list[float]] = [[] for _ in episodes]
    active = list(range(len(episodes)))
    group = trainer.num_generations if trainer.model.training else trainer.num_generations_eval
    while active:
        contexts = [episodes[i].prompt_ids + episodes[i].completion_ids for i in active]
        turns, scores = trainer._generate_single_turn(contexts, None, {}, group)  # the call of TRL's own tool loop
        group = 1  # after the first turn each episode has a history of its own
        turns = [ids[: episodes[i].budget] for i, ids in zip(active, turns, strict=True)]
        going_on = accept_all([episodes[i] for i in active], turns)
        if scores is not None:
            for i, ids, score in zip(active, turns, scores, strict=True):
                read = len(episodes[i].completion_ids) - len(logprobs[i]) - len(ids)
                logprobs[i] += score[: len(ids)] + [0.0] * read
        active = [i for i, suffix in zip(active, going_on, strict=True) if suffix]
    trainer.see_the_others_through()
    return {
        "prompt_ids": [e.prompt_ids for e in episodes],
        "completion_ids": [e.completion_ids for e in episodes],
        "logprobs": logprobs if any(logprobs) else None,
        "env_mask": [trained_mask(e.mask, e.completion, agent.workflow.trained_turns) for e in episodes],
        "episode": [e.completion for e in episodes],
    }


def _on_episodes(reward):
    """The reward function on the episode's messages: TRL reads the whole sequence of a rollout_func as one message."""

    @wraps(reward)
    def score(completions, episode, **columns):
        return reward(completions=episode, **columns)

    return score

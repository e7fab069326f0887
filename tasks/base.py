"""What a task is: how its rows are read, what a row holds, and how a row is turned down.

A task is one file of this folder. It reads raw files into rows (one vocabulary of columns for every task, so that tasks
mix) and turns a row into a trajectory by running its gold answer in the environment, so every tool result is a real one.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import rewards
from rewards.cheats import TOOLS

# Every row of every task has exactly these keys when it is written; `messages` is added in the SFT files.
COLUMNS = (
    "id",
    "task",
    "environment",
    "prompt",  # [system, user] messages
    "question",
    "gold",  # gold SQL, or the final answer as text, or the reference answer
    "db_id",
    "db_path",
    "hardness",  # easy | medium | hard | extra
    "difficulty",  # 0 (easy) .. 1; later the SFT model's failure rate
    "facts",  # what a free-text reference answer rests on; for judges, never in a prompt
)
HARDNESS = ("easy", "medium", "hard", "extra")


class Rejected(Exception):
    """A row that is not used, and why. Yielded by `load` (bad raw row), raised by `trajectory` (gold fails).

    `sft_only`: the worked solution is unusable, but question and answer are sound, so RL may keep the row.
    """

    def __init__(self, row: dict, reason: str, sft_only: bool = False):
        super().__init__(row, reason, sft_only)
        self.row, self.reason, self.sft_only = row, reason, sft_only

    @property
    def id(self) -> str:
        return str(self.row["id"])

    def __str__(self) -> str:
        return f"{self.id}: {self.reason}"


@dataclass(frozen=True)
class Task:
    name: str
    environment: str  # key of envs.ENVIRONMENTS
    load: Callable[..., Iterator["dict | Rejected"]]  # load(split, root, *, seed, limit, **options); "train" | "eval"
    trajectory: Callable[[dict, Any], list[dict]]  # trajectory(row, env) -> completion; raises Rejected
    source: Callable[[str], None] | None = None  # makes the raw files under root, or explains what to download
    correct: Callable[..., "list[dict] | None"] | None = None  # correct(row, env, rng) -> self-correction completion
    unseen_databases: bool = False  # eval runs on databases that training never saw (Spider)


def call(tool: str, arguments: dict, content: str = "", train: bool = True) -> dict:
    """An assistant message with one tool call; `train=False` masks it out of the loss."""
    message = {
        "role": "assistant",
        "content": content,
        "tool_calls": [{"type": "function", "function": {"name": tool, "arguments": arguments}}],
    }
    return message if train else message | {"train": False}


def result(tool: str, content: str) -> dict:
    return {"role": "tool", "name": tool, "content": content}


def say(content: str) -> dict:
    return {"role": "assistant", "content": content}


def judged(row: dict, completion: list[dict]) -> float | None:
    """The main reward of the row's environment, alone: the other dimensions cost ten times as much."""
    columns = {key: [value] for key, value in row.items()}
    return rewards.REWARDS[rewards.PRIMARY[row["environment"]]](completions=[completion], **columns)[0]


def gold_episode(row: dict, env) -> list[dict]:
    """The shortest right episode of any row, with a real tool result: what is checked before a run."""
    tool, argument = TOOLS[row["environment"]]
    asked, final = {
        "sql": (row["gold"], "The query above answers the question."),
        "medical": ("SELECT 1", row["gold"]),
        "calculator": ("1 + 1", f"<answer>{row['gold']}</answer>"),
    }[row["environment"]]
    env.reset(**row)
    return [call(tool, {argument: asked}), result(tool, getattr(env, tool)(asked)), say(final)]


def estimate_tokens(text: str) -> int:
    """Tokens of a text without a tokenizer: words of up to 5 letters, digits and marks count one each (errs high)."""
    return sum(-(-len(m) // 5) for m in re.findall(r"[A-Za-z]+", text)) + len(re.findall(r"\d|[^\w\s]|_|\n", text))


def locate(root: str, name: str, markers: tuple[str, ...], hint: str) -> Path:
    """The folder with a task's raw files: `root` itself or `root/<name>`; one clear error when there is none."""
    tried = [Path(root).expanduser(), Path(root).expanduser() / name]
    for folder in tried:
        if any((folder / m).exists() for m in markers):
            return folder
    there = [p for p in tried if p.is_dir()]
    found = "; ".join(f"{p} holds {', '.join(sorted(x.name for x in p.iterdir())[:12]) or 'nothing'}" for p in there)
    raise FileNotFoundError(
        f"{name}: none of {', '.join(markers)} in {tried[0]} or {tried[1]}"
        f" ({found or 'neither folder exists'}).\n{hint}"
    )

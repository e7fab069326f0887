"""What makes a GRPO step worth its tokens: tools side by side, prompts that teach, groups with spread.

    python bench/sampling.py                                        # tools only: no model, half a minute
    python bench/sampling.py --config recipes/demo.yaml --steps 8   # also groups: needs steps 2 and 3 of that recipe

Tools: one round of 64 SQL episodes, some of them with a query that never ends, as TRL calls them (one after another) and as
ours (side by side); then what environment and rewards cost where no query is slow.
Groups: step 4 as it is, with the difficulty filter, with resampling, with both; same seed, same start. Rating writes tokens,
too, before the first step: the last two columns count them, once all of them against the few steps measured here, and once
spread evenly over the steps of the recipe's own run.
"""

import argparse
import contextlib
import json
import sqlite3
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
EPISODES = 64
ENDLESS = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT count(*) FROM n"
SQL_REWARDS = ("exec_match_strict", "executes", "schema_linking", "sql_format", "turn_economy")


class OneAfterAnother:
    """One round of TRL's tool loop (trl 1.16, GRPOTrainer._tool_call_loop), without the model."""

    def __init__(self, environments: list):
        self._sync_tool_dicts = [{"execute_sql": env.execute_sql} for env in environments]

    def _tool_call_loop(self, prompts, prompt_ids, completion_ids, completions):
        for tools, completion in zip(self._sync_tool_dicts, completions, strict=True):
            results = []
            for call in completion[-1]["tool_calls"]:
                name, arguments = call["function"]["name"], call["function"]["arguments"]
                try:
                    result = tools[name](**arguments)
                except Exception as error:
                    result = {"error": str(error)}
                results.append({"role": "tool", "name": name, "content": str(result)})
            completion += results


def make_database(path: Path) -> str:
    with sqlite3.connect(path) as db:
        db.execute("CREATE TABLE sale (id INTEGER PRIMARY KEY, city TEXT, price REAL)")
        db.executemany("INSERT INTO sale VALUES (?, ?, ?)", ((i, f"city {i % 50}", i % 97) for i in range(20_000)))
    return str(path)


def play(kind, database: str, slow: int, timeout: float = 5.0) -> tuple[float, list[dict], list[list[dict]]]:
    from envs.sql import SQLEnv

    environments = [SQLEnv(timeout=timeout) for _ in range(EPISODES)]
    rows, completions = [], []
    for i, env in enumerate(environments):
        gold = f"SELECT city, avg(price) FROM sale WHERE id > {i} GROUP BY city ORDER BY 2 DESC LIMIT 5"
        row = {"id": str(i), "environment": "sql", "question": "", "gold": gold, "db_id": "bench", "db_path": database}
        env.reset(**row)
        query = ENDLESS if i < slow else gold if i % 2 else gold.replace("DESC", "ASC")
        call = {"type": "function", "function": {"name": "execute_sql", "arguments": {"query": query}}}
        rows.append(row)
        completions.append([{"role": "assistant", "content": "", "tool_calls": [call]}])
    loop = kind(environments)
    began = time.perf_counter()
    loop._tool_call_loop(None, None, None, completions)
    return time.perf_counter() - began, rows, completions


def bench_tools() -> None:
    from core.tools import ConcurrentTools
    from rewards import score_batch

    class SideBySide(ConcurrentTools, OneAfterAnother):
        pass

    print(f"one round of tools, {EPISODES} SQL episodes, 5 s a query; seconds")
    with tempfile.TemporaryDirectory() as folder:
        database = make_database(Path(folder) / "bench.sqlite")
        play(SideBySide, database, 0)  # starts the workers
        for slow in (0, 1, 2, 8):
            ours, _, completions = play(SideBySide, database, slow)
            theirs = play(OneAfterAnother, database, slow)[0] if slow < 8 else float("nan")  # 8 x 5 s: no need to wait
            answered = sum(c[1]["content"].startswith("city | ") for c in completions)
            print(f"  {slow} endless: one after another {theirs:6.2f}   side by side {ours:6.2f}, {answered} answered")
        for _ in range(2):
            seconds, rows, completions = play(SideBySide, database, 0)
            for completion in completions:
                query = completion[0]["tool_calls"][0]["function"]["arguments"]["query"]
                completion.append({"role": "assistant", "content": f"```sql\n{query}\n```"})
            began = time.perf_counter()
            score_batch(rows, completions, only=set(SQL_REWARDS))
            rewards = time.perf_counter() - began
            print(
                f"  no slow query: environment {1000 * seconds:.0f} ms, {len(SQL_REWARDS)} rewards {1000 * rewards:.0f} ms"
            )


def bench_groups(config: str, steps: int, words: list[str]) -> None:
    from core.config import load_recipe
    from core.memory import run_steps

    recipe = load_recipe(config, words)
    start = str(recipe.run_dir / "sft" / "merged")
    variants = {
        "as it is": [],
        "difficulty": ["--grpo.rate_difficulty", "4"],
        "resampling": ["--grpo.resample", "2"],
        "both": ["--grpo.rate_difficulty", "4", "--grpo.resample", "2"],
    }
    print(f"{config}, {steps} steps from {start}\n")
    own = run_steps(recipe, "grpo", groups_of(recipe))
    print(
        "| variant | useful groups | useful groups per 1k tokens | reward per 1k tokens | tokens | seconds a step "
        f"| rating's tokens | useful groups, reward per 1k tokens, rating counted on these {steps} steps "
        f"| the same, rating spread over the run's {own} steps |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        for name, extra in variants.items():
            command = [sys.executable, "step4_grpo.py", "--config", config, *words, "--from_stage", start, *extra]
            command += ["--grpo.max_steps", str(steps), "--checkpoint_root", f"{folder}/{name.split()[0]}"]
            done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
            if done.returncode:
                sys.exit(f"{' '.join(command)}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
            metrics = Path(folder) / name.split()[0] / recipe.run / "grpo" / "metrics.jsonl"
            logs = [json.loads(line) for line in metrics.open()]
            rates = load_recipe(config, [*words, *extra]).grpo.rate_difficulty
            print(figures(name, logs, recipe, rating_tokens(recipe.data_dir) if rates else 0, own), flush=True)
            print(
                "".join(f"<!-- {line} -->\n" for line in done.stdout.splitlines() if line.startswith("difficulty:")),
                end="",
            )


def groups_of(recipe) -> int:
    """Groups of a step."""
    grpo = recipe.grpo.config
    return grpo["per_device_train_batch_size"] * grpo.get("gradient_accumulation_steps", 1) // grpo["num_generations"]


def rating_tokens(data_dir: Path) -> float:
    """What the policy wrote to rate the prompts: the newest rating of each. nan: an older rating, without its tokens."""
    from core.artifacts import read_jsonl

    newest = {}
    for line in (data_dir / "difficulty.jsonl").read_text(encoding="utf-8").split("\n"):
        with contextlib.suppress(json.JSONDecodeError, KeyError, TypeError):  # a line that a crash cut short
            record = json.loads(line)
            newest[record["id"]] = record.get("tokens", float("nan"))
    return sum(newest.get(row["id"], 0) for row in read_jsonl(data_dir / "rl_train.jsonl"))


def figures(name: str, logs: list[dict], recipe, rating: float, own: int) -> str:
    """One row of the table. Reward: of the first round, on the prompts as they come; tokens: all that the policy wrote in
    the steps. `rating`: what it wrote before them, once for a whole run of `own` steps."""
    logs = [log for log in logs if "reward" in log]
    groups = groups_of(recipe)
    episodes = groups * recipe.grpo.config["num_generations"]
    useful = [log["resample/useful"] for log in logs]
    tokens = sum(log["completions/mean_length"] * episodes + log.get("resample/extra_tokens", 0) for log in logs)
    reward = sum(log["reward"] * episodes for log in logs)

    def per_1k(tokens: float) -> tuple[str, str]:
        return f"{1000 * groups * sum(useful) / tokens:.2f}", f"{1000 * reward / tokens:.1f}"

    cells = (
        f"{sum(useful) / len(useful):.0%} of {groups * len(logs)}", *per_1k(tokens), f"{tokens:.0f}",
        f"{sum(log['step_time'] for log in logs) / len(logs):.1f}", f"{rating:.0f}",
        ", ".join(per_1k(tokens + rating)), ", ".join(per_1k(tokens + rating * len(logs) / own)),
    )  # fmt: skip
    return f"| {name} | {' | '.join(cells)} |"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", help="a recipe whose SFT is finished: measures groups too")
    parser.add_argument("--steps", type=int, default=8, help="GRPO steps of each variant (default 8)")
    args, words = parser.parse_known_args()
    bench_tools()
    if args.config:
        bench_groups(args.config, args.steps, words)

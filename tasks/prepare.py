"""From raw tasks to checked rows: load, guard against leaks, run gold, measure, divide into splits by task weight."""

import random
import sqlite3
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from core.artifacts import read_manifest
from core.chat import prompt_ids, visible
from core.config import Recipe, RecipeError, UserError
from core.workflow import first_prompt, from_tool_calls, prompt_tools
from envs import ENVIRONMENTS
from tasks import COLUMNS, TASKS, Rejected, Task, guards

BATCH = 512  # conversations tokenised at once


def prepare(recipe: Recipe, tokenizer, say=print) -> tuple[dict[str, list], list[dict], dict]:
    """Splits (sft_train, sft_val, rl_train, eval), rejected rows with reasons, and facts for the report."""
    unknown = set(recipe.tasks) - set(TASKS)
    if unknown:
        raise RecipeError(f"unknown task '{min(unknown)}'; there are: {', '.join(sorted(TASKS))}")
    if recipe.agent.workflow and (others := [n for n in recipe.tasks if TASKS[n].environment != "sql"]):
        raise UserError(
            f"the workflow agent writes SQL; task {others[0]} is none: leave out agent.workflow, or the task"
        )
    data, rejected, pools = recipe.data, [], {}
    for name in recipe.tasks:
        say(f"{name}: reading, and running gold in its environment")
        pools[name] = _task_rows(recipe, name, tokenizer, rejected)
    splits = {"sft_train": [], "sft_val": [], "rl_train": [], "eval": []}
    share, rl_share = (
        {name: weight / sum(tasks.values()) for name, weight in tasks.items()}
        for tasks in (recipe.tasks, data.rl_tasks or recipe.tasks)
    )
    for name, (train, evaluation) in pools.items():
        rng = random.Random(f"{recipe.seed}-{name}")
        rng.shuffle(train)
        train.sort(key=lambda r: "messages" not in r)  # stable: prompts without a worked example stand last
        held_out = min(round(data.val * share[name]), sum("messages" in r for r in train) // 5)
        splits["sft_val"] += train[:held_out]
        pools[name] = {
            "sft_train": [r for r in train[held_out:] if "messages" in r],
            "rl_train": rng.sample(train[held_out:], len(train) - held_out),
            "eval": rng.sample(evaluation, len(evaluation)),
        }
    for split, limit in (("sft_train", data.train), ("rl_train", data.rl), ("eval", data.eval)):
        available = {name: pool[split] for name, pool in pools.items()}
        if split == "rl_train" and data.train and data.rl:  # prompts the SFT has not seen, as far as there are enough
            taught = {row["id"] for row in splits["sft_train"]}
            available = {name: sorted(rows, key=lambda r: r["id"] in taught) for name, rows in available.items()}
        if split == "eval" and not limit:
            quota = {name: len(rows) for name, rows in available.items()}
        else:
            quota = _quota(available, rl_share if split == "rl_train" else share, limit)
        rows = [row for name, count in quota.items() for row in available[name][:count]]
        random.Random(recipe.seed).shuffle(rows)
        splits[split] = rows
    for split, rows in splits.items():
        if not rows:
            reasons = Counter(r["reason"].split(":")[0] for r in rejected).most_common(3)
            why = (
                ", ".join(f"{n} because: {reason}" for reason, n in reasons)
                or "none were rejected, check data.* limits"
            )
            check = "data.roots and the agent's limits"
            if split == "sft_val":
                worked = ", ".join(f"{name} {len(pool['sft_train'])}" for name, pool in pools.items())
                check = (
                    f"data.val ({data.val}): it is divided among the tasks by weight, and of a task's rows with a worked "
                    f"example (here {worked}) at most a fifth is held out. Raise --data.val, or give more rows"
                )
            raise UserError(f"split '{split}' is empty. Rejected rows: {why}. Check {check}")
    tools = {name: prompt_tools(recipe.agent, make()) for name, make in ENVIRONMENTS.items()}
    tokens = {split: [row["tokens"] for row in splits[split]] for split in ("sft_train", "sft_val")}
    tokens["rl_train"] = [row["prompt_tokens"] for row in splits["rl_train"]]
    tokens["eval"] = [len(prompt_ids(tokenizer, r["prompt"], tools[r["environment"]])) for r in splits["eval"]]
    for split, rows in splits.items():
        columns = (*COLUMNS, "messages") if split.startswith("sft") else COLUMNS
        splits[split] = [{key: row[key] for key in columns} for row in rows]
    facts = {"tokens": tokens, "tools": tools}
    return splits, rejected, facts


def check_prepared(recipe: Recipe, make: str) -> None:
    """UserError if the prepared data are not whole, or were made for other tasks or with other settings of `data:`, `agent:`."""
    manifest = read_manifest(recipe.data_dir)
    if manifest is None:
        raise UserError(f"{recipe.data_dir} is not whole: step 2 was stopped before its end. Run: {make}")
    then, now = manifest["recipe"], recipe.to_dict()
    pairs = {"tasks": (then["tasks"], now["tasks"])}
    was, asked = (_shapes_rows(r["agent"]) for r in (then, now))
    pairs |= {f"agent.{k}": (was[k], asked[k]) for k in was}
    pairs |= {f"data.{k}": (then["data"].get(k), v) for k, v in now["data"].items() if k not in ("roots", "hub")}
    if changed := {k: pair for k, pair in pairs.items() if pair[0] != pair[1]}:
        what = ", ".join(f"{k} {was!r}, now {asked!r}" for k, (was, asked) in changed.items())
        raise UserError(f"{recipe.data_dir} was prepared with other settings ({what}). Run: {make}")


def _shapes_rows(agent: dict) -> dict:
    """Of the agent's settings those that can be read off a prepared row."""
    workflow = agent.get("workflow")
    without = {k: v for k, v in workflow.items() if k != "trained_turns"} if workflow is not None else None
    return {k: agent[k] for k in ("max_turns", "max_rows", "max_chars")} | {"workflow": without}


def _quota(available: dict[str, list], share: dict[str, float], limit: int) -> dict[str, int]:
    """Rows per task in the recipe's proportion; limit 0 = as many as the scarcest task allows."""
    most = min(len(available[name]) / part for name, part in share.items())
    total = min(limit or most, most)
    return {name: round(total * part) for name, part in share.items()}


def _task_rows(recipe: Recipe, name: str, tokenizer, rejected: list[dict]) -> tuple[list[dict], list[dict]]:
    """Train rows with their trajectories, and evaluation rows, after every check."""
    task, data = TASKS[name], recipe.data
    root = data.roots.get(name, str(Path(recipe.data_root) / "raw" / name))
    options = {"seed": recipe.seed} | ({"hub_id": data.hub[name]} if name in data.hub else {})
    if task.environment != "calculator":
        options |= {
            "schema_tokens": data.schema_tokens,
            "count_tokens": lambda text: len(tokenizer(text)["input_ids"]),
        }
    if task.environment == "sql":
        options["sample_values"] = data.sample_values
    options |= _in_characters(recipe.agent.workflow)
    try:
        if task.source and name not in data.hub:
            task.source(root)
        loaded = {split: list(task.load(split, root, **options)) for split in ("train", "eval")}
    except (FileNotFoundError, FileExistsError, ValueError) as error:
        raise UserError(str(error)) from error

    def keep(rows: Iterable, split: str) -> list[dict]:
        kept = []
        for row in rows:
            if isinstance(row, Rejected):
                rejected.append(_rejected(row, name, split))
            elif not data.hardness or row["hardness"] in data.hardness:
                kept.append(row | {"prompt": first_prompt(row["prompt"])} if recipe.agent.workflow else row)
        return kept

    train, evaluation = keep(loaded["train"], "train"), keep(loaded["eval"], "eval")
    train, evaluation, dropped = guards.separate(task, train, evaluation)
    rejected += [_rejected(r, name, "guard") for r in dropped]
    env = ENVIRONMENTS[task.environment](**environment_limits(recipe, task.environment))
    train = _trajectories(recipe, task, train, env, rejected, "train")
    train = _fitting(recipe, task, train, tokenizer, rejected)
    evaluation = _trajectories(recipe, task, evaluation, env, rejected, "eval")
    guards.check(task, train, evaluation)
    return train, evaluation


def _trajectories(recipe: Recipe, task: Task, rows: list[dict], env, rejected: list[dict], split: str) -> list[dict]:
    """Rows whose gold runs and is judged right; train rows get their messages, some with a correction."""
    rng, kept = random.Random(f"{recipe.seed}-{task.name}-corrections"), []
    for row in rows:
        try:
            completion = task.trajectory(row, env)
        except Rejected as reason:
            if split == "eval" and not reason.reason.startswith("gold"):
                kept.append(row)  # a hard evaluation row stays: leaving it out would flatter the score
                continue
            rejected.append(_rejected(reason, task.name, f"{split}, SFT only" if reason.sft_only else split))
            if reason.sft_only:  # the worked solution is no good, but the question and its answer are
                kept.append(row)
            continue
        if split == "train":
            if task.correct and rng.random() < recipe.data.correction_share:
                completion = task.correct(row, env, rng) or completion
            if recipe.agent.workflow:
                completion = from_tool_calls(completion)
            row = row | {"messages": row["prompt"] + completion}
        kept.append(row)
    return kept


def _fitting(recipe: Recipe, task: Task, rows: list[dict], tokenizer, rejected: list[dict]) -> list[dict]:
    """Train rows that fit the agent's limits, measured in batches, which is where the tokenizer is fast."""
    tools = prompt_tools(recipe.agent, ENVIRONMENTS[task.environment]())
    kept = []
    for start in range(0, len(rows), BATCH):
        batch = rows[start : start + BATCH]
        prompts, wholes = token_counts(tokenizer, batch, tools)
        for row, prompt, whole in zip(batch, prompts, wholes, strict=True):
            turns = sum("tool_calls" in m for m in row["messages"][len(row["prompt"]) :]) if "messages" in row else 0
            if turns > recipe.agent.max_turns:
                reason = f"needs more than agent.max_turns={recipe.agent.max_turns} tool calls: {turns}"
            elif max(prompt, whole) > recipe.data.max_length:
                reason = f"longer than data.max_length={recipe.data.max_length} tokens: {max(prompt, whole)}"
            elif whole - prompt > recipe.agent.max_completion_length:
                reason = f"episode longer than agent.max_completion_length: {whole - prompt}"
            else:
                kept.append(row | {"prompt_tokens": prompt, "tokens": whole})
                continue
            rejected.append(_rejected(Rejected(row, reason), task.name, "train"))
    return kept


def token_counts(tokenizer, rows: list[dict], tools: list) -> tuple[list[int], list[int]]:
    """Tokens of each row's prompt and of its whole conversation; each text is tokenised once."""
    options = {"tools": tools, "tokenize": False}
    heads = tokenizer.apply_chat_template([r["prompt"] for r in rows], add_generation_prompt=True, **options)
    texts = [
        tokenizer.apply_chat_template(visible(row["messages"]), **options) if "messages" in row else head
        for row, head in zip(rows, heads, strict=True)
    ]
    encoded = tokenizer(texts, add_special_tokens=False, return_attention_mask=False)
    wholes = [len(ids) for ids in encoded["input_ids"]]
    prompts = []
    for i, (head, text, whole) in enumerate(zip(heads, texts, wholes, strict=True)):
        assert text.startswith(head), f"row {rows[i]['id']}: the prompt is not the beginning of the conversation"
        prompts.append(whole if len(text) == len(head) else encoded.char_to_token(i, len(head)))
    return prompts, wholes


def environment_limits(recipe: Recipe, environment: str) -> dict:
    """Constructor arguments of an environment from the recipe's `agent` section."""
    agent = recipe.agent
    if environment == "calculator":
        return {"max_turns": agent.max_turns}
    return {
        "max_turns": agent.max_turns,
        "max_rows": agent.max_rows,
        "max_chars": agent.workflow.execution_truncate if agent.workflow else agent.max_chars,
        "timeout": agent.timeout,
    }


DIRECT = {
    "sql": "There is no tool in this conversation: answer at once with one SELECT query in a ```sql block.",
    "calculator": "There is no tool in this conversation: work it out yourself, then finish with <answer>NUMBER</answer>.",
    "medical": "There is no tool in this conversation: answer from what you know.",
}


def without_tool(row: dict) -> dict:
    """The row for an agent that has no tool: its system message says so, and in which form to answer instead."""
    system, *rest = row["prompt"]
    told = system | {"content": f"{system['content']}\n{DIRECT[row['environment']]}"}
    return row | {"prompt": [told, *rest]}


def _in_characters(workflow) -> dict:
    """A workflow's limit of the schema, which counts characters: whole tables are left out, none is cut in the middle."""
    return {"schema_tokens": workflow.table_info_truncate, "count_tokens": len} if workflow else {}


def question_row(recipe: Recipe, question: str, db: str | None, task: str | None) -> dict:
    """A row for a user's own question: about a database file, or to the agent of a task that needs none."""
    from tasks.gsm8k import SYSTEM as MATH
    from tasks.schema_text import schema_text
    from tasks.spider import SYSTEM as SQL

    row = dict.fromkeys(COLUMNS, "") | {"id": "chat", "question": question, "difficulty": 0.0, "facts": []}
    data, workflow = recipe.data, recipe.agent.workflow
    if db is None:
        if workflow or task not in TASKS or TASKS[task].environment != "calculator":
            raise UserError(f"--task {task}: only tasks without a database; for SQL pass --db FILE.sqlite")
        system, user = MATH, question
    else:
        try:
            options = {"schema_tokens": data.schema_tokens, "sample_values": data.sample_values}
            schema = schema_text(db, question, **options | _in_characters(workflow))
        except sqlite3.DatabaseError as error:
            raise UserError(f"{db} cannot be read as a SQLite database: {error}") from error
        if not schema.strip():
            raise UserError(f"{db} holds no table")
        system, user = SQL, f"{schema}\n\nQuestion: {question}"
    prompt = [{"role": "system", "content": system}, {"role": "user", "content": user}]
    if workflow:
        prompt = first_prompt(prompt)
    return row | {"environment": "calculator" if db is None else "sql", "db_path": db or "", "prompt": prompt}


def _rejected(reason: Rejected, task: str, split: str) -> dict:
    return {"task": task, "split": split, "id": reason.id, "reason": reason.reason, "row": reason.row}

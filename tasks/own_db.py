"""Your own database as a task: any SQL database or folder of tables, and your questions, ready for all six steps.

    python -m tasks own_db --own_db shop.sqlite --questions questions.csv [--name shop] [--synthesise 200]

`--own_db`     a SQLite or DuckDB file, a folder of .csv and .parquet files, or a postgresql:// URL (read-only); a SQLite
               snapshot of it is what the agent works on
`--questions`  .csv or .jsonl with `question` and one of: `sql` (gold query, run and checked here), `answer` (the value, or
               JSON: a list of values or of rows; whether the column holds numbers or text does not matter). With answers
               only there is nothing to imitate, so such questions serve GRPO and evaluation, not SFT
`--synthesise` so many template questions over the schema, executed and filtered, marked synthetic, for training only
               (unless there are no questions of your own: then they are evaluated as well, and the recipe says so)

Writes data/raw/own_db/<name>/{database.sqlite,train.jsonl,eval.jsonl,rejected.jsonl,keys.json} and recipes/own-<name>.yaml.
Near-duplicate questions are kept on one side of the split (tasks/own_split.py).
"""

import argparse
import csv
import json
import math
import os
import random
import re
from collections import Counter
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory

import sqlglot
import yaml

from core.artifacts import atomic_file, write_jsonl
from envs.sqlite_exec import QueryError, run_query
from tasks import own_split, own_synth
from tasks.base import Rejected, Task, locate
from tasks.corrections import corrected
from tasks.guards import normalise
from tasks.hardness import DIFFICULTY, hardness
from tasks.own_sources import infer_keys, snapshot
from tasks.schema_text import Notes, schema_text
from tasks.spider import SYSTEM
from tasks.spider import trajectory as sql_trajectory

HINT = "Make it with: python -m tasks own_db --own_db FILE --questions FILE"
BASE = "recipes/spider-qwen2.5-coder-0.5b-24gb.yaml"
FILES = ("database.sqlite", "keys.json", "train.jsonl", "eval.jsonl", "rejected.jsonl")
NAMES = {"question": ("question",), "sql": ("sql", "query", "gold"), "answer": ("answer",)}
ENOUGH = 10  # questions below which a split means nothing
SHOWN = 20  # rejected questions named in an error
TAUGHT = 5  # questions with SQL below which there is nothing to hold out for SFT


def create(
    source: str,
    questions: str | None,
    name: str,
    root: str | Path = "data/raw/own_db",
    recipe: str | Path | None = None,
    base: str | Path = BASE,
    synthesise: int = 0,
    eval_share: float = 0.2,
    seed: int = 42,
) -> tuple[Path, dict]:
    """(the recipe written, counts): snapshot, check, split, synthesise, write. Everything is checked before it is written."""
    if not re.fullmatch(r"[\w.-]+", name):
        raise ValueError(f"--name {name!r}: letters, digits, '-', '_' and '.' only; it becomes the name of a folder")
    folder, path = Path(root) / name, Path(recipe or f"recipes/own-{name}.yaml")
    items = read_questions(Path(questions)) if questions else []  # before the snapshot: it may take long
    folder.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=folder.parent, prefix=f".{name}.") as fresh:
        train, evaluation, counts = _fill(Path(fresh), source, items, synthesise, eval_share, seed)
        text = recipe_text(name, folder, train, evaluation, Path(base), seed)
        folder.mkdir(exist_ok=True)
        for file in FILES:
            os.replace(Path(fresh) / file, folder / file)
    if path.exists() and path.read_text(encoding="utf-8") != text:  # perhaps edited by hand
        os.replace(path, before := path.with_suffix(".yaml.before"))
        counts["kept"] = f"{before}, the recipe as it was"
    with atomic_file(path) as file:
        file.write(text)
    return path, counts


def _fill(
    folder: Path, source: str, items: list[dict], synthesise: int, eval_share: float, seed: int
) -> tuple[list[dict], list[dict], dict]:
    """(train, eval, counts): the FILES of a task, in an empty folder."""
    database = folder / "database.sqlite"
    dialect = snapshot(source, database)
    keys = infer_keys(database)
    (folder / "keys.json").write_text(json.dumps(keys), encoding="utf-8")
    rows, rejected = [], []
    asked: set[str] = set()
    for item in items:
        try:
            row = check(item, database, dialect)
            if normalise(row["question"]) in asked:
                raise Rejected(item, "question repeated")
            asked.add(normalise(row["question"]))
            rows.append(row)
        except Rejected as reason:
            rejected.append({"id": reason.id, "reason": reason.reason, "row": item})
    if items and len(rows) < ENOUGH and not synthesise:
        raise ValueError(_too_few(rows, rejected))
    made = own_synth.propose(
        database, synthesise, seed, Notes(keys=tuple(map(tuple, keys))), {r["question"] for r in rows}
    )
    made = [{"id": f"synthetic-{i}", "answer_only": False, "synthetic": True, **pair} for i, pair in enumerate(made)]
    if len(rows) >= ENOUGH:
        train, evaluation = own_split.split(rows, eval_share, seed)
        train += _apart(made, evaluation)
    elif rows or made:  # too few of one's own to split: all of them measure, the synthetic ones teach
        train, evaluation = (_apart(made, rows), rows) if rows else own_split.split(made, eval_share, seed)
    else:
        raise ValueError("no questions: pass --questions FILE, or --synthesise N to make some from the schema")
    if not train:
        raise ValueError(_too_few(rows, rejected))
    if (taught := sum(not row["answer_only"] for row in train)) < TAUGHT:
        raise ValueError(
            f"{taught} training questions come with SQL, and SFT needs {TAUGHT} to show the tool: add the SQL of some, or "
            "pass --synthesise 200"
        )
    for file, lines in (("train", train), ("eval", evaluation), ("rejected", rejected)):
        write_jsonl(folder / f"{file}.jsonl", lines)
    counts = {
        "questions": len(items),
        "usable": len(rows),
        "rejected": dict(Counter(r["reason"].split(":")[0] for r in rejected)),
        "synthetic": len(made),
        "clusters": len(own_split.cluster(rows)),
        "train": len(train),
        "eval": len(evaluation),
        "inferred_keys": len(keys),
    }
    return train, evaluation, counts


def _apart(made: list[dict], evaluation: list[dict]) -> list[dict]:
    """The synthetic rows that are no near-duplicate of an evaluation question."""
    places = set(range(len(evaluation)))
    near = {i for group in own_split.cluster(evaluation + made) if places & set(group) for i in group}
    return [row for i, row in enumerate(made, len(evaluation)) if i not in near]


def _too_few(rows: list[dict], rejected: list[dict]) -> str:
    reasons = "".join(f"\n  {r['id']}: {r['reason']}" for r in rejected[:SHOWN])
    more = f"\n  and {len(rejected) - SHOWN} more" if len(rejected) > SHOWN else ""
    return (
        f"{len(rows)} usable questions ({len(rejected)} rejected), and at least {ENOUGH} that are not near-duplicates are"
        f" needed to train and to measure; nothing was written: add questions, or pass --synthesise 200{reasons}{more}"
    )


def read_questions(path: Path) -> list[dict]:
    """[{id, question, sql | answer}] of a .csv, .jsonl or .json file."""
    if not path.is_file():
        raise FileNotFoundError(f"no questions at {path}; pass a .csv or .jsonl with question and sql (or answer)")
    try:
        if path.suffix.lower() == ".csv":
            with path.open(encoding="utf-8-sig", newline="") as file:
                items = list(csv.DictReader(file))
        elif path.suffix.lower() == ".json":
            items = json.loads(path.read_text(encoding="utf-8"))
        else:
            items = _lines(path)
    except (ValueError, csv.Error) as error:
        raise ValueError(f"{path} cannot be read as {path.suffix or 'jsonl'}: {error}") from error
    out = []
    for number, item in enumerate(items, 1):
        lower = {str(key).strip().lower(): value for key, value in item.items()} if isinstance(item, dict) else {}
        row = {"id": str(number)}
        for field, names in NAMES.items():
            value = next((lower[n] for n in names if n in lower and lower[n] not in (None, "")), None)
            if value is not None:
                row[field] = value
        if number == 1 and not any(n in lower for n in NAMES["question"]):
            raise ValueError(f"{path}: no column 'question'; found {', '.join(lower) or 'none'}")
        if number == 1 and not any(n in lower for n in NAMES["sql"] + NAMES["answer"]):
            raise ValueError(f"{path}: no column 'sql' or 'answer'; found {', '.join(lower)}")
        out.append(row)
    if not out:
        raise ValueError(f"{path} holds no question")
    return out


def _lines(path: Path) -> list:
    """By \\n only: str.splitlines also cuts at characters that JSON leaves as they are, such as U+2028."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line.strip()]


def check(item: dict, database: Path, dialect: str = "sqlite") -> dict:
    """The row of a question whose gold runs and returns something; raises Rejected. `dialect`: sqlglot's name."""
    question = " ".join(str(item.get("question", "")).split())
    if not question:
        raise Rejected(item, "no question")
    if "sql" in item:
        sql = str(item["sql"]).strip().rstrip(";").strip()
    elif "answer" in item:
        sql, dialect = constant(item), "sqlite"
    else:
        raise Rejected(item, "neither sql nor answer")
    try:
        gold, found = run_gold(database, sql, dialect)
    except QueryError as error:
        raise Rejected(item, f"gold fails: {' '.join(str(error).split())[:160]}") from error
    if not found:
        raise Rejected(item, "gold returns no rows: nothing to compare an answer with")
    return {"id": item["id"], "question": question, "gold": gold, "answer_only": "sql" not in item, "synthetic": False}


def run_gold(database: Path, sql: str, dialect: str) -> tuple[str, list]:
    """(the query as SQLite understands it, its first rows): as written, else translated from the source's dialect."""
    try:
        return sql, run_query(str(database), sql, 10.0, 5).rows
    except QueryError:
        if dialect == "sqlite":
            raise
        try:
            translated = sqlglot.transpile(sql, read=dialect, write="sqlite")[0]
        except (sqlglot.errors.SqlglotError, IndexError):
            translated = sql
        return translated, run_query(str(database), translated, 10.0, 5).rows


def constant(item: dict) -> str:
    """A query that gives an answer as it stands, so that execution match can compare with it: 42 -> VALUES (42)."""
    value = item["answer"]
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            value = value.strip()
    rows = [v if isinstance(v, list) else [v] for v in value] if isinstance(value, list) else [[value]]
    cells = [v for row in rows for v in row]
    if not cells or len({len(row) for row in rows}) > 1 or any(isinstance(v, list | dict) for v in cells):
        raise Rejected(item, "answer is neither a value, a list of values nor a list of equally long rows")
    return "VALUES " + ", ".join(f"({', '.join(map(_literal, row))})" for row in rows)


def _literal(value) -> str:
    if value is None:
        return "NULL"
    if isinstance(value, float) and not math.isfinite(value):
        return _literal(str(value))
    if isinstance(value, bool):
        return str(int(value))
    return repr(value) if isinstance(value, int | float) else "'" + str(value).replace("'", "''") + "'"


def recipe_text(name: str, folder: Path, train: list[dict], evaluation: list[dict], base: Path, seed: int) -> str:
    """The base recipe with this task in it."""
    if not base.is_file():
        raise FileNotFoundError(f"no recipe {base} to start from; pass --base with one of recipes/*.yaml")
    content = yaml.safe_load(base.read_text(encoding="utf-8"))
    taught = sum(not row["answer_only"] for row in train)
    content |= {"run": f"own-{name}", "tasks": {"own_db": 1.0}, "seed": seed}
    data = {k: v for k, v in content.get("data", {}).items() if k not in ("train", "rl", "eval", "hardness")}
    content["data"] = data | {"roots": {"own_db": str(folder)}, "val": max(1, min(50, taught // 10))}
    rewards = {"exec_match": 1.0, "executes": 0.1, "schema_linking": 0.1, "sql_format": 0.1, "turn_economy": 0.05}
    content["grpo"] = grpo = content.get("grpo", {}) | {"rewards": rewards}
    episodes, group = grpo.get("per_device_train_batch_size", 8), grpo.get("num_generations", 8)
    most = max(1, len(train) * group // episodes)  # a step takes no more prompts than there are
    grpo["gradient_accumulation_steps"] = min(grpo.get("gradient_accumulation_steps", 1), most)
    lines = [
        f"# {name}: {len(train)} training questions ({taught} with SQL), {len(evaluation)} for evaluation. From {base.name}.",
        f"# Written by tasks/own_db.py; run: for n in 2_prepare_data 3_sft 4_grpo 5_eval; do python step$n.py --config recipes/own-{name}.yaml; done",
    ]
    if evaluation and all(row["synthetic"] for row in evaluation):
        lines.append(
            "# Its evaluation questions are synthetic: its accuracy says little about the questions that people ask."
        )
    return "\n".join(lines) + "\n" + yaml.safe_dump(content, sort_keys=False, allow_unicode=True)


@lru_cache(maxsize=4)
def notes_of(folder: str) -> Notes:
    return Notes(keys=tuple(map(tuple, json.loads((Path(folder) / "keys.json").read_text(encoding="utf-8")))))


def load(
    split: str, root: str, *, seed: int = 42, limit: int | None = None, name: str = "own_db", **schema_options
) -> Iterator[dict | Rejected]:
    """Rows of a split ("train" | "eval") of a folder that `create` wrote."""
    file = f"{split}.jsonl"
    folder = locate(root, name, (file,), HINT)
    database = folder / "database.sqlite"
    if not database.is_file():
        raise FileNotFoundError(f"{name}: {folder} has {file} but no database.sqlite.\n{HINT}")
    items = _lines(folder / file)
    if limit is not None and limit < len(items):
        items = [items[i] for i in sorted(random.Random(seed).sample(range(len(items)), limit))]
    for item in items:
        try:
            level = "medium" if item["answer_only"] else hardness(item["gold"])
        except sqlglot.errors.SqlglotError:
            level = "extra"  # it ran, so it is right; only the parser does not know it
        schema = schema_text(str(database), item["question"], notes=notes_of(str(folder)), **schema_options)
        prompt = f"{schema}\n\nQuestion: {item['question']}"
        yield {
            "id": f"{name}-{item['id']}",
            "task": name,
            "environment": "sql",
            "prompt": [{"role": "system", "content": SYSTEM}, {"role": "user", "content": prompt}],
            "question": item["question"],
            "gold": item["gold"],
            "db_id": folder.name,
            "db_path": str(database),
            "hardness": level,
            "difficulty": DIFFICULTY[level],
            "facts": [],
            "solution": "" if item["answer_only"] else item["gold"],  # for the trajectory only: prepare() drops it
        }


def trajectory(row: dict, env) -> list[dict]:
    if not row["solution"]:
        raise Rejected(row, "answer only: no query for a worked example", sft_only=True)
    return sql_trajectory({k: v for k, v in row.items() if k != "solution"}, env)


def source(root: str) -> None:
    locate(root, "own_db", ("train.jsonl",), HINT)


OWN_DB = Task("own_db", "sql", load, trajectory, source, corrected(trajectory))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--own_db", metavar="SOURCE", help="SQLite or DuckDB file, folder of tables, or postgresql:// URL"
    )
    parser.add_argument("--questions", metavar="FILE", help=".csv or .jsonl with question and sql (or answer)")
    parser.add_argument("--name", help="name of the folder and the recipe (default: from SOURCE)")
    parser.add_argument("--synthesise", type=int, default=0, metavar="N", help="add N template questions to train")
    parser.add_argument("--base", default=BASE, help="recipe to start from (default %(default)s)")
    parser.add_argument(
        "--eval_share", type=float, default=0.2, help="share of the questions kept for evaluation (0.2)"
    )


def run(args: argparse.Namespace, say=print) -> Path:
    """create() for a command line."""
    name = args.name or re.sub(r"\W+", "_", Path(args.own_db.split("?")[0]).stem).strip("_")
    recipe, counts = create(
        args.own_db, args.questions, name, base=args.base, synthesise=args.synthesise, eval_share=args.eval_share
    )
    for key, value in counts.items():
        say(f"{key:14} {value}")
    say(f"wrote {recipe}; next: python step2_prepare_data.py --config {recipe}")
    return recipe


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    args = parser.parse_args()
    if not args.own_db:
        parser.error("--own_db is needed")
    try:
        run(args)
    except (FileNotFoundError, ValueError, ImportError) as error:
        parser.exit(1, f"error: {error}\n")

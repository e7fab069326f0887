"""Spider: text-to-SQL over many databases. Official layout or parquet files, schema in the prompt, gold run for real.

    data/raw/spider/  train_spider.json [train_others.json] dev.json tables.json database/<db_id>/<db_id>.sqlite
    data/raw/spider/  train*.parquet, test_dev*.parquet or dev*.parquet with question, query, db_id [, db_path]; database/

The agent sees the schema and the question, runs queries with `execute_sql`, and its last query is its answer.
Rows are rejected (and listed) when their database is missing, the gold does not run, or gold is not judged correct.
"""

import json
import random
import re
import sqlite3
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

import sqlglot

from tasks.base import Rejected, Task, call, judged, locate, result, say
from tasks.corrections import corrected
from tasks.hardness import DIFFICULTY, hardness
from tasks.schema_text import NO_NOTES, Notes, read_schema, schema_text, words

SYSTEM = (
    "You answer questions about a SQLite database. Call execute_sql with one SELECT query, look at the result, fix the"
    " query if it is wrong, then finish with a short message. The last query you ran is your answer."
)
FINAL = "The query above answers the question."
HINT = (
    "Get the Spider archive (spider_data.zip, from the benchmark's site yale-lily.github.io/spider), unzip it, and pass"
    " the folder that holds train_spider.json, dev.json, tables.json and database/ as --data.roots.spider, or put it in"
    " data/raw/spider. To see every step work without it: recipes/demo.yaml."
)
FILES = {
    "train": ("train_spider.json", "train_spider.parquet", "train.parquet"),
    "eval": (
        "dev.json",
        "test_dev.parquet",
        "dev.parquet",
        "test_dev_500.parquet",
        "validation.parquet",
    ),
}


def load(
    split: str,
    root: str,
    *,
    seed: int = 42,
    limit: int | None = None,
    hub_id: str | None = None,
    name: str = "spider",
    **schema_options,
) -> Iterator[dict | Rejected]:
    """Rows of a split in file order; `limit` draws that many of them by `seed`.

    `schema_options`: schema_tokens, sample_values, count_tokens (see tasks.schema_text.schema_text).
    `hub_id`: questions from the Hugging Face hub (or a folder that `datasets` reads); databases still from `root`.
    """
    folder = locate(root, "spider", ("database",) if hub_id else FILES[split], HINT)
    if not (folder / "database").is_dir():
        raise FileNotFoundError(f"spider: {folder} has {_listing(folder)} but no database/ folder.\n{HINT}")
    raw = _raw_rows(split, folder, hub_id)
    if limit is not None and limit < len(raw):
        raw = [raw[i] for i in sorted(random.Random(seed).sample(range(len(raw)), limit))]
    for item in raw:
        yield _row(item, folder, split, name, schema_options)


def _raw_rows(split: str, folder: Path, hub_id: str | None) -> list[dict]:
    if hub_id:
        from datasets import load_dataset

        data = load_dataset(hub_id, split="train" if split == "train" else "validation")
        return [dict(item) | {"id": f"{split}-{i}"} for i, item in enumerate(data)]
    path = next(folder / f for f in FILES[split] if (folder / f).exists())
    rows = _numbered(path, "train" if split == "train" else "dev")
    if split == "train" and path.suffix == ".json" and (folder / "train_others.json").exists():
        rows += _numbered(folder / "train_others.json", "others")
    return rows


def _numbered(path: Path, prefix: str) -> list[dict]:
    try:
        if path.suffix == ".parquet":
            import pyarrow.parquet

            items = pyarrow.parquet.read_table(path).to_pylist()
        else:
            items = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise ValueError(
            f"{path} ({path.stat().st_size} bytes) is not whole: {error}.\nDownload it again; {HINT}"
        ) from error
    for item in items if isinstance(items, list) else [items]:
        if not isinstance(item, dict) or not isinstance(items, list):
            raise ValueError(f"{path} holds {str(item)[:60]!r} where a list of rows is expected. {HINT}")
        if missing := {"question", "query", "db_id"} - set(item):
            raise ValueError(f"{path}: a row has no {', '.join(sorted(missing))}; its columns are {', '.join(item)}")
        if odd := [key for key in ("question", "query", "db_id") if not isinstance(item[key], str)]:
            raise ValueError(f"{path}: {odd[0]} is {item[odd[0]]!r} in a row, and text is expected. {HINT}")
    return [item | {"id": f"{prefix}-{i}"} for i, item in enumerate(items)]


def _row(item: dict, folder: Path, split: str, name: str, schema_options: dict) -> dict | Rejected:
    raw = {
        "id": f"{name}-{item['id']}",
        "question": item["question"],
        "gold": item["query"],
        "db_id": item["db_id"],
    }
    db_id, question = item["db_id"], " ".join(item["question"].split())
    path = folder / "database" / db_id / f"{db_id}.sqlite"
    if item.get("db_path"):  # only the parquet layout has this column
        path = next(
            (p for p in (Path(item["db_path"]), folder / item["db_path"]) if p.is_file()),
            path,
        )
    if not path.is_file() or path.stat().st_size == 0:
        return Rejected(raw, "database missing")
    if not question:
        return Rejected(raw, "empty question")
    try:
        level = hardness(item["query"])
    except sqlglot.errors.SqlglotError:
        return Rejected(raw, "gold cannot be parsed")
    notes = annotations(str(folder)).get(db_id, NO_NOTES)
    try:
        schema = schema_text(str(path), question, notes=notes, **schema_options)
    except sqlite3.DatabaseError as error:
        return Rejected(raw, f"database unreadable: {error}")
    return {
        "id": raw["id"],
        "task": name,
        "environment": "sql",
        "prompt": [
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": f"{schema}\n\nQuestion: {question}"},
        ],
        "question": question,
        "gold": item["query"].strip().rstrip(";").strip(),
        "db_id": db_id,
        "db_path": str(path),
        "hardness": level,
        "difficulty": DIFFICULTY[level],
        "facts": [],
    }


@lru_cache(maxsize=4)
def annotations(folder: str) -> dict[str, Notes]:
    """db_id -> column meanings and foreign keys from tables.json: what the SQLite files themselves do not declare."""
    path = Path(folder) / "tables.json"
    if not path.exists():
        return {}
    try:
        described = {db["db_id"]: db for db in json.loads(path.read_text(encoding="utf-8"))}
        return {db_id: _notes(db) for db_id, db in described.items()}
    except (ValueError, TypeError, KeyError, IndexError) as error:
        raise ValueError(
            f"{path} ({path.stat().st_size} bytes) is not whole: {type(error).__name__} {error}.\nDownload it again; {HINT}"
        ) from error


def _notes(db: dict) -> Notes:
    tables, columns = db["table_names_original"], db["column_names_original"]
    meanings = {}
    for (t, original), (_, natural) in zip(columns, db["column_names"], strict=True):
        if t >= 0 and not says_it(original, natural):
            meanings[f"{tables[t]}.{original}".lower()] = natural
    keys = tuple(
        (tables[columns[a][0]], columns[a][1], tables[columns[b][0]], columns[b][1]) for a, b in db["foreign_keys"]
    )
    return Notes(meanings, keys)


def says_it(name: str, natural: str) -> bool:
    """Whether an identifier already reads as its description (`dept_store_id`: "department store id")."""
    short, long = words(name), words(natural)
    if "".join(short) == "".join(long):
        return True
    return len(short) == len(long) and all(_abbreviates(s, w) for s, w in zip(short, long, strict=True))


def _abbreviates(short: str, word: str) -> bool:
    letters = iter(word)
    return short[0] == word[0] and len(short) >= min(3, len(word)) and all(c in letters for c in short)


def tidy_sql(sql: str, names: frozenset[str]) -> str:
    """Gold as one would write it: single blanks, and 'text' in single quotes unless the quoted word is a name."""
    out = []
    for piece in re.findall(r"'(?:[^']|'')*'|\"(?:[^\"]|\"\")*\"|`[^`]*`|[^'\"`]+|.", sql, flags=re.DOTALL):
        if piece[0] == '"' and len(piece) > 2 and piece[1:-1].lower() not in names:
            piece = "'" + piece[1:-1].replace('""', '"').replace("'", "''") + "'"
        elif piece[0] not in "'\"`":
            piece = re.sub(r" ?([<>!]) = ?", r" \1= ", re.sub(r"\s+", " ", piece))
            piece = re.sub(r"\( ", "(", re.sub(r" ([,)])", r"\1", piece))
            piece = re.sub(r"\b(count|sum|avg|min|max) \(", r"\1(", piece, flags=re.IGNORECASE)
        out.append(piece)
    return "".join(out).strip().rstrip(";").strip()


def trajectory(row: dict, env) -> list[dict]:
    """Gold as a tool call, the environment's real answer, a closing line; gold must be judged 1.0."""
    env.reset(**row)
    query = tidy_sql(row["gold"], read_schema(row["db_path"]).names)
    answer = env.execute_sql(query)
    completion = [call("execute_sql", {"query": query}), result("execute_sql", answer), say(FINAL)]
    if judged(row, completion) != 1.0:
        reason = "gold fails" if answer.startswith("Error") else "gold is not judged correct"
        raise Rejected(row, f"{reason}: {answer.splitlines()[0][:120]}")
    return completion


def source(root: str) -> None:
    locate(root, "spider", FILES["train"] + FILES["eval"], HINT)


def _listing(folder: Path) -> str:
    return ", ".join(sorted(p.name for p in folder.iterdir())[:12]) or "nothing"


SPIDER = Task("spider", "sql", load, trajectory, source, corrected(trajectory), unseen_databases=True)

"""Medical question answering: an agent reads a database with `query_database_by_sql` and answers in words.

    data/raw/medical/  medical.sqlite  train.parquet  test.parquet      columns id, question, answer [, facts, sql]

`source` makes the folder: a fictional database (tasks/medical_facts.py), 800 questions in English and Chinese with
reference answers (tasks/medical_questions.py). Own files in the same layout work too. `facts` are what a right answer
states; the judge reads them, the model never does. `sql` is the worked example: rows without it have no trajectory and
serve RL only. The reward is a rule (0.1 for a query that ran) plus a judge; see rewards/medical.py.

    python -m tasks medical --root data/raw/medical            # make the files
    python -m tasks medical --root DIR --export FILE.parquet   # what is there as id, question, answer
"""

import argparse
import random
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import sqlglot

from rewards.facts import Case, offline_scores
from rewards.judge import speaks_to_judge
from rewards.medical import copied
from tasks.base import Rejected, Task, call, locate, result, say
from tasks.hardness import DIFFICULTY, hardness
from tasks.medical_facts import write_database
from tasks.medical_questions import questions
from tasks.mini_sql import version, write_folder
from tasks.schema_text import schema_text

SYSTEM = (
    "You answer questions about drugs and diseases from a database. Call query_database_by_sql with one SELECT query,"
    " look at the result, fix the query if it is wrong, then answer in one short sentence in the language of the"
    " question. State only what the database says."
)
HINT = (
    "Make the embedded files with: python -m tasks medical --root data/raw/medical. Own data: medical.sqlite,"
    " train.parquet and test.parquet with id, question, answer in one folder."
)
SIZES = {"train": 640, "test": 160}
SOURCES = ("medical.py", "medical_facts.py", "medical_questions.py")


def build(root: str | Path, seed: int = 42) -> None:
    """The embedded files, unless they are there or the folder holds files of your own."""
    root = Path(root)
    if (root / "medical.sqlite").exists() and not (root / "build.json").exists():
        return
    write_folder(root, {"version": version(SOURCES), "seed": seed, "sizes": SIZES}, lambda folder: _write(folder, seed))


def _write(folder: Path, seed: int) -> None:
    write_database(folder / "medical.sqlite", seed)
    with closing(sqlite3.connect(folder / "medical.sqlite")) as db:
        made = questions(db, random.Random(f"{seed}/questions"), sum(SIZES.values()))
    for split, rows in (("train", made[: SIZES["train"]]), ("test", made[SIZES["train"] :])):
        write_parquet(folder / f"{split}.parquet", [{"id": f"{split}-{i}", **row} for i, row in enumerate(rows)])


def write_parquet(path: Path, rows: list[dict]) -> None:
    import pyarrow
    import pyarrow.parquet

    fresh = path.with_name(f".{path.name}.tmp")
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), fresh)
    fresh.replace(path)


def read_parquet(path: Path) -> list[dict]:
    import pyarrow
    import pyarrow.parquet

    try:
        rows = pyarrow.parquet.read_table(path).to_pylist()
    except (OSError, pyarrow.ArrowException) as error:
        raise ValueError(
            f"{path} ({path.stat().st_size} bytes) is not a whole parquet file: {error}.\n{HINT}"
        ) from error
    if rows and (missing := {"id", "question", "answer"} - set(rows[0])):
        raise ValueError(f"{path} has no column {', '.join(sorted(missing))}; its columns are {', '.join(rows[0])}")
    return rows


def load(
    split: str, root: str, *, seed: int = 42, limit: int | None = None, name: str = "medical", **schema_options
) -> Iterator[dict | Rejected]:
    """Rows of a split ("train" | "eval") in file order; `limit` draws that many by `seed`."""
    file = "train.parquet" if split == "train" else "test.parquet"
    folder = locate(root, name, (file,), HINT)
    database = folder / "medical.sqlite"
    if not database.is_file():
        raise FileNotFoundError(f"{name}: {folder} has {file} but no medical.sqlite.\n{HINT}")
    schema_options = {"sample_values": 0} | schema_options  # examples would state facts of the database
    raw = read_parquet(folder / file)
    if limit is not None and limit < len(raw):
        raw = [raw[i] for i in sorted(random.Random(seed).sample(range(len(raw)), limit))]
    for item in raw:
        yield _row(item, database, name, schema_options)


def _row(item: dict, database: Path, name: str, schema_options: dict) -> dict | Rejected:
    question, answer = str(item["question"] or "").strip(), str(item["answer"] or "").strip()
    if not question or not answer:
        return Rejected({**item, "id": f"{name}-{item['id']}"}, "empty question or answer")
    sql = item.get("sql") or ""  # columns that own files need not have
    try:
        level = hardness(sql) if sql else "medium"
    except sqlglot.errors.SqlglotError:
        return Rejected({**item, "id": f"{name}-{item['id']}"}, "sql cannot be parsed")
    return {
        "id": f"{name}-{item['id']}",
        "task": name,
        "environment": "medical",
        "prompt": [
            {"role": "system", "content": SYSTEM},
            {
                "role": "user",
                "content": f"{schema_text(str(database), question, **schema_options)}\n\nQuestion: {question}",
            },
        ],
        "question": question,
        "gold": answer,
        "db_id": "medical",
        "db_path": str(database),
        "hardness": level,
        "difficulty": DIFFICULTY[level],
        "facts": [str(f) for f in item.get("facts") or ()],
        "solution": sql,  # for the trajectory only: prepare() drops it
    }


def trajectory(row: dict, env) -> list[dict]:
    """The worked query, its real result, the reference answer; every fact must be in the result and in the answer."""
    if speaks_to_judge(row["gold"]):
        raise Rejected(row, "gold reads as if it asked the judge for a grade, which earns 0: say it in other words")
    if copied([say(row["gold"])]):
        raise Rejected(row, "gold reads as a query or a tool call, which earns 0: give the answer in words")
    if not row["solution"]:
        raise Rejected(row, "no sql for a worked example", sft_only=True)
    env.reset(**{k: v for k, v in row.items() if k != "solution"})
    found = env.query_database_by_sql(row["solution"])
    if found.startswith("Error"):
        raise Rejected(row, f"sql fails: {found.splitlines()[0][:120]}", sft_only=True)
    facts = tuple(row["facts"])
    if facts and offline_scores(Case("", found, facts, found)).completeness < 1.0:
        raise Rejected(row, "the result of the sql does not hold every fact", sft_only=True)
    if offline_scores(Case(row["question"], row["gold"], facts, row["gold"])).completeness < 1.0:
        raise Rejected(row, "gold does not state every fact")
    tool = "query_database_by_sql"
    completion = [call(tool, {"query": row["solution"]}), result(tool, found), say(row["gold"])]
    if copied(completion):
        raise Rejected(row, "gold repeats a line of the query's result, which earns 0: give the answer in words")
    return completion


MEDICAL = Task("medical", "medical", load, trajectory, build)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", default="data/raw/medical", help="folder of the raw files (default %(default)s)")
    parser.add_argument("--export", help="write the questions of the folder to this parquet file: id, question, answer")
    args = parser.parse_args()
    build(args.root)
    folder = locate(args.root, "medical", ("train.parquet",), HINT)
    rows = [r for name in ("train", "test") for r in read_parquet(folder / f"{name}.parquet")]
    if args.export:
        write_parquet(Path(args.export), [{k: r[k] for k in ("id", "question", "answer")} for r in rows])
    print(f"{len(rows)} questions in {folder}" + (f", written to {args.export}" if args.export else ""))

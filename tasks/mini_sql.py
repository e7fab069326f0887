"""The embedded task mini_sql: databases and questions in Spider's official folder layout, made from a seed.

    build("data/raw/mini_sql")  ->  train_spider.json dev.json tables.json database/<db_id>/<db_id>.sqlite build.json

Rows of tables come from mini_schemas, candidates from mini_questions; here they are run and kept only when the question
has one answer and tells right from wrong: a result that is not empty, no ties at a LIMIT or in an order, no NULL that
sorts or groups, and no wrong variant of the query (condition dropped, sign turned, other aggregate...) that happens to
give the same result. Databases of train and dev are disjoint. The folder appears whole or not at all.
"""

import datetime
import hashlib
import json
import os
import random
import re
import shutil
import sqlite3
from collections import Counter
from pathlib import Path

from tasks import mini_joins, mini_questions
from tasks.hardness import hardness
from tasks.mini_schemas import EVAL, FIRST, LAST, Column, Table, parse
from tasks.mini_words import Ask, spin

ROOT = "data/raw/mini_sql"
SIZES = {"train": 1260, "eval": 240}
SHARES = {"easy": 0.45, "medium": 0.29, "hard": 0.14, "extra": 0.12}
SOURCES = ("mini_sql.py", "mini_schemas.py", "mini_words.py", "mini_questions.py", "mini_joins.py", "hardness.py")
TEMPLATES = {level: mini_questions.LEVELS[level] + mini_joins.LEVELS[level] for level in SHARES}
TRIES = 400  # candidates looked at for one question before its level counts as exhausted


def build(root: str | Path = ROOT, seed: int = 42, sizes: dict[str, int] | None = None) -> Path:
    """Write the folder unless the same version, seed and sizes already stand there."""
    root, sizes = Path(root), SIZES | (sizes or {})
    stamp = {"version": version(SOURCES), "seed": seed, "sizes": sizes}
    return write_folder(root, stamp, lambda folder: _write(folder, seed, sizes))


def version(sources: tuple[str, ...]) -> str:
    """Changes with the code that makes the data, so that no folder of an older version is taken for the new one."""
    return hashlib.sha256(b"".join(Path(__file__).with_name(name).read_bytes() for name in sources)).hexdigest()[:12]


def write_folder(root: Path, stamp: dict, write) -> Path:
    """Fill a folder beside `root` and rename it into place; build.json, written last, says what it was made by."""
    try:
        if json.loads((root / "build.json").read_text(encoding="utf-8")) == stamp:
            return root
    except (OSError, ValueError):  # not there, or cut short: made anew
        pass
    if root.exists() and any(root.iterdir()) and not (root / "build.json").exists():
        raise FileExistsError(
            f"{root} holds {', '.join(sorted(p.name for p in root.iterdir())[:6])} but no build.json, so this task did"
            " not make it; move it away or pass another data_dir"
        )
    fresh, old = (root.with_name(f".{root.name}.{word}{os.getpid()}") for word in ("new", "old"))
    for path in (fresh, old):
        shutil.rmtree(path, ignore_errors=True)
    fresh.mkdir(parents=True)
    try:
        write(fresh)
        (fresh / "build.json").write_text(json.dumps(stamp), encoding="utf-8")
        if root.exists():
            os.replace(root, old)
        os.replace(fresh, root)
    finally:
        for path in (fresh, old):
            shutil.rmtree(path, ignore_errors=True)
    return root


def _write(folder: Path, seed: int, sizes: dict[str, int]) -> None:
    databases = parse()
    asked: set[str] = set()
    rows: dict[str, list[dict]] = {"eval": [], "train": []}
    for split in rows:  # evaluation first: what train may not repeat is then known
        names = [n for n in databases if (n in EVAL) == (split == "eval")]
        for i, name in enumerate(names):
            rng = random.Random(f"{seed}/{name}")
            tables = databases[name]
            fill(tables, rng)
            count = sizes[split] * (i + 1) // len(names) - sizes[split] * i // len(names)
            db = sqlite3.connect(":memory:")  # written out in one piece: 25 files with a sync each would take seconds
            create(db, tables)
            rows[split] += questions(name, tables, db, rng, count, asked, unique_sql=split == "eval")
            path = folder / "database" / name / f"{name}.sqlite"
            path.parent.mkdir(parents=True)
            path.write_bytes(db.serialize())
            db.close()
        random.Random(f"{seed}/{split}").shuffle(rows[split])
    for name, split in (("train_spider.json", "train"), ("dev.json", "eval")):
        (folder / name).write_text(json.dumps(rows[split], indent=1), encoding="utf-8")
    described = [describe(name, tables) for name, tables in databases.items()]
    (folder / "tables.json").write_text(json.dumps(described, indent=1), encoding="utf-8")


# ---- rows of the tables ----------------------------------------------------------------------------------------------


def fill(tables: list[Table], rng: random.Random) -> None:
    people = [f"{first} {last}" for first in FIRST for last in LAST]
    rng.shuffle(people)
    for table in tables:
        pairs = set()
        repeated = table.rows // 8 if table.duplicates else 0
        for column in table.columns:
            column.values = draw(column, table.rows - repeated, tables, people, rng)
        rows = list(zip(*(column.values for column in table.columns), strict=True))
        if table.link:  # a pair of parents meets once
            rows = [row for row in rows if row[:2] not in pairs and not pairs.add(row[:2])]
        rows += rng.sample(rows, repeated)
        for column, values in zip(table.columns, zip(*rows, strict=True), strict=True):
            column.values = list(values)
            if column.nullable:
                for i in rng.sample(range(len(rows)), max(2, len(rows) // 9)):
                    column.values[i] = None


def draw(column: Column, n: int, tables: list[Table], people: list[str], rng: random.Random) -> list:
    kind, args = column.kind, column.args
    if kind == "key":
        return list(range(1, n + 1))
    if kind == "person":
        return [people.pop() for _ in range(n)]
    if kind in ("pair", "list"):
        parts = [part.strip().split("/") for part in args.split("+")]
        names = parts[0] if kind == "list" else [f"{a} {b}" for a in parts[0] for b in parts[1]]
        return rng.sample(names, n)
    if kind == "cat":
        values = args.split("/")
        return rng.choices(values, [1 + rng.random() * 2 for _ in values], k=n)
    if kind == ">":
        ids = next(t for t in tables if t.name == args).key.values
        ids = rng.sample(ids, len(ids) - rng.choice([0, 1, 2, 2]))  # some parents stay without children
        sure = ids if n > 2 * len(ids) else []
        picked = sure + rng.choices(ids, [0.4 + rng.random() * 2 for _ in ids], k=n - len(sure))
        rng.shuffle(picked)
        return picked
    if kind == "date":
        first, last = (int(a) for a in args.split())
        start, days = datetime.date(first, 1, 1), (last - first + 1) * 365
        return [str(start + datetime.timedelta(rng.randrange(days))) for _ in range(n)]
    low, high, step = ([float(a) for a in args.split()] + [1.0])[:3]
    values = [low + step * rng.randrange(int((high - low) / step) + 1) for _ in range(n)]
    return values if kind == "real" else [int(v) for v in values]


def create(db: sqlite3.Connection, tables: list[Table]) -> None:
    for table in tables:
        lines = [f"{c.sql} {c.type}{' PRIMARY KEY' if c.kind == 'key' else ''}" for c in table.columns]
        for c in table.of(">"):
            parent = next(t for t in tables if t.name == c.args)
            lines.append(f"FOREIGN KEY ({c.sql}) REFERENCES {parent.sql} ({parent.key.sql})")
        db.execute(f"CREATE TABLE {table.sql} ({', '.join(lines)})")
        holes = ", ".join("?" * len(table.columns))
        db.executemany(
            f"INSERT INTO {table.sql} VALUES ({holes})", zip(*(c.values for c in table.columns), strict=True)
        )
    db.commit()


def describe(name: str, tables: list[Table]) -> dict:
    """The database's entry of tables.json."""
    columns = [(i, c) for i, t in enumerate(tables) for c in t.columns]
    place = {(tables[i].name, c.name): k for k, (i, c) in enumerate(columns, 1)}
    keys = {t.name: t.key for t in tables}
    natural = [[i, c.name.replace("_", " ").lower() if c.kind in ("key", ">") else c.phrase] for i, c in columns]
    return {
        "db_id": name,
        "table_names": [t.one for t in tables],
        "table_names_original": [t.name for t in tables],
        "column_names": [[-1, "*"], *natural],
        "column_names_original": [[-1, "*"], *([i, c.name] for i, c in columns)],
        "column_types": ["text", *({"TEXT": "text"}.get(c.type, "number") for _, c in columns)],
        "primary_keys": [place[t.name, t.key.name] for t in tables if t.key],
        "foreign_keys": [[place[t.name, c.name], place[c.args, keys[c.args].name]] for t in tables for c in t.of(">")],
    }


# ---- questions -------------------------------------------------------------------------------------------------------


def questions(
    name: str,
    tables: list[Table],
    db: sqlite3.Connection,
    rng: random.Random,
    count: int,
    asked: set[str],
    unique_sql: bool,
) -> list[dict]:
    """`count` questions, the levels by SHARES; `asked` holds every question so far (none is asked twice)."""
    ask, rows, seen, used = Ask(tables, rng), [], Counter(), Counter()
    wanted = [level for level, share in SHARES.items() for _ in range(round(share * count))]
    wanted = (wanted + ["easy"] * count)[:count]
    for level in wanted:
        for _ in range(TRIES):
            template = min(rng.sample(TEMPLATES[level], 3), key=lambda t: used[t])
            try:
                sql, text = template(ask)
            except LookupError:  # this database has no such column
                continue
            question = spin(text, rng)
            if (
                question in asked
                or seen[sql] >= (1 if unique_sql else 2)
                or hardness(sql) != level
                or not sound(db, sql)
            ):
                continue
            asked.add(question)
            seen[sql] += 1
            used[template] += 1
            rows.append({"db_id": name, "question": question, "query": sql, "template": template.__name__})
            break
        else:
            raise RuntimeError(
                f"{name}: no further {level} question after {TRIES} candidates; give it more rows or columns"
            )
    return rows


def run(db: sqlite3.Connection, sql: str) -> list[tuple] | None:
    try:
        return db.execute(sql).fetchall()
    except sqlite3.Error:  # a variant need not be a query
        return None


def sound(db: sqlite3.Connection, sql: str) -> bool:
    """One answer, and one that a wrong query does not give as well."""
    rows = db.execute(sql).fetchall()
    if not rows or rows in ([(0,)], [(None,)]) or ("GROUP BY" in sql and any(None in row for row in rows)):
        return False
    if " BETWEEN " in sql:  # says the same with the ends in or out
        column, low, high = re.search(r'(\S+|"[^"]+") BETWEEN (\S+) AND (\S+)', sql).groups()
        if run(db, re.sub(r'(\S+|"[^"]+") BETWEEN .*', f"{column} > {low} AND {column} < {high}", sql)) != rows:
            return False
    if " ORDER BY " in sql and not settled(db, sql, len(rows)):
        return False
    answer = comparable(rows, sql)
    return all((other := run(db, wrong)) is None or comparable(other, sql) != answer for wrong in variants(sql))


def settled(db: sqlite3.Connection, sql: str, n: int) -> bool:
    """No two rows of the order, nor the first one cut off, have the same sort value; no NULL takes part."""
    by, _, limit = re.fullmatch(r".* ORDER BY (.*?)( DESC)?( LIMIT \d+)?", sql).groups()
    values = [v for (v,) in db.execute(re.sub(r"^SELECT .*? FROM", f"SELECT {by} FROM", sql).removesuffix(limit or ""))]
    return None not in values and len(set(values[: n + 1])) == len(values[: n + 1])


def comparable(rows: list[tuple], sql: str) -> list:
    if " ORDER BY " in sql:
        return rows
    # a set is compared as one, so that a second half which changes nothing is noticed
    return sorted(set(rows) if re.search(r" (INTERSECT|EXCEPT|UNION) ", sql) else rows, key=repr)


SWAPS = [
    (r"\bAVG\(", "SUM("),
    (r"\bSUM\(", "AVG("),
    (r"\bMAX\(", "MIN("),
    (r"\bMIN\(", "MAX("),
    (r"COUNT\(DISTINCT [^)]*\)", "COUNT(*)"),
]
SWAPS += [
    (" > ", " < "),
    (" < ", " > "),
    (" >= ", " > "),
    (" != ", " = "),
    (" = '", " != '"),
]
SWAPS += [
    (" INTERSECT ", " UNION "),
    (" EXCEPT ", " INTERSECT "),
    (" UNION ", " INTERSECT "),
    (r" (INTERSECT|EXCEPT|UNION) .*", ""),
]
SWAPS += [
    (r" HAVING COUNT\(\*\) \S+ \d+", ""),
    (r" NOT IN ", " IN "),
    (r"\bIN \(", "NOT IN ("),
    (" DESC", ""),
    (r" LIMIT \d+", ""),
]
SWAPS += [
    (r" WHERE [^()]*?(?= GROUP BY| ORDER BY| INTERSECT| EXCEPT| UNION|$)", ""),
    (" OR ", " AND "),
    ("SELECT DISTINCT ", "SELECT "),
]
SWAPS += [
    (r" (WHERE|AND) \S+ [=<>] \S+ AND ", r" \1 "),
    (r" AND (?!\d)[^()]*?(?= GROUP BY| ORDER BY|\)|$)", ""),
]
SWAPS += [(r" OR .*", ""), (r"WHERE .* OR ", "WHERE "), (r"(ORDER BY [^)]*?)(?= LIMIT)(?<! DESC)", r"\1 DESC")]


def variants(sql: str) -> list[str]:
    """Wrong queries near this one."""
    changed = [re.sub(pattern, new, sql, count=1) for pattern, new in SWAPS]
    if sql.count("SELECT") == 1:  # over sets of a few names, one row at the boundary seldom shows
        changed += [sql.replace(a, b) for a, b in ((" > ", " >= "), (" < ", " <= "))]
    return sorted({v for v in changed if v != sql})

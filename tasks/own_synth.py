"""Question and query pairs proposed from templates over a database's schema, for people with too few questions.

Each proposal is run and kept only when its answer is sound: not empty, no NULL, not too long, no tie where one thing is
asked for. The questions are plain ("How many orders have status 'open'?"): they teach the schema and the tool, not how
people talk, and they are marked as synthetic wherever they go.
"""

import random
import re
import sqlite3
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from envs.sqlite_exec import QueryError, run_query
from tasks.schema_text import Notes, quote, read_schema

MAX_RESULT = 30  # rows of an answer
TRIES = 60  # proposals looked at per pair that is wanted
STATISTICS = {"average": "avg", "highest": "max", "lowest": "min", "total": "sum"}


@dataclass
class Entity:
    """A table as questions see it."""

    table: str
    label: str  # the column that names a row, "" if none
    texts: list[tuple[str, list[str]]]  # (column, some values) of columns that sort rows into few groups
    numbers: list[str]  # columns that can be averaged
    parents: list[tuple[str, str, str]]  # (column, table, column)
    marks: dict[str, list]  # column -> some of its numbers

    @property
    def many(self) -> str:
        return plural(spoken(self.table))


def spoken(identifier: str) -> str:
    text = "".join(
        f" {c}" if c.isupper() and p.islower() else c for p, c in zip(" " + identifier, identifier, strict=False)
    )
    return " ".join(text.replace("_", " ").lower().split())


def plural(noun: str) -> str:
    if noun.endswith("s"):
        return noun
    return noun[:-1] + "ies" if noun.endswith("y") and noun[-2:-1] not in "aeiou" else noun + "s"


def propose(db_path: Path, count: int, seed: int, notes: Notes, known: set[str] | None = None) -> list[dict]:
    """Up to `count` checked pairs {question, gold}; fewer where the schema gives no more. `known`: questions to avoid."""
    rng, entities = random.Random(f"{seed}/synthetic"), read_entities(db_path, notes)
    out, asked = [], set(known or ())
    if not entities:
        return out
    for _ in range(count * TRIES):
        if len(out) == count:
            break
        pair = rng.choice(TEMPLATES)(rng.choice(entities), entities, rng)
        if pair is None or pair[0] in asked:
            continue
        asked.add(pair[0])
        if sound(db_path, *pair):
            out.append({"question": pair[0], "gold": pair[1]})
    return out


def sound(db_path: Path, question: str, sql: str) -> bool:
    top = sql.endswith("LIMIT 1")
    try:
        rows = run_query(str(db_path), sql.removesuffix("1") + "2" if top else sql, 5.0, MAX_RESULT + 1).rows
    except QueryError:
        return False
    if top and len(rows) == 2 and rows[0][-1] == rows[1][-1]:
        return False
    rows = rows[:1] if top else rows
    empty = not rows or any(v is None or v == "" for row in rows for v in row)
    return not empty and len(rows) <= MAX_RESULT and (len(rows) > 1 or rows[0] != (0,))


def read_entities(db_path: Path, notes: Notes) -> list[Entity]:
    out = []
    with closing(sqlite3.connect(f"{Path(db_path).resolve().as_uri()}?mode=ro&immutable=1", uri=True)) as db:
        for table in read_schema(str(db_path), notes).tables:
            name = quote(table.name)
            rows = db.execute(f"SELECT count(*) FROM (SELECT 1 FROM {name} LIMIT 100000)").fetchone()[0]
            if rows < 2:
                continue
            entity = Entity(table.name, "", [], [], [], {})
            for column in table.columns:
                if column.reference and "(" in column.reference:
                    parent, _, key = column.reference[:-1].partition("(")
                    entity.parents.append((column.name, parent.strip('"'), key.strip('"')))
                elif column.key or column.name.lower() == "id" or column.name.lower().endswith(("_id", "id_")):
                    continue
                elif column.type in ("int", "real"):
                    entity.numbers.append(column.name)
                    entity.marks[column.name] = _quartiles(db, name, quote(column.name))
                elif column.values and not re.search(r"\d\d:\d\d", column.values[0]):  # no moments
                    different = db.execute(
                        f"SELECT count(DISTINCT c) FROM (SELECT {quote(column.name)} AS c FROM {name} LIMIT 100000)"
                    ).fetchone()[0]
                    if different == rows or (not entity.label and different > 0.8 * rows):
                        entity.label = entity.label or column.name
                    elif different <= max(2, rows // 2):
                        entity.texts.append((column.name, column.values))
            out.append(entity)
    return out


def _quartiles(db: sqlite3.Connection, table: str, column: str) -> list:
    """Numbers between which the values of a column lie, as one would say them."""
    rows = db.execute(
        f"SELECT {column} FROM {table} WHERE typeof({column}) IN ('integer', 'real') LIMIT 10000"
    ).fetchall()
    values = sorted(v for (v,) in rows)
    picked = [values[len(values) * n // 4] for n in (1, 2, 3)] if values else []
    return sorted({round(v, 1) if isinstance(v, float) else v for v in picked})


def _literal(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def count_all(e: Entity, entities, rng):
    return f"How many {e.many} are there?", f"SELECT count(*) FROM {quote(e.table)}"


def count_with(e: Entity, entities, rng):
    if not e.texts:
        return None
    column, values = rng.choice(e.texts)
    value = rng.choice(values)
    question = f"How many {e.many} have the {spoken(column)} '{value}'?"
    return question, f"SELECT count(*) FROM {quote(e.table)} WHERE {quote(column)} = {_literal(value)}"


def list_with(e: Entity, entities, rng):
    if not e.texts or not e.label:
        return None
    column, values = rng.choice(e.texts)
    value = rng.choice(values)
    question = f"List the {spoken(e.label)} of the {e.many} whose {spoken(column)} is '{value}'."
    return question, f"SELECT {quote(e.label)} FROM {quote(e.table)} WHERE {quote(column)} = {_literal(value)}"


def statistic(e: Entity, entities, rng):
    if not e.numbers:
        return None
    word, column = rng.choice(list(STATISTICS)), rng.choice(e.numbers)
    question = f"What is the {word} {spoken(column)} of all {e.many}?"
    return question, f"SELECT {STATISTICS[word]}({quote(column)}) FROM {quote(e.table)}"


def statistic_with(e: Entity, entities, rng):
    if not e.numbers or not e.texts:
        return None
    word, column, (text, values) = rng.choice(list(STATISTICS)), rng.choice(e.numbers), rng.choice(e.texts)
    value = rng.choice(values)
    question = f"What is the {word} {spoken(column)} of the {e.many} whose {spoken(text)} is '{value}'?"
    where = f"WHERE {quote(text)} = {_literal(value)}"
    return question, f"SELECT {STATISTICS[word]}({quote(column)}) FROM {quote(e.table)} {where}"


def count_by(e: Entity, entities, rng):
    if not e.texts:
        return None
    column = rng.choice(e.texts)[0]
    question = f"How many {e.many} are there for each {spoken(column)}?"
    return question, f"SELECT {quote(column)}, count(*) FROM {quote(e.table)} GROUP BY {quote(column)}"


def statistic_by(e: Entity, entities, rng):
    if not e.numbers or not e.texts:
        return None
    word, column, text = rng.choice(list(STATISTICS)), rng.choice(e.numbers), rng.choice(e.texts)[0]
    question = f"What is the {word} {spoken(column)} of the {e.many} for each {spoken(text)}?"
    sql = f"SELECT {quote(text)}, {STATISTICS[word]}({quote(column)}) FROM {quote(e.table)} GROUP BY {quote(text)}"
    return question, sql


def count_beyond(e: Entity, entities, rng):
    columns = [c for c in e.numbers if e.marks.get(c)]
    if not columns:
        return None
    column, (word, sign) = rng.choice(columns), rng.choice((("more than", ">"), ("less than", "<")))
    mark = rng.choice(e.marks[column])
    article = "an" if column[0].lower() in "aeiou" else "a"
    question = f"How many {e.many} have {article} {spoken(column)} of {word} {mark}?"
    return question, f"SELECT count(*) FROM {quote(e.table)} WHERE {quote(column)} {sign} {mark}"


def superlative(e: Entity, entities, rng):
    if not e.numbers or not e.label:
        return None
    word, column = rng.choice(("highest", "lowest")), rng.choice(e.numbers)
    question = (
        f"What are the {spoken(e.label)} and the {spoken(column)} of the {spoken(e.table).removesuffix('s')} with the"
    )
    order = f"ORDER BY {quote(column)}{' DESC' if word == 'highest' else ''} LIMIT 1"
    return (
        f"{question} {word} {spoken(column)}?",
        f"SELECT {quote(e.label)}, {quote(column)} FROM {quote(e.table)} WHERE {quote(column)} IS NOT NULL {order}",
    )


def above_average(e: Entity, entities, rng):
    if not e.numbers or not e.label:
        return None
    column, (word, sign) = rng.choice(e.numbers), rng.choice((("above", ">"), ("below", "<")))
    table, c = quote(e.table), quote(column)
    question = f"List the {spoken(e.label)} of the {e.many} whose {spoken(column)} is {word} the average."
    return question, f"SELECT {quote(e.label)} FROM {table} WHERE {c} {sign} (SELECT avg({c}) FROM {table})"


def _with_parent(e: Entity, entities, rng):
    """(foreign column, parent entity, its key) of a random foreign key whose parent has a naming column."""
    links = [(c, p, k) for c, name, k in e.parents for p in entities if p.table.lower() == name.lower() and p.label]
    return rng.choice(links) if links else None


def _joined(e: Entity, column: str, parent: Entity, key: str) -> str:
    return f"{quote(parent.table)} AS p JOIN {quote(e.table)} AS c ON c.{quote(column)} = p.{quote(key)}"


def children_by_parent(e: Entity, entities, rng):
    if (link := _with_parent(e, entities, rng)) is None:
        return None
    column, parent, key = link
    label = f"p.{quote(parent.label)}"
    question = f"How many {e.many} does each {spoken(parent.table).removesuffix('s')} have? Give its {spoken(parent.label)} and the number."
    everyone = _joined(e, column, parent, key).replace(" JOIN ", " LEFT JOIN ", 1)  # those without any have 0
    return question, f"SELECT {label}, count(c.{quote(column)}) FROM {everyone} GROUP BY p.{quote(key)}"


def most_children(e: Entity, entities, rng):
    if (link := _with_parent(e, entities, rng)) is None:
        return None
    column, parent, key = link
    who = spoken(parent.table).removesuffix("s")
    question = f"Which {who} has the most {e.many}? Give its {spoken(parent.label)} and their number."
    sql = f"SELECT p.{quote(parent.label)}, count(*) FROM {_joined(e, column, parent, key)} GROUP BY p.{quote(key)}"
    return question, f"{sql} ORDER BY count(*) DESC LIMIT 1"


def no_children(e: Entity, entities, rng):
    if (link := _with_parent(e, entities, rng)) is None:
        return None
    column, parent, key = link
    question = f"List the {spoken(parent.label)} of the {parent.many} without any {e.many}."
    inner = f"SELECT {quote(column)} FROM {quote(e.table)} WHERE {quote(column)} IS NOT NULL"
    return question, f"SELECT {quote(parent.label)} FROM {quote(parent.table)} WHERE {quote(key)} NOT IN ({inner})"


def statistic_by_parent(e: Entity, entities, rng):
    link = _with_parent(e, entities, rng)
    if link is None or not e.numbers or not link[1].texts:
        return None
    column, parent, key = link
    (text, values), number, word = rng.choice(parent.texts), rng.choice(e.numbers), rng.choice(list(STATISTICS))
    value = rng.choice(values)
    who = parent.many
    question = (
        f"What is the {word} {spoken(number)} of the {e.many} that belong to {who} with the {spoken(text)} '{value}'?"
    )
    where = f"WHERE p.{quote(text)} = {_literal(value)}"
    return question, f"SELECT {STATISTICS[word]}(c.{quote(number)}) FROM {_joined(e, column, parent, key)} {where}"


Template = Callable[[Entity, list[Entity], random.Random], tuple[str, str] | None]
TEMPLATES: tuple[Template, ...] = (
    count_all,
    count_with,
    list_with,
    statistic,
    statistic_with,
    count_by,
    count_beyond,
    statistic_by,
    superlative,
    above_average,
    children_by_parent,
    most_children,
    no_children,
    statistic_by_parent,
)

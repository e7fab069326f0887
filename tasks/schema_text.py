"""A database's schema as prompt text: CREATE TABLE lines with types, keys, column meanings and a few real values.

Within a token budget, pruned by relevance to the *question* (table, column and value names it mentions, and the tables
joined to those), never by looking at the gold query. Lines are never cut: least relevant columns go first, then tables,
whose names stay listed, so that the agent can still ask the database about them.
"""

import re
import sqlite3
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

from envs.sql import neutral
from tasks.base import estimate_tokens

MAX_DISTINCT = 3000  # values indexed per column, for finding the question's words in the data
MAX_ROWS = 100_000  # rows looked at for them
MAX_VALUE_CHARS = 32
RESERVED = frozenset(  # words that SQLite does not take as a bare name
    "add all alter and as autoincrement between case check collate commit constraint create default deferrable delete"
    " distinct drop else escape except exists foreign from group having in index insert intersect into is isnull join"
    " limit not notnull null on or order primary references select set table then to transaction union unique update"
    " using values when where".split()
)


@dataclass(eq=False)  # hashed by identity, like Table: lines are cached
class Column:
    name: str
    type: str
    key: bool = False  # part of the primary key
    reference: str = ""  # "table(column)" for a foreign key
    meaning: str = ""  # in words, where the name alone does not say it
    values: list[str] = field(default_factory=list)


@dataclass(eq=False)
class Table:
    name: str
    columns: list[Column]

    def neighbours(self) -> set[str]:
        return {c.reference.split("(")[0].strip('"').lower() for c in self.columns if c.reference}


@dataclass
class Schema:
    tables: list[Table]
    index: dict[str, list[tuple[str, str, str]]]  # value in lower case -> (table, column, value) where it occurs
    names: frozenset[str]  # of tables and columns, in lower case


@lru_cache(maxsize=1 << 15)
def quote(name: str) -> str:
    plain = re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name) and name.lower() not in RESERVED
    return name if plain else '"' + name.replace('"', '""') + '"'


@lru_cache(maxsize=1 << 15)
def words(text: str) -> tuple[str, ...]:
    """Words of a sentence or an identifier (`PetType`, `pet_type` and "pet types" agree)."""
    text = re.sub(r"([a-z0-9])([A-Z])", r"\1 \2", text)
    return tuple(stem(w) for w in re.findall(r"[a-z]+|\d+|[^\W\d_a-zA-Z]+", text.lower()))


def stem(word: str) -> str:
    for ending, replacement in (
        ("ies", "y"),
        ("sses", "ss"),
        ("ing", ""),
        ("ed", ""),
        ("es", "e"),
        ("s", ""),
    ):
        if word.endswith(ending) and len(word) - len(ending) >= 3:
            return word[: -len(ending)] + replacement
    return word


@dataclass(frozen=True, eq=False)  # hashed by identity: one object per database, kept by the caller
class Notes:
    """What is known about a database beside its file."""

    meanings: dict[str, str] = field(default_factory=dict)  # {"table.column" in lower case: text}
    keys: tuple[tuple[str, str, str, str], ...] = ()  # foreign keys (table, column, table, column)


NO_NOTES = Notes()


def read_schema(db_path: str, notes: Notes = NO_NOTES) -> Schema:
    return _read_schema(str(db_path), Path(db_path).stat().st_mtime_ns, notes)


@lru_cache(maxsize=256)
def _read_schema(db_path: str, mtime_ns: int, notes: Notes) -> Schema:
    more_keys = {(t.lower(), c.lower()): f"{quote(t2)}({quote(c2)})" for t, c, t2, c2 in notes.keys}
    # immutable: no lock files beside the database; the data is only read while rows are prepared
    db = sqlite3.connect(f"{Path(db_path).resolve().as_uri()}?mode=ro&immutable=1", uri=True)
    db.text_factory = lambda raw: raw.decode("utf-8", "replace")
    try:
        names = "SELECT name FROM sqlite_master WHERE type IN ('table','view') AND name NOT LIKE 'sqlite!_%' ESCAPE '!'"
        tables, index = [], {}
        for (table,) in db.execute(names).fetchall():
            try:
                info = db.execute(f"PRAGMA table_info({_literal(table)})").fetchall()
            except sqlite3.OperationalError:  # a view on something that is gone, or a module that is not there
                continue
            references = {
                row[3].lower(): f"{quote(row[2])}({quote(row[4])})" if row[4] else quote(row[2])
                for row in db.execute(f"PRAGMA foreign_key_list({_literal(table)})").fetchall()
            }
            columns = []
            for _, name, type_, _, _, key in info:
                at = (table.lower(), name.lower())
                reference = references.get(name.lower()) or more_keys.get(at, "")
                meaning = notes.meanings.get(f"{at[0]}.{at[1]}", "")
                column = Column(name, _short_type(type_), bool(key), reference, meaning)
                column.values = _values(db, table, column, index)
                columns.append(column)
            tables.append(Table(table, columns))
        return Schema(
            tables, index, frozenset(n.lower() for t in tables for n in (t.name, *(c.name for c in t.columns)))
        )
    finally:
        db.close()


def _literal(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def _short_type(declared: str) -> str:
    """`VARCHAR(80)` -> text: sizes and dialects mean nothing to SQLite and cost tokens."""
    kind = declared.upper()
    if "INT" in kind:
        return "int"
    if any(word in kind for word in ("CHAR", "CLOB", "TEXT")):
        return "text"
    if any(word in kind for word in ("REAL", "FLOA", "DOUB", "NUM", "DEC")):
        return "real"
    return re.sub(r"\(.*", "", declared).strip().lower()


def _values(db: sqlite3.Connection, table: str, column: Column, index: dict) -> list[str]:
    """The first distinct texts of a column for show; all of them (bounded) go into the index."""
    if column.type in ("int", "real", "blob"):
        return []
    name, source = (f'"{n.replace(chr(34), chr(34) * 2)}"' for n in (column.name, table))
    rows = db.execute(
        f"SELECT DISTINCT {name} FROM (SELECT {name} FROM {source} LIMIT {MAX_ROWS}) WHERE typeof({name}) = 'text'"
        f" LIMIT {MAX_DISTINCT}"
    ).fetchall()
    texts = [t for (t,) in rows if t and len(t) <= MAX_VALUE_CHARS and t.isprintable() and "*/" not in t]
    texts = [t for t in texts if neutral(t) == t]  # data must not speak as the system or the user
    for text in texts:
        if re.search(r"[^\W\d_]", text):
            index.setdefault(text.strip().lower(), []).append((table, column.name, text))
    return texts[:8]


def mentioned_values(schema: Schema, question: str) -> dict[tuple[str, str], list[str]]:
    """(table, column) -> values of that column which the question spells out, in any letter case."""
    tokens = re.findall(r"[^\W_]+(?:[-'.&][^\W_]+)*|[^\w\s]", question)
    found: dict[tuple[str, str], list[str]] = {}
    spans = re.findall(r"[\"'“‘]([^\"'”’]+)[\"'”’]", question)
    spans += [" ".join(tokens[i : i + n]) for n in range(6, 0, -1) for i in range(len(tokens) - n + 1)]
    for run in re.findall(r"[\u3040-\u30ff\u3400-\u9fff]{2,}", question):  # written without blanks
        spans += [run[i : i + n] for n in range(min(len(run), 12), 1, -1) for i in range(len(run) - n + 1)]
    for span in dict.fromkeys(s.strip().lower() for s in spans):
        if len(span) < 2 or span in _COMMON:
            continue
        for table, column, value in schema.index.get(span, ()):
            known = found.setdefault((table, column), [])
            if value not in known:
                known.append(value)
    return found


_COMMON = frozenset(
    "a an the of in on at to for from by with and or not is are was were be do does did have has had what which who whom"
    " how many much all each every any other more most less than list show find give name names number average no it"
    " their its that this there as".split()
)


def relevance(schema: Schema, question: str, mentioned: dict) -> dict[tuple[str, str], float]:
    """Score of each (table, "") and (table, column) for a question: shared words, values found, joins to such tables."""
    asked = set(words(question)) - {stem(w) for w in _COMMON}
    score: dict[tuple[str, str], float] = {}
    for table in schema.tables:
        own = overlap(asked, words(table.name)) * 3
        best = []
        for column in table.columns:
            named = max(
                overlap(asked, words(column.name)),
                overlap(asked, words(column.meaning)),
            )
            value = 2.0 if (table.name, column.name) in mentioned else 0.0
            score[table.name, column.name] = named * 2 + value
            best.append(named + value)
        score[table.name, ""] = own + sum(sorted(best, reverse=True)[:3])
    base = dict(score)
    links = {t.name: t.neighbours() for t in schema.tables}
    for table in schema.tables:
        around = [
            o for o in schema.tables if o.name.lower() in links[table.name] or table.name.lower() in links[o.name]
        ]
        score[table.name, ""] += 0.4 * max((base[o.name, ""] for o in around), default=0.0)
    return score


def overlap(asked: set[str], name: tuple[str, ...]) -> float:
    return sum(w in asked for w in name) / len(name) if name else 0.0


def schema_text(
    db_path: str,
    question: str = "",
    *,
    schema_tokens: int = 1024,
    sample_values: int = 2,
    count_tokens: Callable[[str], int] = estimate_tokens,
    notes: Notes = NO_NOTES,
) -> str:
    """The prompt text of a database for a question, at most `schema_tokens` tokens."""
    schema = read_schema(db_path, notes)
    mentioned = mentioned_values(schema, question)
    shown = {(t.name, c.name): _shown(c, mentioned.get((t.name, c.name), []), sample_values) for t, c in _pairs(schema)}
    lines = {t.name: _line(t, t.columns, shown) for t in schema.tables}
    if sum(cost(count_tokens, line) for line in lines.values()) > schema_tokens:
        lines = _pruned(schema, shown, mentioned, question, schema_tokens, count_tokens)
    return neutral("\n".join(lines.values()))


@lru_cache(maxsize=1 << 15)
def cost(count_tokens: Callable[[str], int], line: str) -> int:
    """Tokens of a line with its line break; tokenizers do not merge across it, so the costs of lines add up."""
    return count_tokens(line + "\n")


def _pairs(schema: Schema):
    return ((t, c) for t in schema.tables for c in t.columns)


def _shown(column: Column, mentioned: list[str], n: int) -> list[str]:
    return list(dict.fromkeys(mentioned[:2] + column.values))[: max(n, min(len(mentioned), 2))] if n else []


def _pruned(schema, shown, mentioned, question, budget, count) -> dict[str, str]:
    """Tables by relevance, each as full as still fits: with values, then its relevant columns, then keys only."""
    score = relevance(schema, question, mentioned)
    order = {t.name: i for i, t in enumerate(schema.tables)}
    ranked = sorted(schema.tables, key=lambda t: (-score[t.name, ""], order[t.name]))
    bare = {at: [v for v in values if v in mentioned.get(at, ())] for at, values in shown.items()}
    forms = {t.name: _forms(t, score, shown, bare) for t in ranked}
    chosen: dict[str, str] = {}

    def rest(room: int) -> str:
        """The names of the tables left out, as far as they go into the room."""
        left = [quote(t.name) for t in ranked if t.name not in chosen]
        line = f"-- {len(left)} other tables"
        for number in range(1, len(left) + 1):
            more = f" and {len(left) - number} more" if number < len(left) else ""
            longer = f"-- other tables: {', '.join(left[:number])}{more}"
            if cost(count, longer) > room:
                break
            line = longer
        return line

    # first the smallest useful form of as many tables as fit, the most relevant first ...
    reserved = cost(count, rest(budget // 5))
    room = budget - reserved
    for table in ranked:
        smallest = forms[table.name][-1]
        if cost(count, smallest) <= room:
            chosen[table.name] = smallest
            room -= cost(count, smallest)
    if not chosen:
        needed = budget - room + min(cost(count, f[-1]) for f in forms.values())
        raise ValueError(
            f"schema_tokens={budget} is too small: the smallest table with the names of some others needs {needed} tokens;"
            " raise data.schema_tokens in the recipe"
        )
    if len(chosen) == len(ranked):
        room = budget - sum(cost(count, line) for line in chosen.values())
    # ... then fuller forms
    for table in ranked:
        for form in forms[table.name]:
            more = cost(count, form) - cost(count, chosen[table.name]) if table.name in chosen else room + 1
            if more <= room:
                chosen[table.name] = form
                room -= more
                break
    lines = {name: chosen[name] for name in sorted(chosen, key=order.__getitem__)}
    return lines | {"": rest(reserved)} if len(lines) < len(ranked) else lines


def _forms(table: Table, score: dict, shown: dict, bare: dict) -> list[str]:
    """A table's line from full to least: all with values, all columns, relevant columns and keys, keys and best."""
    ranked = sorted(table.columns, key=lambda c: -score[table.name, c.name])
    least = {c.name for c in table.columns if c.key} | {c.name for c in ranked[:2]}
    relevant = {c.name for c in ranked if c.key or c.reference or score[table.name, c.name] > 0} or least
    forms = [
        _line(table, table.columns, shown),
        _line(table, table.columns, bare),
    ]
    forms += [_line(table, [c for c in table.columns if c.name in keep], bare) for keep in (relevant, least)]
    return list(dict.fromkeys(forms))


def _line(table: Table, columns: list[Column], shown: dict) -> str:
    return _line_of(table, tuple((c, tuple(shown[table.name, c.name])) for c in columns))


@lru_cache(maxsize=1 << 14)
def _line_of(table: Table, shown: tuple[tuple[Column, tuple[str, ...]], ...]) -> str:
    columns = [c for c, _ in shown]
    composite = [quote(c.name) for c in columns if c.key]
    items, notes = [], []
    for column, values in shown:
        item = f"{quote(column.name)} {column.type}".rstrip()
        if column.key and len(composite) == 1:
            item += " PRIMARY KEY"
        if column.reference:
            item += f" REFERENCES {column.reference}"
        items.append(item)
        notes.append(": ".join(x for x in (column.meaning, ", ".join(_literal(v) for v in values)) if x))
    if len(composite) > 1:
        items.append(f"PRIMARY KEY ({', '.join(composite)})")
        notes.append("")
    if len(columns) < len(table.columns):
        notes[-1] = "; ".join(x for x in (notes[-1], f"{len(table.columns) - len(columns)} more columns") if x)
    body = ", ".join(f"{i} /* {n} */" if n else i for i, n in zip(items, notes, strict=True))
    return f"CREATE TABLE {quote(table.name)} ({body});"

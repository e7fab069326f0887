"""How mini_sql speaks: an `Ask` picks tables, columns, conditions and values; functions put them in English.

In a text, [this|that] stands for one of several wordings; `spin` chooses. Templates that use this: mini_questions (one
table), mini_joins (several).
"""

import random
import re
from dataclasses import dataclass

from tasks.mini_schemas import Column, Table

NUMBERS = ("int", "real")
LABELS = ("person", "pair", "list")
UNCOUNTED = {"stock", "pay", "mileage"}  # no article
INTENSIVE = (  # a total of these says nothing
    "age|height|weight|rating|score|GPA|hourly|altitude|temperature|place|power|speed|time|floor|area|stars|length|years"
)


def spin_words(text: str, rng: random.Random) -> str:
    """Choose one wording of every [a|b|c], innermost first."""
    while found := re.search(r"\[([^\[\]]*)\]", text):
        text = text[: found.start()] + rng.choice(found[1].split("|")) + text[found.end() :]
    text = "\n".join(" ".join(line.split()) for line in text.split("\n"))
    return re.sub(r" ([.?,])", r"\1", text)


def spin(text: str, rng: random.Random) -> str:
    """One wording as a question or request: articles, capital and closing mark set right."""
    text = re.sub(r"\b([Aa]) (?=[aeioAEIO]|hour|unk)", r"\1n ", spin_words(text, rng)).rstrip(".?")
    if re.match(r"(What|Which|Who|How|In which|On which)\b", text):
        return text + "?"
    if rng.random() < 0.12 and not text.startswith("For "):
        return rng.choice(POLITE).format(text[0].lower() + text[1:])
    return text[0].upper() + text[1:] + "."


POLITE = ("Please {}.", "Can you {}?", "Could you {}?", "Please {}.", "I need you to {}.")


def plural(phrase: str) -> str:
    head, of, rest = phrase.partition(" of ") if " of " in phrase else phrase.partition(" in ")
    if re.search(r"[^aeiou]y$", head):
        head = head[:-1] + "ies"
    else:
        head += "es" if re.search(r"(s|x|ch|sh)$", head) else "s"
    return head + of + rest


@dataclass
class Ask:
    tables: list[Table]
    rng: random.Random

    def pick(self, items):
        items = list(items)
        if not items:
            raise LookupError("nothing here plays this role")
        return self.rng.choice(items)

    def table(self, *kinds: str) -> Table:
        """A table with a label and a column of every kind asked for."""
        return self.pick(t for t in self.tables if t.label and all(t.of(*k.split()) for k in kinds))

    def column(self, table: Table, *kinds: str, but: tuple = (), solid: bool = False) -> Column:
        return self.pick(c for c in table.of(*kinds) if c not in but and not (solid and c.nullable))

    def shown(self, table: Table) -> Column:
        """What a list of this table's rows shows: mostly the label."""
        if table.label and self.rng.random() < 0.75:
            return table.label
        return self.column(table, "cat", "int", "real", "year", "date", *LABELS, but=(table.label,), solid=True)

    def link(self, labelled: bool = False) -> tuple[Table, Column, Table]:
        """(child, foreign key, parent with a label)."""
        pairs = [(t, c, self.parent(c)) for t in self.tables for c in t.of(">") if t.label or not labelled]
        return self.pick(p for p in pairs if p[2].label)

    def parent(self, key: Column) -> Table:
        return next(t for t in self.tables if t.name == key.args)

    def joined(self, child: Table, key: Column, parent: Table) -> str:
        return f"{child.sql} AS T1 JOIN {parent.sql} AS T2 ON T1.{key.sql} = T2.{parent.key.sql}"

    def value(self, column: Column, low: float = 0.0, high: float = 1.0):
        """A value that occurs, between two quantiles."""
        values = sorted(v for v in column.values if v is not None)
        return self.pick(values[int(low * len(values)) : max(int(high * len(values)), 1)])

    def number(self, column: Column, low: float = 0.0, high: float = 1.0) -> str:
        """Such a value as SQL and English write it: 9, not 9.0."""
        value = self.value(column, low, high)
        return value if column.kind == "date" else f"{value:g}" if isinstance(value, float) else str(value)

    def where(
        self, table: Table, at: str = "", but: tuple = (), simple: bool = False, narrow: bool = False
    ) -> tuple[str, str, Column]:
        """A condition on a table's rows: (sql, English behind the noun, its column).

        `simple`: on a category; `narrow`: true of few rows.
        """
        kinds = ["cat", "cat", "number", "time"] if not simple else ["cat"]
        kind = self.pick(kinds)
        column = self.column(table, *{"cat": ["cat"], "number": NUMBERS, "time": ["year", "date"]}[kind], but=but)
        if kind == "cat":
            value = self.value(column)
            return f"{at}{column.sql} = '{value}'", is_(column, value), column
        sign = self.pick("><")
        span = {">": (0.8, 0.95), "<": (0.05, 0.2)}[sign] if narrow else (0.25, 0.75)
        value = self.number(column, *span)
        quoted = f"'{value}'" if column.kind == "date" else value
        return f"{at}{column.sql} {sign} {quoted}", compared(column, sign, value), column


def is_(column: Column, value: str) -> str:
    return column.extra.format(value) if column.extra else f"[whose {column.phrase} is|with {column.phrase}] {value}"


def compared(column: Column, sign: str, value: str) -> str:
    if column.kind in ("year", "date"):
        return f"{column.extra or f'with a {column.phrase}'} {'after' if sign == '>' else 'before'} {value}"
    more, less = "[above|over|greater than|higher than]", "[below|under|less than|lower than]"
    if counted(column):
        return f"with {'more' if sign == '>' else 'fewer'} than {value} {counted(column)}"
    word = more if sign == ">" else less
    article = "" if column.phrase in UNCOUNTED else "a "
    short = f"[with {article}{column.phrase} {word}|whose {column.phrase} is {word}]"
    return f"{short if ' in ' not in column.phrase else f'whose {column.phrase} is {word}'} {value}"


def counted(column: Column) -> str:
    return column.phrase.removeprefix("number of ") if column.phrase.startswith("number of ") else ""


def extreme(column: Column, top: bool) -> tuple[str, str]:
    """Superlative around a noun: ("oldest", "") or ("", "with the highest price")."""
    if column.kind in ("year", "date"):
        latest = f"[{column.extra} [last|most recently]|with the latest {column.phrase}]"
        earliest = f"[{column.extra} [first|earliest]|with the earliest {column.phrase}]"
        plain = f"with the {'latest' if top else 'earliest'} {column.phrase}"
        return "", (latest if top else earliest) if column.extra else plain
    if column.extra:
        return column.extra.split("/")[0 if top else 1], ""
    if counted(column):
        return "", f"with the {'most' if top else 'fewest'} {counted(column)}"
    return "", f"with the {'highest' if top else 'lowest'} {column.phrase}"


def listing(what: str, nouns: str) -> str:
    return f"[[List|Show|Give|Find|Return|Get|Tell me] the {what} of [all|all the|the] {nouns}.|What are the {what} of [the|all] {nouns}?]"


def single(what: Column, table: Table, nouns: str) -> str:
    who = f"|Who is the {nouns}?" if table.human and what is table.label else ""
    return f"[What is the {what.phrase} of the {nouns}?|[Give|Find|Show|Tell me|Return] the {what.phrase} of the {nouns}.{who}]"


def counting(nouns: str) -> str:
    return f"[How many {nouns} are there?|Count the {nouns}.|What is the [total |]number of {nouns}?|[Find|Give|Show] the number of {nouns}.]"


def named(table: Table, value: str) -> str:
    return f"{'[the ' + table.one + '|]' if table.human else 'the ' + table.one} {value}"


def who(table: Table) -> str:
    return "who" if table.human else "that"


AGGREGATES = {"AVG": "[average|mean]", "MAX": "[highest|maximum]", "MIN": "[lowest|minimum]", "SUM": "total"}


def aggregate(g: Ask, t: Table, at: str = "") -> tuple[str, str, Column]:
    c = g.column(t, *NUMBERS)
    name = g.pick(a for a in AGGREGATES if a != "SUM" or not re.search(INTENSIVE, c.phrase))
    return f"{name}({at}{c.sql})", f"{AGGREGATES[name]} {c.phrase}", c

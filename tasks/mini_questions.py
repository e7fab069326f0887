"""Question templates of the embedded mini_sql task: SQL and English made together from what the columns are.

A template is a function of an `Ask` (one database, its rows and a random generator) and returns (sql, question); it
speaks of roles only (label, number, category, year or date, foreign key), so each one works on every database. In a
question, [this|that] stands for one of several wordings. A database that lacks the role raises LookupError.
Whether a candidate is kept (not empty, no ties at the cut, no wrong variant that gives the same answer) is decided by
mini_sql, on the data.
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
    return text[0].upper() + text[1:] + ("?" if re.match(r"(What|Which|Who|How|In which|On which)\b", text) else ".")


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

    def where(self, table: Table, at: str = "", but: tuple = (), simple: bool = False) -> tuple[str, str, Column]:
        """A condition on a table's rows: (sql, English behind the noun, its column)."""
        kinds = ["cat", "cat", "number", "time"] if not simple else ["cat"]
        kind = self.pick(kinds)
        column = self.column(table, *{"cat": ["cat"], "number": NUMBERS, "time": ["year", "date"]}[kind], but=but)
        if kind == "cat":
            value = self.value(column)
            return f"{at}{column.sql} = '{value}'", is_(column, value), column
        value, sign = self.number(column, 0.25, 0.75), self.pick("><")
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


# ---- one table -------------------------------------------------------------------------------------------------------


def count_all(g: Ask):
    t = g.pick(g.tables)
    return f"SELECT COUNT(*) FROM {t.sql}", counting(t.many)


def list_all(g: Ask):
    t = g.table()
    c = g.shown(t)
    return f"SELECT {c.sql} FROM {t.sql}", listing(plural(c.phrase), t.many)


def list_where(g: Ask):
    t = g.pick(g.tables)
    c = g.shown(t)
    sql, words, _ = g.where(t, but=(c,))
    return f"SELECT {c.sql} FROM {t.sql} WHERE {sql}", listing(plural(c.phrase), f"{t.many} {words}")


def count_where(g: Ask):
    t = g.pick(g.tables)
    sql, words, _ = g.where(t)
    return f"SELECT COUNT(*) FROM {t.sql} WHERE {sql}", counting(f"{t.many} {words}")


AGGREGATES = {"AVG": "[average|mean]", "MAX": "[highest|maximum]", "MIN": "[lowest|minimum]", "SUM": "total"}


def aggregate(g: Ask, t: Table, at: str = "") -> tuple[str, str, Column]:
    c = g.column(t, *NUMBERS)
    name = g.pick(a for a in AGGREGATES if a != "SUM" or not re.search(INTENSIVE, c.phrase))
    return f"{name}({at}{c.sql})", f"{AGGREGATES[name]} {c.phrase}", c


def measure(g: Ask):
    t = g.pick(g.tables)
    sql, words, _ = aggregate(g, t)
    return f"SELECT {sql} FROM {t.sql}", f"[What is|Find|Give|Show] the {words} of [all|all the|the] {t.many}"


def measure_where(g: Ask):
    t = g.pick(g.tables)
    sql, words, c = aggregate(g, t)
    condition, nouns, _ = g.where(t, but=(c,))
    return (
        f"SELECT {sql} FROM {t.sql} WHERE {condition}",
        f"[What is|Find|Give|Show] the {words} of [all|the] {t.many} {nouns}",
    )


def lookup(g: Ask):
    t = g.table("cat int real year date")
    c, v = g.column(t, "cat", "int", "real", "year", "date"), g.value(t.label)
    words = f"[What is|Find|Give|Show|Tell me] the {c.phrase} of {named(t, v)}"
    if c.kind in ("year", "date") and c.extra and not c.extra.startswith("who"):
        words = f"[{words}|{'On which date' if c.kind == 'date' else 'In which year'} was {named(t, v)} {c.extra}?]"
    return f"SELECT {c.sql} FROM {t.sql} WHERE {t.label.sql} = '{v}'", words


def different(g: Ask):
    t = g.pick(t for t in g.tables if t.of("cat"))
    c = g.column(t, "cat", solid=True)
    if g.rng.random() < 0.5:
        return (
            f"SELECT DISTINCT {c.sql} FROM {t.sql}",
            f"[What are the|List the|Show all|Find the|Give all] [different|distinct|unique] {plural(c.phrase)} of the {t.many}",
        )
    return (
        f"SELECT COUNT(DISTINCT {c.sql}) FROM {t.sql}",
        f"[How many [different|distinct] {plural(c.phrase)} are there among the {t.many}?"
        f"|[Count|Find the number of] the [different|distinct] {plural(c.phrase)} of the {t.many}.]",
    )


def ordered(g: Ask):
    t = g.table("int real year date")
    c = g.column(t, "int", "real", "year", "date", "person", "pair", "list", solid=True)
    down = g.rng.random() < 0.5 and c is not t.label
    low, high = ("earliest", "latest") if c.kind in ("year", "date") else ("lowest", "highest")
    way = f"[from {high} to {low}|in descending order]" if down else f"[from {low} to {high}|in ascending order]"
    words = f"[sorted|ordered] by {c.phrase} {way}" if c is not t.label else "in alphabetical order"
    return (
        f"SELECT {t.label.sql} FROM {t.sql} ORDER BY {c.sql}{' DESC' if down else ''}",
        f"[List|Show|Give|Return] the {plural(t.label.phrase)} of [all|the] {t.many} {words}.",
    )


def missing(g: Ask):
    t = g.pick(t for t in g.tables if any(c.nullable and c.kind != ">" for c in t.columns))
    c = g.pick(c for c in t.columns if c.nullable and c.kind != ">")
    nouns = f"{t.many} [whose {c.phrase} is [not known|unknown|missing]|without a [known|recorded] {c.phrase}]"
    if t.label and g.rng.random() < 0.5:
        return f"SELECT {t.label.sql} FROM {t.sql} WHERE {c.sql} IS NULL", listing(plural(t.label.phrase), nouns)
    return f"SELECT COUNT(*) FROM {t.sql} WHERE {c.sql} IS NULL", counting(nouns)


def excluded(g: Ask):
    t = g.table("cat")
    c = g.column(t, "cat", solid=True)
    v = g.value(c)
    words = f"not {c.extra.format(v)}" if c.extra else f"whose {c.phrase} is not {v}"
    return (
        f"SELECT {t.label.sql} FROM {t.sql} WHERE {c.sql} != '{v}'",
        listing(plural(t.label.phrase), f"{t.many} {words}"),
    )


def between(g: Ask):
    t = g.pick(t for t in g.tables if t.of(*NUMBERS, "year"))
    c = g.column(t, *NUMBERS, "year")
    low, high = g.number(c, 0.1, 0.45), g.number(c, 0.55, 0.9)
    words = f"whose {c.phrase} is between {low} and {high}"
    if c.kind == "year" and c.extra:
        words = f"{c.extra} between {low} and {high}"
    elif counted(c):
        words = f"with between {low} and {high} {counted(c)}"
    what, frame = ("COUNT(*)", counting) if not t.label or g.rng.random() < 0.4 else (t.label.sql, None)
    nouns = f"{t.many} {words}"
    return (
        f"SELECT {what} FROM {t.sql} WHERE {c.sql} BETWEEN {low} AND {high}",
        frame(nouns) if frame else listing(plural(t.label.phrase), nouns),
    )


def having(g: Ask):
    t = g.pick(t for t in g.tables if t.of("cat"))
    c = g.column(t, "cat", solid=True)
    k = g.pick(n for n in (c.values.count(v) for v in sorted(set(c.values))) if n > 1)
    sign, words = g.pick([(">", "more than"), (">=", "at least"), ("<", "fewer than")])
    return (
        f"SELECT {c.sql} FROM {t.sql} GROUP BY {c.sql} HAVING COUNT(*) {sign} {k}",
        f"[Which {plural(c.phrase)} have|[List|Find|Show] the {plural(c.phrase)} with] {words} {k} {t.many}",
    )


def superlative(g: Ask):
    t = g.table("int real year date")
    c = g.column(t, *NUMBERS, "year", "date")
    top = c.nullable or g.rng.random() < 0.6
    before, after = extreme(c, top)
    shown = g.pick([t.label, t.label, *t.of("cat", "int", "real")])
    if shown is c:
        shown = t.label
    condition, words = "", ""
    if g.rng.random() < 0.4:
        sql, words, _ = g.where(t, but=(c, shown))
        condition = f" WHERE {sql}"
    noun = f"{before} {t.one} {words + ' ' if words else ''}{after}" if before else f"{t.one} {words} {after}"
    if words and after:
        noun = f"{t.one} {after} among the {t.many} {words}"
    return (
        f"SELECT {shown.sql} FROM {t.sql}{condition} ORDER BY {c.sql}{' DESC' if top else ''} LIMIT 1",
        single(shown, t, noun),
    )


def top_few(g: Ask):
    t = g.table("int real year date")
    c = g.column(t, *NUMBERS, "year", "date")
    top, k = c.nullable or g.rng.random() < 0.6, g.pick([2, 3, 3, 4, 5])
    before, after = extreme(c, top)
    what = f"the {plural(t.label.phrase)} of the {k} {before} {t.many} {after}"
    return (
        f"SELECT {t.label.sql} FROM {t.sql} ORDER BY {c.sql}{' DESC' if top else ''} LIMIT {k}",
        f"[[List|Show|Give|Find]|What are] {what}",
    )


def two_columns(g: Ask):
    t = g.table("cat int real year date")
    c = g.column(t, "cat", "int", "real", "year", "date")
    condition, words = "", ""
    if g.rng.random() < 0.6:
        sql, words, _ = g.where(t, but=(c,))
        condition = f" WHERE {sql}"
    return (
        f"SELECT {t.label.sql}, {c.sql} FROM {t.sql}{condition}",
        listing(f"{plural(t.label.phrase)} and {plural(c.phrase)}", f"{t.many} {words}"),
    )


def grouped(g: Ask):
    t = g.pick(t for t in g.tables if t.of("cat"))
    c = g.column(t, "cat", solid=True)
    if g.rng.random() < 0.5 or not t.of(*NUMBERS):
        sql, words = "COUNT(*)", f"number of {t.many}"
    else:
        sql, words, _ = aggregate(g, t)
        words = f"{words} of its {t.many}"
    return (
        f"SELECT {c.sql}, {sql} FROM {t.sql} GROUP BY {c.sql}",
        f"[[Show|List|Give|Return] each {c.phrase} [and|with|together with] the {words}"
        f"|For [each|every] {c.phrase}, [show|give|list] the {c.phrase} and the {words}].",
    )


def two_conditions(g: Ask):
    t = g.pick(g.tables)
    one, first, c = g.where(t)
    other, second, _ = g.where(t, but=(c,))
    nouns = f"{t.many} {first} and {second}"
    if t.label and g.rng.random() < 0.6:
        return f"SELECT {t.label.sql} FROM {t.sql} WHERE {one} AND {other}", listing(plural(t.label.phrase), nouns)
    return f"SELECT COUNT(*) FROM {t.sql} WHERE {one} AND {other}", counting(nouns)


def either(g: Ask):
    t = g.pick(t for t in g.tables if t.of("cat"))
    c = g.column(t, "cat")
    one, other = g.rng.sample(sorted({v for v in c.values if v}), 2)
    nouns = f"{t.many} {c.extra.format(f'{one} or {other}') if c.extra else f'whose {c.phrase} is {one} or {other}'}"
    condition = f"{c.sql} = '{one}' OR {c.sql} = '{other}'"
    if t.label and g.rng.random() < 0.6:
        return f"SELECT {t.label.sql} FROM {t.sql} WHERE {condition}", listing(plural(t.label.phrase), nouns)
    return f"SELECT COUNT(*) FROM {t.sql} WHERE {condition}", counting(nouns)


def in_year(g: Ask):
    t = g.pick(t for t in g.tables if any(c.extra for c in t.of("date")))
    c = g.pick(c for c in t.of("date") if c.extra)
    year = g.value(c)[:4]
    nouns = f"{t.many} {c.extra} in {year}"
    if t.label and g.rng.random() < 0.6:
        return f"SELECT {t.label.sql} FROM {t.sql} WHERE {c.sql} LIKE '{year}%'", listing(plural(t.label.phrase), nouns)
    return f"SELECT COUNT(*) FROM {t.sql} WHERE {c.sql} LIKE '{year}%'", counting(nouns)


def low_and_high(g: Ask):
    t = g.pick(t for t in g.tables if t.of(*NUMBERS))
    c = g.column(t, *NUMBERS)
    return (
        f"SELECT MIN({c.sql}), MAX({c.sql}) FROM {t.sql}",
        f"[What are|Show|Find|Give] the [lowest and [the |]highest|minimum and maximum] {c.phrase} of [the|all] {t.many}",
    )


def commonest(g: Ask):
    t = g.pick(t for t in g.tables if t.of("cat"))
    c = g.column(t, "cat", solid=True)
    top = g.rng.random() < 0.65
    return (
        f"SELECT {c.sql} FROM {t.sql} GROUP BY {c.sql} ORDER BY COUNT(*){' DESC' if top else ''} LIMIT 1",
        f"[What is the {'most' if top else 'least'} [common|frequent] {c.phrase} [among|of] the {t.many}?"
        f"|Which {c.phrase} has the {'most' if top else 'fewest'} {t.many}?]",
    )


def beyond_average(g: Ask):
    t = g.table("int real")
    c = g.column(t, *NUMBERS)
    sign, words = g.pick([(">", "[above|higher than|greater than]"), ("<", "[below|lower than|less than]")])
    condition, extra = "", ""
    if g.rng.random() < 0.3:
        sql, extra, _ = g.where(t, but=(c,), simple=True)
        condition, extra = f" AND {sql}", f" {extra} and"
    return (
        f"SELECT {t.label.sql} FROM {t.sql} WHERE {c.sql} {sign} (SELECT AVG({c.sql}) FROM {t.sql}){condition}",
        listing(plural(t.label.phrase), f"{t.many}{extra} whose {c.phrase} is {words} the average of all {t.many}"),
    )


def both_kinds(g: Ask):
    t = g.pick(t for t in g.tables if t.of("cat"))
    c = g.column(t, "cat", solid=True)
    one, first, used = g.where(t, but=(c,))
    other, second, _ = g.where(t, but=(c,))
    word, joint, lead = g.pick([("INTERSECT", "and also", "both "), ("EXCEPT", "but no", "")])
    return (
        f"SELECT {c.sql} FROM {t.sql} WHERE {one} {word} SELECT {c.sql} FROM {t.sql} WHERE {other}",
        f"[Which {plural(c.phrase)} have|[List|Find] the {plural(c.phrase)} that have]"
        f" {lead}{t.many} {first} {'and' if lead else joint} {t.many} {second}",
    )


def group_chosen(g: Ask):
    t = g.pick(t for t in g.tables if t.of("cat") and t.of(*NUMBERS))
    c = g.column(t, "cat", solid=True)
    sql, words, n = aggregate(g, t)
    k = g.pick(sorted(c.values.count(v) for v in set(c.values))[1:])
    condition, words_in = "", f"each {c.phrase} with at least {k} {t.many}"
    if g.rng.random() < 0.4:
        where, extra, _ = g.where(t, but=(c, n))
        condition, words_in = f" WHERE {where}", f"each {c.phrase} with at least {k} {t.many} {extra}"
    whose = "of these" if condition else "of its"
    return (
        f"SELECT {c.sql}, {sql} FROM {t.sql}{condition} GROUP BY {c.sql} HAVING COUNT(*) >= {k} ORDER BY {sql} DESC",
        f"For {words_in}, [show|give|list] the {c.phrase} and the {words} {whose} {t.many},"
        f" [sorted|ordered] by that value from highest to lowest.",
    )


# ---- several tables --------------------------------------------------------------------------------------------------


def of_parent(g: Ask):
    """Children of one named parent, or of parents with a property."""
    child, key, parent = g.link()
    named_one = g.rng.random() < 0.6
    if named_one:
        v = g.value(parent.label)
        condition, words = f"T2.{parent.label.sql} = '{v}'", f"{key.phrase} {named(parent, v)}"
    else:
        sql, words, _ = g.where(parent, "T2.")
        condition, words = sql, f"{key.phrase} {parent.many} {words}"
    if named_one and g.rng.random() < 0.35:
        more, extra, _ = g.where(child, "T1.")
        condition = f"{condition} AND {more}"
        words = f"{words} and {extra}" if extra.startswith(("[", "with")) else f"{extra} {words}"
    source = f"FROM {g.joined(child, key, parent)} WHERE {condition}"
    how = g.rng.random()
    if how < 0.35:
        return f"SELECT COUNT(*) {source}", counting(f"{child.many} {words}")
    if how < 0.55 and child.of(*NUMBERS):
        sql, said, _ = aggregate(g, child, "T1.")
        return f"SELECT {sql} {source}", f"[What is|Find|Give|Show] the {said} of the {child.many} {words}"
    c = g.shown(child)
    return f"SELECT T1.{c.sql} {source}", listing(plural(c.phrase), f"{child.many} {words}")


def parent_of(g: Ask):
    child, key, parent = g.link(labelled=True)
    if len([k for k in child.of(">") if k.args == parent.name]) > 1:
        raise LookupError("two ways to the same parent")
    v = g.value(child.label)
    c = g.pick([parent.label, parent.label, *parent.of("cat", "int", "real", "year")])
    return (
        f"SELECT T2.{c.sql} FROM {g.joined(child, key, parent)} WHERE T1.{child.label.sql} = '{v}'",
        f"[What is|Find|Give|Show|Tell me] the {c.phrase} of the {parent.one} of {named(child, v)}",
    )


def with_parent(g: Ask):
    child, key, parent = g.link(labelled=True)
    return (
        f"SELECT T1.{child.label.sql}, T2.{parent.label.sql} FROM {g.joined(child, key, parent)}",
        f"[List|Show|Give] the {child.label.phrase} of each {child.one} [and|together with|along with]"
        f" the {parent.label.phrase} of its {parent.one}"
        + (f", leaving out {child.many} without a {parent.one}." if key.nullable else "."),
    )


def orphans(key: Column, parent: Table) -> bool:
    return bool(set(parent.key.values) - set(key.values))


def per_parent(g: Ask):
    child, key, parent = g.link()
    some = f" {'who' if parent.human else 'that'} has {child.many}" if orphans(key, parent) else ""
    if g.rng.random() < 0.6 or not child.of(*NUMBERS):
        sql, words = "COUNT(*)", f"number of {child.many}"
    else:
        sql, words, _ = aggregate(g, child, "T1.")
        words = f"{words} of {'their' if parent.human else 'its'} {child.many}"
    return (
        f"SELECT T2.{parent.label.sql}, {sql} FROM {g.joined(child, key, parent)} GROUP BY T2.{parent.key.sql}",
        f"[For [each|every] {parent.one}{some}, [show|give|list] the {parent.label.phrase} and the {words}"
        f"|[Show|List|Give] the {parent.label.phrase} of [each|every] {parent.one}{some} and the {words}].",
    )


def with_many(g: Ask):
    child, key, parent = g.link()
    k = g.pick(sorted({key.values.count(v) for v in set(key.values) - {None}})[1:] or [])
    return (
        f"SELECT T2.{parent.label.sql} FROM {g.joined(child, key, parent)} GROUP BY T2.{parent.key.sql} HAVING COUNT(*) >= {k}",
        listing(plural(parent.label.phrase), f"{parent.many} [with|{who(parent)} have] at least {k} {child.many}"),
    )


def parent_with_most(g: Ask):
    child, key, parent = g.link()
    top = orphans(key, parent) or g.rng.random() < 0.7
    noun = f"{parent.one} with the {'most' if top else 'fewest'} {child.many}"
    c = g.pick([parent.label, parent.label, parent.label, *parent.of("cat")])
    both = c is parent.label and g.rng.random() < 0.3
    ask = (
        f"[Show|Give|Find] the {c.phrase} of the {noun} and the number of these {child.many}."
        if both
        else single(c, parent, noun)
    )
    return (
        f"SELECT T2.{c.sql}{', COUNT(*)' if both else ''} FROM {g.joined(child, key, parent)} GROUP BY T2.{parent.key.sql}"
        f" ORDER BY COUNT(*){' DESC' if top else ''} LIMIT 1",
        ask,
    )


def parent_of_extreme(g: Ask):
    child, key, parent = g.link()
    n = g.column(child, *NUMBERS, solid=True)
    top = g.rng.random() < 0.65
    before, after = extreme(n, top)
    c = g.pick([parent.label, parent.label, *parent.of("cat")])
    return (
        f"SELECT T2.{c.sql} FROM {g.joined(child, key, parent)} ORDER BY T1.{n.sql}{' DESC' if top else ''} LIMIT 1",
        f"[What is|Find|Give|Show|Tell me] the {c.phrase} of the {parent.one} of the {before} {child.one} {after}.",
    )


def extreme_of_parent(g: Ask):
    child, key, parent = g.link(labelled=True)
    n = g.column(child, *NUMBERS, "year", "date", solid=True)
    top = g.rng.random() < 0.6
    before, after = extreme(n, top)
    if g.rng.random() < 0.6:
        v = g.value(parent.label)
        condition, words = f"T2.{parent.label.sql} = '{v}'", named(parent, v)
    else:
        condition, words, _ = g.where(parent, "T2.")
        words = f"{parent.many} {words}"
    noun = (
        f"{before} {child.one} {key.phrase} {words}"
        if before
        else f"{child.one} {after} among those {key.phrase} {words}"
    )
    return (
        f"SELECT T1.{child.label.sql} FROM {g.joined(child, key, parent)} WHERE {condition}"
        f" ORDER BY T1.{n.sql}{' DESC' if top else ''} LIMIT 1",
        single(child.label, child, noun),
    )


def childless(g: Ask):
    child, key, parent = g.link()
    known = f" WHERE {key.sql} IS NOT NULL" if key.nullable else ""
    some, extra, own = f"[with|{who(parent)} have] no {child.one}", "", ""
    if g.rng.random() < 0.5:
        sql, words, _ = g.where(child)
        some, known = f"{who(parent)} have no {child.many} {words}", (f"{known} AND " if known else " WHERE ") + sql
    if g.rng.random() < 0.3:
        sql, extra, _ = g.where(parent, simple=True)
        own = f" AND {sql}"
    return (
        f"SELECT {parent.label.sql} FROM {parent.sql}"
        f" WHERE {parent.key.sql} NOT IN (SELECT {key.sql} FROM {child.sql}{known}){own}",
        listing(plural(parent.label.phrase), f"{parent.many} {extra} {'and' if extra.startswith('[') else ''} {some}"),
    )


def having_some(g: Ask):
    child, key, parent = g.link()
    sql, words, _ = g.where(child)
    own, extra = "", ""
    if g.rng.random() < 0.25:
        mine, extra, _ = g.where(parent, simple=True)
        own, extra = f" AND {mine}", f" {extra}"
    return (
        f"SELECT {parent.label.sql} FROM {parent.sql} WHERE {parent.key.sql} IN (SELECT {key.sql} FROM {child.sql} WHERE {sql}){own}",
        listing(
            plural(parent.label.phrase), f"{parent.many}{extra} {who(parent)} have at least one {child.one} {words}"
        ),
    )


def through(g: Ask):
    """Across a many-to-many table: students taking Algebra."""
    t = g.pick(t for t in g.tables if t.link)
    one, two = t.of(">")
    a, b = g.parent(one), g.parent(two)
    v = g.value(b.label)
    source = (
        f"FROM {a.sql} AS T1 JOIN {t.sql} AS T2 ON T1.{a.key.sql} = T2.{one.sql}"
        f" JOIN {b.sql} AS T3 ON T2.{two.sql} = T3.{b.key.sql} WHERE T3.{b.label.sql} = '{v}'"
    )
    words = f"{a.many} {t.link} {named(b, v)}"
    if g.rng.random() < 0.3:
        sql, extra, _ = g.where(a, "T1.", simple=True)
        source, words = f"{source} AND {sql}", f"{a.many} {extra} {t.link} {named(b, v)}"
    if g.rng.random() < 0.3:
        return f"SELECT COUNT(*) {source}", counting(words)
    c = g.pick([a.label, a.label, *a.of("cat", "int")])
    return f"SELECT T1.{c.sql} {source}", listing(plural(c.phrase), words)


def both_children(g: Ask):
    child, key, parent = g.link()
    one, first, _ = g.where(child, "T1.")
    other, second, _ = g.where(child, "T1.")
    word, joint, lead = g.pick([("INTERSECT", "and", "both "), ("EXCEPT", "but no", "")])
    half = f"SELECT T2.{parent.label.sql} FROM {g.joined(child, key, parent)} WHERE "
    return (
        f"{half}{one} {word} {half}{other}",
        listing(
            plural(parent.label.phrase),
            f"{parent.many} {who(parent)} have {lead}{child.many} {first} {joint} {child.many} {second}",
        ),
    )


def either_reason(g: Ask):
    child, key, parent = g.link()
    mine, own, _ = g.where(parent, simple=True)
    theirs, words, _ = g.where(child, "T1.")
    return (
        f"SELECT {parent.label.sql} FROM {parent.sql} WHERE {mine} UNION SELECT T2.{parent.label.sql}"
        f" FROM {g.joined(child, key, parent)} WHERE {theirs}",
        listing(plural(parent.label.phrase), f"{parent.many} {own} or with at least one {child.one} {words}"),
    )


def beyond_average_of(g: Ask):
    child, key, parent = g.link(labelled=True)
    n = g.column(child, *NUMBERS)
    v = g.value(parent.label)
    sign, word = g.pick([(">", "[above|higher than]"), ("<", "[below|lower than]")])
    return (
        f"SELECT T1.{child.label.sql} FROM {g.joined(child, key, parent)} WHERE T2.{parent.label.sql} = '{v}'"
        f" AND T1.{n.sql} {sign} (SELECT AVG({n.sql}) FROM {child.sql})",
        listing(
            plural(child.label.phrase),
            f"{child.many} {key.phrase} {named(parent, v)} whose {n.phrase} is {word} the average of all {child.many}",
        ),
    )


# What is asked at each level, the frequent ones several times; a candidate counts for a level only if Spider's own
# hardness of its SQL agrees.
TEMPLATES = {
    "easy": [count_all, list_all, list_where, list_where, list_where, count_where, count_where, measure, measure]
    + [
        measure_where,
        measure_where,
        lookup,
        lookup,
        lookup,
        different,
        different,
        ordered,
        missing,
        excluded,
        between,
        having,
    ],
    "medium": [
        superlative,
        superlative,
        superlative,
        top_few,
        two_columns,
        two_columns,
        grouped,
        grouped,
        two_conditions,
    ]
    + [
        either,
        in_year,
        low_and_high,
        of_parent,
        of_parent,
        of_parent,
        parent_of,
        parent_of,
        with_parent,
        per_parent,
        with_many,
    ],
    "hard": [superlative, commonest, commonest, beyond_average, both_kinds, parent_of_extreme, childless, childless]
    + [having_some, having_some, through, through, of_parent],
    "extra": [parent_with_most, parent_with_most, parent_with_most, extreme_of_parent, extreme_of_parent, childless]
    + [both_children, either_reason, beyond_average_of, group_chosen, having_some, beyond_average],
}

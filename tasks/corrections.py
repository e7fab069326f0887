"""Self-correction trajectories: a plausible wrong query, its real error or result, a thought, the right query.

The wrong query is made from gold by one slip that small models really make (`SLIPS`), and it is run in the environment,
so what the model reads is what SQLite says. A slip counts only if its result is wrong by execution *and* shows that
something is wrong (an error, no rows, repeated rows, one row instead of one a group, another column), because nobody
can learn to repair what cannot be seen. The wrong turn carries `"train": False`: it is read, never learnt.
"""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import sqlglot
from sqlglot import exp

from rewards.exec_match import exec_match
from tasks.base import call, result
from tasks.schema_text import quote, read_schema, words

EMPTY = ("(0 rows", "\n0\n(1 row)", "\nNULL\n(1 row)")  # ways in which SQLEnv shows that nothing was found


@dataclass
class Slip:
    kind: str
    sql: str
    thoughts: tuple[str, ...]  # what one may say on seeing the outcome; one is drawn
    sign: Callable[[str], bool]  # whether the outcome shows that something is wrong


def correct(row: dict, env, rng: random.Random, right: list[dict]) -> list[dict] | None:
    """A completion that slips once and repairs itself into `right` (the gold completion), or None if no slip is wrong.

    `right` is [call, result, ..., final]: the gold trajectory, whose results were produced by `env`.
    """
    for slip in slips(row, rng):
        env.reset(**row)
        query = slip.sql
        answer = env.execute_sql(query)
        if not slip.sign(answer) or not is_wrong(query, row, slip.kind):
            continue
        repaired = dict(right[0], content=rng.choice(slip.thoughts))
        return [call("execute_sql", {"query": query}, train=False), result("execute_sql", answer), repaired, *right[1:]]
    return None


def is_wrong(query: str, row: dict, kind: str) -> bool:
    """Wrong by execution; the official judge ignores DISTINCT, so a missing one is left to the strict judge."""
    mode = "strict" if kind == "distinct" else "official"
    return exec_match(query, row["gold"], row["db_path"], mode=mode).correct is False


def slips(row: dict, rng: random.Random) -> Iterator[Slip]:
    """Candidates in random order, the frequent mistakes of small models rather first, at most two of a kind."""
    try:
        tree = sqlglot.parse_one(row["gold"], read="sqlite")
    except sqlglot.errors.SqlglotError:
        return
    places = {t.name.lower(): {c.name.lower() for c in t.columns} for t in read_schema(row["db_path"]).tables}
    for kind in sorted(SLIPS, key=lambda k: rng.random() ** (1 / SLIPS[k][1]), reverse=True):
        found = list(SLIPS[kind][0](tree, places, rng))
        rng.shuffle(found)
        yield from found[:2]


def text(tree: exp.Expression) -> str:
    return tree.sql(dialect="sqlite")


def is_error(answer: str) -> bool:
    return answer.startswith("Error")


def is_empty(answer: str) -> bool:
    return not is_error(answer) and any(sign in answer for sign in EMPTY)


def rows_of(answer: str) -> list[str]:
    return [] if is_error(answer) else answer.split("\n")[1:-1]


def edited(tree: exp.Expression, node: exp.Expression, change: Callable[[exp.Expression], None]) -> str:
    """The query with one node changed; the tree itself stays as it is."""
    number = next(i for i, n in enumerate(tree.walk()) if n is node)
    copy = tree.copy()
    change(next(n for i, n in enumerate(copy.walk()) if i == number))
    return text(copy)


def aliases(select: exp.Expression) -> dict[str, str]:
    """alias in lower case -> table in lower case, of one SELECT's own FROM and JOINs."""
    sources = [select.args.get("from_") or select.args.get("from")] + list(select.args.get("joins") or [])
    tables = [s.this for s in sources if s is not None and isinstance(s.this, exp.Table)]
    return {t.alias_or_name.lower(): t.name.lower() for t in tables}


def own_columns(select: exp.Select) -> list[exp.Column]:
    return [c for c in select.find_all(exp.Column) if c.find_ancestor(exp.Select) is select]


def wrong_table(tree, places, rng) -> Iterator[Slip]:
    """`T1.x` where x is a column of T2: the most frequent mistake of small models."""
    for select in tree.find_all(exp.Select):
        known = aliases(select)
        for column in own_columns(select):
            home = known.get(column.table.lower())
            name = column.name.lower()
            if home is None or isinstance(column.this, exp.Star):
                continue
            for other, table in known.items():
                if other != column.table.lower() and name not in places.get(table, {name}):
                    sql = edited(tree, column, lambda n, o=other: n.set("table", exp.to_identifier(o.upper())))
                    said = f"{column.name} is a column of {home}, not of {table}."
                    yield Slip("wrong table", sql, (said, f"The error is right: {said}"), is_error)


def wrong_column(tree, places, rng) -> Iterator[Slip]:
    """A column name as the question would have it (`singer_name` for `name`): not in the database."""
    everything = {c for columns in places.values() for c in columns}
    for select in tree.find_all(exp.Select):
        known = aliases(select)
        for column in own_columns(select):
            if isinstance(column.this, exp.Star):
                continue
            home = known.get(column.table.lower()) or next(
                (t for t in known.values() if column.name.lower() in places.get(t, ())), ""
            )
            parts = words(column.name)
            guesses = [f"{home}_{column.name}", "_".join(parts), f"{column.name}s", parts[-1] if parts else ""]
            guesses = [g for g in guesses if g and g.isidentifier() and g.lower() not in everything]
            if not guesses or not home:
                continue
            guess = rng.choice(guesses)
            sql = edited(tree, column, lambda n, g=guess: n.set("this", exp.to_identifier(g)))
            said = f"{home} has no column {guess}; it is called {quote(column.name)}."
            yield Slip("wrong column", sql, (said, f"I used a wrong name: {said}"), is_error)


def wrong_table_name(tree, places, rng) -> Iterator[Slip]:
    for table in tree.find_all(exp.Table):
        name = table.name
        guess = name[:-1] if name.lower().endswith("s") else f"{name}s"
        if guess.lower() in places or name.lower() not in places or not guess.isidentifier():
            continue
        sql = edited(tree, table, lambda n, g=guess: n.set("this", exp.to_identifier(g)))
        yield Slip("wrong table name", sql, (f"The table is called {quote(name)}, not {guess}.",), is_error)


def missing_join(tree, places, rng) -> Iterator[Slip]:
    for select in tree.find_all(exp.Select):
        for join in select.args.get("joins") or []:
            if isinstance(join.this, exp.Table):
                name = quote(join.this.name)
                said = (f"The query uses {name} without joining it.", f"A join with {name} is missing.")
                yield Slip("missing join", edited(tree, join, lambda n: n.pop()), said, is_error)


def ambiguous(tree, places, rng) -> Iterator[Slip]:
    """A column of two joined tables without its table."""
    for select in tree.find_all(exp.Select):
        known = aliases(select)
        for column in own_columns(select):
            owners = [t for t in known.values() if column.name.lower() in places.get(t, ())]
            if column.table and len(owners) > 1:
                sql = edited(tree, column, lambda n: n.set("table", None))
                said = f"{column.name} is in {' and '.join(sorted(set(owners)))}, so it needs its table."
                yield Slip("ambiguous column", sql, (said,), is_error)


def literal_case(tree, places, rng) -> Iterator[Slip]:
    """A value in another letter case finds nothing."""
    for literal in tree.find_all(exp.Literal, exp.Column):
        value = literal.this if isinstance(literal, exp.Literal) else None
        if isinstance(literal, exp.Column):  # SQLite reads "France" as text when there is no such column
            bare = not literal.table and getattr(literal.this, "quoted", False)
            value = literal.name if bare and not any(literal.name.lower() in c for c in places.values()) else None
        elif not literal.is_string:
            value = None
        if not value or isinstance(literal.parent, exp.Like):
            continue
        for other in sorted({value.lower(), value.upper(), value.capitalize()} - {value}):  # a set has no order
            sql = edited(tree, literal, lambda n, o=other: n.replace(exp.Literal.string(o)))
            said = (
                f"Nothing was found for '{other}'; the value is probably written '{value}'.",
                f"No match: I try '{value}' instead of '{other}'.",
            )
            yield Slip("literal case", sql, said, is_empty)


def missing_distinct(tree, places, rng) -> Iterator[Slip]:
    if isinstance(tree, exp.Select) and tree.args.get("distinct"):
        sql = edited(tree, tree, lambda n: n.set("distinct", None))
        said = ("Rows are repeated; each is wanted once.", "The same row comes several times, so I add DISTINCT.")
        yield Slip("distinct", sql, said, lambda a: len(rows_of(a)) > len(set(rows_of(a))))


def missing_group(tree, places, rng) -> Iterator[Slip]:
    if isinstance(tree, exp.Select) and tree.args.get("group") and not tree.args.get("limit"):
        by = " and ".join(text(e) for e in tree.args["group"].expressions)

        def without(node):
            node.set("group", None)
            node.set("having", None)

        said = (f"This is one row for everything; the question asks for one for each {by}.", "GROUP BY is missing.")
        yield Slip("group by", edited(tree, tree, without), said, lambda a: len(rows_of(a)) == 1)


def wrong_selection(tree, places, rng) -> Iterator[Slip]:
    """Another column of the same table is selected; the header of the result tells."""
    if not isinstance(tree, exp.Select):
        return
    known = aliases(tree)
    for item in tree.expressions:
        if not isinstance(item, exp.Column) or isinstance(item.this, exp.Star):
            continue
        tables = [known[item.table.lower()]] if item.table.lower() in known else list(known.values())
        home = next((t for t in tables if item.name.lower() in places.get(t, ())), None)
        others = sorted(places.get(home, set()) - {item.name.lower(), *(c.name.lower() for c in own_columns(tree))})
        if others:
            other = rng.choice(others)
            sql = edited(
                tree, item, lambda n, o=other: n.set("this", exp.to_identifier(o, quoted=not o.isidentifier()))
            )
            said = (f"The result shows {other}, but the question asks for {item.name}.",)
            yield Slip("wrong selection", sql, said, lambda a: not is_error(a) and not is_empty(a))


def syntax(tree, places, rng) -> Iterator[Slip]:
    """A word or a mark is lost."""
    sql = text(tree)
    losses = (("GROUP BY", "GROUP"), ("ORDER BY", "ORDER"), (")", ""), (", ", " , , "), (" ON ", " "), ("BETWEEN", ""))
    for what, instead in losses:
        if what in sql:
            head, _, tail = sql.rpartition(what)
            said = ("There is a syntax error; I write the query again.", "The query has a slip in its syntax.")
            yield Slip("syntax", f"{head}{instead}{tail}", said, lambda a: is_error(a) and "syntax" in a)


SLIPS = {  # kind -> (maker, weight); those that every query admits weigh less, so that all kinds are seen
    "wrong table": (wrong_table, 4),
    "ambiguous column": (ambiguous, 4),
    "missing join": (missing_join, 4),
    "literal case": (literal_case, 4),
    "distinct": (missing_distinct, 4),
    "group by": (missing_group, 4),
    "wrong column": (wrong_column, 2),
    "wrong selection": (wrong_selection, 1),
    "syntax": (syntax, 1),
    "wrong table name": (wrong_table_name, 0.5),
}


def corrected(trajectory: Callable) -> Callable[[dict, object, random.Random], list[dict] | None]:
    """Task.correct from Task.trajectory."""

    def correct_row(row: dict, env, rng: random.Random) -> list[dict] | None:
        return correct(row, env, rng, trajectory(row, env))

    return correct_row

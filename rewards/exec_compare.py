"""Compare two query results, and read from the text of a query the little that the comparison needs.

official  the verdicts of the Spider test-suite evaluator: bags of rows, any order of columns, order of rows only where the gold
          contains "order by" anywhere, Python's equality of values (1 == 1.0), with its quirk that the values of a row are also
          compared sorted by their text, so that 1 and 1.0 in rows of several columns may differ.
strict    bags of rows, order only where the outermost SELECT of gold has an ORDER BY; columns may be permuted only if exactly one
          permutation fits; two empty results match only if both queries read the same tables, and a query that reads no table
          does not match one that does. Values: NULL equals NULL and nothing else; numbers compare by value, so 1 equals 1.0,
          floats to 12 significant digits (a sum in another order is the same sum), -0.0 equals 0, NaN equals NaN; text never
          equals a number or bytes.

A permutation of columns is found by refining colours (which columns and rows can correspond at all) and backtracking over what
is left, one column at a time, with a bound on the work; beyond the bound the answer is None, undecided. The general problem is as
hard as graph isomorphism; results that get near the bound are built on purpose.
"""

import marshal
import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence

Rows = Sequence[tuple]
BUDGET = 3_000_000  # cells looked at by the search: well under a second

# ---- the text of a query ----

TOKEN = re.compile(
    r"""--[^\n]*|/\*.*?(?:\*/|\Z)|'(?:[^']|'')*'|"(?:[^"]|"")*"|`(?:[^`]|``)*`|\[[^\]]*\]|[ \t\n\f\r]+|\w+|.""",
    re.DOTALL | re.ASCII,
)
CURRENT_YEAR = re.compile(r"YEAR\s*\(\s*CURDATE\s*\(\s*\)\s*\)\s*", re.IGNORECASE)


def normalise(sql: str) -> str:
    """What the official tool does to every query: `> =` (an artefact of the dataset's tokeniser) and MySQL's current year."""
    sql = sql.replace("> =", ">=").replace("< =", "<=").replace("! =", "!=")
    return CURRENT_YEAR.sub("2020 ", sql) if "(" in sql and "curdate" in sql.lower() else sql


def official_text(sql: str, keep_distinct: bool) -> str:
    """Unless told to keep it, the official tool drops every DISTINCT (also COUNT(DISTINCT x)) and all but the first statement."""
    sql = normalise(sql)
    if keep_distinct or not (";" in sql or "distinct" in sql.lower()):
        return sql
    kept = []
    for token in TOKEN.findall(sql):
        if token.lower() == "distinct":
            continue
        kept.append(token)
        if token == ";" and any(not part.isspace() for part in kept[:-1]):
            break
    return "".join(kept)


def canonical_text(sql: str) -> str:
    """Equal results mean the same statement to SQLite: case outside quotes, white space and comments apart."""
    parts = []
    for token in TOKEN.findall(sql):
        if token[0] in " \t\n\f\r" or token.startswith(("--", "/*")):
            if parts and parts[-1] not in " (,":
                parts.append(" ")
        elif token[0] in "'\"`[":
            parts.append(token)
        else:
            if token in "(),;" and parts and parts[-1] == " ":
                parts.pop()
            parts.append(token.lower() if token.isascii() else token)
    return "".join(parts).rstrip(" ").removesuffix(";").rstrip(" ")  # one semicolon: a second one is a second statement


def ordered_at_top(sql: str) -> bool:
    """Does the outermost SELECT have an ORDER BY? Those of subqueries, windows and aggregates stand inside parentheses."""
    if "order" not in sql.lower():
        return False
    depth, last = 0, ""
    for token in TOKEN.findall(sql):
        if token.isspace() or token.startswith(("--", "/*")):
            continue
        depth += (token == "(") - (token == ")")
        if depth == 0 and last == "order" and token.lower() == "by":
            return True
        last = token.lower()
    return False


# ---- results ----


def packed(rows: Rows) -> bytes:
    """Equal bytes mean the same values of the same types in the same order. Version 2: no references, so it is a function of them."""
    return marshal.dumps(rows, 2)


def same_official(gold: Rows, pred: Rows, ordered: bool) -> bool | None:
    if len(gold) != len(pred):
        return False
    if not gold:
        return True
    if len(gold[0]) != len(pred[0]):
        return False
    found = column_maps(gold, pred, ordered, 1)
    if found and (_has_float(gold) or _has_float(pred)):
        left, right = [_by_text(row) for row in gold], [_by_text(row) for row in pred]
        return left == right if ordered else set(left) == set(right)
    return None if found is None else bool(found)


def same_strict(gold: Rows, pred: Rows, ordered: bool) -> bool | None:
    if len(gold) != len(pred):
        return False
    if not gold:
        return True
    if len(gold[0]) != len(pred[0]):
        return False
    gold, pred = [tuple(map(canonical, row)) for row in gold], [tuple(map(canonical, row)) for row in pred]
    if gold == pred if ordered else Counter(gold) == Counter(pred):
        return True
    found = column_maps(gold, pred, ordered, 2)
    return None if found is None else found == 1


def canonical(value: object) -> object:
    if not isinstance(value, float):
        return value
    if math.isnan(value):
        return ("nan",)
    if math.isinf(value):
        return value
    if abs(value) < 2**53:
        rounded = float(f"{value:.12g}")
        for number in (value, rounded):  # an integer stays exact; 2.9999999999999996 is 3
            if number.is_integer():
                return int(number)
        return rounded
    return float(f"{value:.12g}")


def as_written(rows: Rows) -> Rows:
    """Numbers as the text that SQLite makes of them; 27.0 as 27, because an answer in words does not say which it is."""
    text = {int: str, float: "{:.15g}".format}
    return [tuple(text[type(v)](v) if type(v) in text else v for v in row) for row in rows]


def _has_float(rows: Rows) -> bool:
    return any(float in map(type, row) for row in rows)


def _by_text(row: tuple) -> tuple:
    return tuple(sorted(row, key=lambda value: str(value) + str(type(value))))


def column_maps(gold: Rows, pred: Rows, ordered: bool, limit: int) -> int | None:
    """How many permutations of pred's columns give gold, counted up to `limit`; None if the search was given up.

    Rows are not empty and both tables have the same shape.
    """
    left, right = list(zip(*gold, strict=True)), list(zip(*pred, strict=True))
    if not left:
        return 1
    copies_left, copies_right = Counter(left), Counter(right)
    twins = len(copies_left) < len(left)  # identical columns: any permutation of them fits as well
    if copies_left == copies_right and (ordered or limit == 1):
        return limit if twins else 1
    if ordered or sorted(copies_left.values()) != sorted(copies_right.values()):
        return 0
    # Identical columns of gold must go to identical columns of pred: search over the distinct ones only.
    left, right = list(copies_left), list(copies_right)
    colours = _refine(left, right, [copies_left[c] for c in left], [copies_right[c] for c in right])
    if colours is None:
        return 0
    found = 0
    for complete in _assign(left, right, *colours):
        if not complete:
            return None
        found += 1
        if found >= limit or twins:
            return limit
    return found


def _refine(left: list, right: list, first_left: list, first_right: list) -> tuple[list, list] | None:
    """Colours of the columns such that columns of different colours cannot correspond; None if the tables cannot match."""
    colours = [first_left, first_right]
    kinds = 0
    for round_number in range(4):
        names: dict = {}
        if round_number == 0:
            rows = [[0] * len(left[0])] * 2
        else:
            row_names: dict = {}
            rows = [
                [
                    row_names.setdefault(frozenset(Counter(zip(colour, row, strict=True)).items()), len(row_names))
                    for row in zip(*columns, strict=True)
                ]
                for columns, colour in zip((left, right), colours, strict=True)
            ]
            if sorted(rows[0]) != sorted(rows[1]):
                return None
        colours = [
            [
                names.setdefault((c, frozenset(Counter(zip(side, column, strict=True)).items())), len(names))
                for c, column in zip(colour, columns, strict=True)
            ]
            for columns, colour, side in zip((left, right), colours, rows, strict=True)
        ]
        if sorted(colours[0]) != sorted(colours[1]):
            return None
        if len(names) in (kinds, len(left)):
            break
        kinds = len(names)
    return colours[0], colours[1]


def _assign(left: list, right: list, left_colours: list, right_colours: list) -> Iterator[bool]:
    """Yields True for every full assignment of right columns to left ones, False when the budget is used up."""
    size = Counter(left_colours)
    order = sorted(range(len(left)), key=lambda index: (size[left_colours[index]], left_colours[index]))
    rows, budget = len(left[0]), BUDGET
    # Rows of gold are told apart by the columns placed so far: names[k] names each (name so far, next value).
    names, counts, part = [], [], [0] * rows
    for index in order:
        table: dict = {}
        part = [table.setdefault(pair, len(table)) for pair in zip(part, left[index], strict=True)]
        names.append(table)
        counts.append(Counter(part))
    candidates = [[r for r, c in enumerate(right_colours) if c == left_colours[index]] for index in order]
    parts, used, stack = [[0] * rows], [], [iter(candidates[0])]
    while stack:
        level = len(stack) - 1
        for choice in stack[-1]:
            if choice in used:
                continue
            budget -= rows + 20
            if budget < 0:
                yield False
                return
            table = names[level]
            part = [table.get(pair, -1) for pair in zip(parts[-1], right[choice], strict=True)]
            if Counter(part) != counts[level]:
                continue
            if level + 1 == len(order):
                yield True
                continue
            parts.append(part)
            used.append(choice)
            stack.append(iter(candidates[level + 1]))
            break
        else:
            stack.pop()
            parts.pop()
            if used:
                used.pop()

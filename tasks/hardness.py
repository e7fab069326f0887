"""Spider's official hardness of a gold query (easy, medium, hard, extra), computed on sqlglot's tree.

The benchmark counts three things on the leftmost SELECT of the query: clauses (WHERE, GROUP BY, ORDER BY, LIMIT, each
JOIN, OR, LIKE), nestings (subqueries in conditions, set operations) and "others" (more than one aggregate, selected
column, condition or grouping). It reads its own parse of the SQL, whose habits are kept here: what stands behind
UNION belongs to the right-hand query, and an AND in HAVING counts as an aggregate.
"""

from functools import lru_cache

import sqlglot
from sqlglot import exp

DIFFICULTY = {"easy": 0.0, "medium": 1 / 3, "hard": 2 / 3, "extra": 1.0}
SUBQUERY = (exp.Select, exp.SetOperation, exp.Subquery)


@lru_cache(maxsize=4096)
def hardness(sql: str) -> str:
    """The level of one query; raises sqlglot.errors.SqlglotError when it cannot be read."""
    tree = sqlglot.parse_one(sql, read="sqlite")
    nested = 0
    while isinstance(tree, (exp.SetOperation, exp.Subquery)):
        nested = max(nested, int(isinstance(tree, exp.SetOperation)))
        tree = tree.this
    if not isinstance(tree, exp.Select):
        raise sqlglot.errors.ParseError(f"not a SELECT: {sql[:80]}")
    where, having = _conditions(tree, "where"), _conditions(tree, "having")
    joins = tree.args.get("joins") or []
    joined = [_flat(j.args["on"]) for j in joins if j.args.get("on")]
    conditions = [c for part in (*joined, where, having) for c in part[0]]
    nested += sum(_is_nested(c) for c in conditions)
    clauses = sum(tree.args.get(k) is not None for k in ("where", "group", "order", "limit")) + len(joins)
    clauses += sum(part[1] for part in (*joined, where, having)) + sum(
        _unwrap(c)[0].key in ("like", "ilike") for c in conditions
    )

    group = tree.args["group"].expressions if tree.args.get("group") else []
    order = tree.args["order"].expressions if tree.args.get("order") else []
    aggregates = sum(_leads_with_aggregate(e) for e in tree.expressions)
    aggregates += sum(_unwrap(c)[1] for c in where[0])
    aggregates += sum(_unwrap(c)[1] for c in having[0]) + max(len(having[0]) - 1, 0)
    aggregates += sum(isinstance(a, exp.AggFunc) for o in order for a in _operands(o.this))
    others = (aggregates > 1) + (len(tree.expressions) > 1) + (len(where[0]) > 1) + (len(group) > 1)
    return level(clauses, nested, others)


def level(clauses: int, nested: int, others: int) -> str:
    """The published thresholds."""
    if clauses <= 1 and others == 0 and nested == 0:
        return "easy"
    if nested == 0 and ((others <= 2 and clauses <= 1) or (clauses <= 2 and others < 2)):
        return "medium"
    if (nested == 0 and ((others > 2 and clauses <= 2) or (2 < clauses <= 3 and others <= 2))) or (
        clauses <= 1 and others == 0 and nested <= 1
    ):
        return "hard"
    return "extra"


def _conditions(tree: exp.Select, clause: str) -> tuple[list[exp.Expression], int]:
    node = tree.args.get(clause)
    return _flat(node.this) if node else ([], 0)


def _flat(node: exp.Expression) -> tuple[list[exp.Expression], int]:
    """The single conditions of a tree of ANDs and ORs, and the number of ORs."""
    if isinstance(node, exp.Paren):
        return _flat(node.this)
    if isinstance(node, (exp.And, exp.Or)):
        left, right = _flat(node.left), _flat(node.right)
        return left[0] + right[0], left[1] + right[1] + isinstance(node, exp.Or)
    return [node], 0


def _unwrap(condition: exp.Expression) -> tuple[exp.Expression, bool]:
    """(the condition without NOT, whether there was one)."""
    negated = isinstance(condition, exp.Not)
    while isinstance(condition, (exp.Not, exp.Paren)):
        condition = condition.this
    return condition, negated


def _is_nested(condition: exp.Expression) -> bool:
    inner, _ = _unwrap(condition)
    values = [inner.args.get(k) for k in ("expression", "query", "low", "high")]
    return any(isinstance(v, SUBQUERY) or (isinstance(v, exp.Expression) and v.find(exp.Select)) for v in values)


def _operands(node: exp.Expression) -> list[exp.Expression]:
    while isinstance(node, (exp.Paren, exp.Distinct)):
        node = node.this
    if isinstance(node, exp.Binary) and not isinstance(node, exp.Dot):
        return _operands(node.left) + _operands(node.right)
    return [node]


def _leads_with_aggregate(item: exp.Expression) -> bool:
    item = item.this if isinstance(item, exp.Alias) else item
    return isinstance(_operands(item)[0], exp.AggFunc)

"""What the hardened match (rewards/neighbours.py) catches and what it loses: python bench/exec_match.py --neighbours K ...

Wrong on purpose: each gold with its WHERE dropped, one condition dropped, DISTINCT dropped, > turned into >= (and the like), JOIN
into LEFT JOIN, COUNT(*) into COUNT(column), ASC into DESC. Those that the single database calls right are its false positives, or
mutants that the schema makes equivalent (LEFT JOIN over a declared NOT NULL key): nothing tells these two apart but a look.
Right by construction: each gold printed by another SQL generator, wrapped in a subquery, with comparisons turned round, BETWEEN as two
comparisons, AND reordered, WHERE TRUE. Every one of those that is lost is a fault.
"""

import time
from collections import Counter, defaultdict

import sqlglot
from sqlglot import exp

TURNED = {exp.GT: exp.GTE, exp.GTE: exp.GT, exp.LT: exp.LTE, exp.LTE: exp.LT}
MIRROR = {exp.GT: exp.LT, exp.GTE: exp.LTE, exp.LT: exp.GT, exp.LTE: exp.GTE, exp.EQ: exp.EQ, exp.NEQ: exp.NEQ}


def mutants(tree: exp.Expression) -> dict[str, exp.Expression]:
    found = {}

    def edit(name: str, kind, change) -> None:
        copy = tree.copy()
        node = next((n for n in copy.find_all(kind) if not isinstance(n, exp.Join) or not n.side), None)
        if node is not None and change(node) is not False and copy != tree:
            found[name] = copy

    edit("WHERE dropped", exp.Where, lambda node: node.pop())
    edit("condition dropped", exp.And, lambda node: node.replace(node.this))
    edit("DISTINCT dropped", exp.Distinct, _drop_distinct)
    edit(
        "> as >=",
        tuple(TURNED),
        lambda node: node.replace(TURNED[type(node)](this=node.this, expression=node.expression)),
    )
    edit("JOIN as LEFT JOIN", exp.Join, lambda node: node.set("side", "LEFT"))
    edit("DESC turned round", exp.Ordered, lambda node: node.set("desc", not node.args.get("desc")))
    return found


def _drop_distinct(node: exp.Distinct) -> bool | None:
    if isinstance(node.parent, exp.Select):
        node.parent.set("distinct", None)
    elif len(node.expressions) == 1:
        node.replace(node.expressions[0])
    else:
        return False
    return None


def rewrites(tree: exp.Expression, gold: str) -> dict[str, str]:
    found = {"printed": tree.sql("sqlite"), "wrapped": f"SELECT * FROM ({gold.strip().rstrip(';')}) AS t"}
    turned = tree.copy()
    for node in list(turned.find_all(*MIRROR)):
        if not isinstance(node.expression, (exp.Subquery, exp.Select)):
            node.replace(MIRROR[type(node)](this=node.expression.copy(), expression=node.this.copy()))
    found["comparisons turned round"] = turned.sql("sqlite")
    parts = tree.copy()
    for node in list(parts.find_all(exp.Between)):
        low = exp.GTE(this=node.this.copy(), expression=node.args["low"].copy())
        node.replace(
            exp.Paren(
                this=exp.And(this=low, expression=exp.LTE(this=node.this.copy(), expression=node.args["high"].copy()))
            )
        )
    if parts != tree:
        found["BETWEEN as two"] = parts.sql("sqlite")
    swapped = tree.copy()
    node = next(swapped.find_all(exp.And), None)
    if node is not None:
        node.replace(exp.And(this=exp.Paren(this=node.expression.copy()), expression=exp.Paren(this=node.this.copy())))
        found["AND reordered"] = swapped.sql("sqlite")
    certain = tree.copy()
    where = certain.find(exp.Where)
    if where is not None:
        where.set("this", exp.And(this=exp.Paren(this=where.this.copy()), expression=exp.Literal.number(1)))
        found["WHERE ... AND 1"] = certain.sql("sqlite")
    return found


def measure(rows: list[dict], paths: list[str], k: int, workers: int) -> None:
    from rewards.exec_match import exec_match_batch, neighbours_of

    golds = list(dict.fromkeys((row["gold"], path) for row, path in zip(rows, paths, strict=True)))
    started = time.perf_counter()
    copies = neighbours_of([path for _, path in golds], [gold for gold, _ in golds], k)
    print(
        f"{len(copies)} databases, {k} copies each: {time.perf_counter() - started:.1f} s (0 where they were there already)"
    )
    cases: list[tuple[str, str, str, str, str]] = []  # group, name, pred, gold, path
    for gold, path in golds:
        try:
            tree = sqlglot.parse_one(gold, read="sqlite")
        except sqlglot.errors.SqlglotError:
            continue
        cases += [("mutant", name, mutant.sql("sqlite"), gold, path) for name, mutant in mutants(tree).items()]
        cases += [("rewrite", name, text, gold, path) for name, text in rewrites(tree, gold).items()]
    if all("official" in row and "kind" in row for row in rows):
        cases += [("pairs", row["kind"], row["pred"], row["gold"], path) for row, path in zip(rows, paths, strict=True)]
    preds, wanted, where = ([case[i] for case in cases] for i in (2, 3, 4))
    for mode, keep in (("official", False), ("strict", True)):
        alone = exec_match_batch(preds, wanted, where, mode, keep, 10.0, None, workers)
        counts: dict = defaultdict(lambda: [0] * (k + 2))
        for n in range(k + 1):
            some = {path: found[:n] for path, found in copies.items()}
            hard = exec_match_batch(preds, wanted, where, mode, keep, 10.0, None, workers, some) if n else alone
            for (group, name, *_), before, after in zip(cases, alone, hard, strict=True):
                counts[group, name][0] += n == 0
                counts[group, name][n + 1] += before.correct is True and after.correct is True
        print(f"\n{mode}: cases, called right on the single database, and with 1..{k} neighbours")
        for (group, name), numbers in sorted(counts.items()):
            print(f"  {group:8} {name:26} {numbers[0]:6} | " + " ".join(f"{n:5}" for n in numbers[1:]))
        totals = Counter()
        for (group, _), numbers in counts.items():
            totals[group, "single"] += numbers[1]
            totals[group, "hardened"] += numbers[-1]
        print(f"  {dict(totals)}")

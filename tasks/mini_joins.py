"""Question templates of the embedded mini_sql task across tables, and the list of all templates by level.

As in mini_questions; the roles here are foreign keys: a child ("books") and how it speaks of its parent ("written by").
"""

from tasks.mini_schemas import Column, Table
from tasks.mini_words import NUMBERS, Ask, aggregate, counting, extreme, listing, named, plural, single, who


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
    its = "their" if parent.human else "its"
    some = f" {'who' if parent.human else 'that'} has {child.many}" if orphans(key, parent) else ""
    if g.rng.random() < 0.6 or not child.of(*NUMBERS):
        sql, words = "COUNT(*)", f"{its} number of {child.many}"
    else:
        sql, words, _ = aggregate(g, child, "T1.")
        words = f"the {words} of {its} {child.many}"
    return (
        f"SELECT T2.{parent.label.sql}, {sql} FROM {g.joined(child, key, parent)} GROUP BY T2.{parent.key.sql}",
        f"[For [each|every] {parent.one}{some}, [show|give|list] the {parent.label.phrase} and {words}"
        f"|[Show|List|Give] the {parent.label.phrase} of [each|every] {parent.one}{some} and {words}].",
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
    one, first, _ = g.where(child, "T1.", simple=g.rng.random() < 0.4)
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


LEVELS = {  # as in mini_questions
    "easy": [],
    "medium": [of_parent, of_parent, of_parent, parent_of, parent_of, with_parent, per_parent, with_many],
    "hard": [
        parent_of_extreme,
        childless,
        childless,
        having_some,
        having_some,
        through,
        through,
        through,
        either_reason,
    ],
    "extra": [parent_with_most, parent_with_most, extreme_of_parent, extreme_of_parent, childless, having_some]
    + [both_children, both_children, beyond_average_of],
}

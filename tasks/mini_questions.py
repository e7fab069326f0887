"""Question templates of the embedded mini_sql task on one table: SQL and English made together.

A template is a function of an `Ask` (one database, its rows and a random generator) and returns (sql, question). It
speaks of roles only (label, number, category, year or date), so each one works on every database; one that lacks the
role raises LookupError. Whether a candidate is kept (not empty, no ties at the cut, no wrong variant that gives the same
answer) is decided by mini_sql, on the data.
"""

from tasks.mini_words import NUMBERS, Ask, aggregate, counted, counting, extreme, listing, named, plural, single


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
    free = sorted(set(range(int(g.value(c, 0, 0.1)), int(g.value(c, 0.9)) + 1)) - set(c.values))  # ends no row has
    free = [v for v in free if v % 5 == 0] if len(free) > 50 else free
    low, high = g.pick(free[: len(free) // 2]), g.pick(free[len(free) // 2 :])
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
    word, joint, lead = g.pick([("INTERSECT", "and", "both "), ("EXCEPT", "but no", "")])
    one, first, used = g.where(t, but=(c,), narrow=word == "INTERSECT")
    other, second, _ = g.where(t, but=(c, used), narrow=True)
    return (
        f"SELECT {c.sql} FROM {t.sql} WHERE {one} {word} SELECT {c.sql} FROM {t.sql} WHERE {other}",
        f"[Which {plural(c.phrase)} have|[List|Find] the {plural(c.phrase)} that have]"
        f" {lead}{t.many} {first} {joint} {t.many} {second}",
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


# What is asked at each level, the frequent ones several times. A candidate counts for a level only if Spider's own
# hardness of its SQL agrees.
LEVELS = {
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
    + [two_conditions, either, in_year, low_and_high],
    "hard": [superlative, superlative, commonest, beyond_average, both_kinds, both_kinds],
    "extra": [group_chosen, beyond_average],
}

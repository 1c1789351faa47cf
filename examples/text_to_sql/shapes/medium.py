"""One table, one clause more: ordering, grouping, distinct values, negation, NULLs."""

from shapes.base import AGGREGATES, Draft, Picker


def aggregate_category(p: Picker) -> Draft:
    table = p.table()
    t, (c, _), (k, v), (word, function) = (
        table.name,
        p.number(table),
        p.category(table),
        p.rng.choice(AGGREGATES),
    )
    q = p.say(
        "What is the {w} {c} of {t} with {k} '{v}'?",
        "Give the {w} {c} of the {t} that have {k} '{v}'.",
        "Find the {w} {c} among {t} with {k} '{v}'.",
        w=word,
        c=c,
        t=t,
        k=k,
        v=v,
    )
    return Draft(q, f"SELECT {function}({c}) FROM {t} WHERE {k} = '{v}'", (f"SELECT {function}({c}) FROM {t}",))


def top_one(p: Picker) -> Draft:
    table = p.table()
    t, a, (c, _) = table.name, table.label, p.number(table)
    word, direction, back = p.rng.choice([("highest", " DESC", ""), ("lowest", "", " DESC")])
    q = p.say(
        "Which {a} of {t} has the {w} {c}?",
        "Give the {a} of the {t} with the {w} {c}.",
        "In {t}, which {a} has the {w} {c}?",
        a=a,
        t=t,
        w=word,
        c=c,
    )
    foils = (f"SELECT {a} FROM {t} ORDER BY {c}{back} LIMIT 1", f"SELECT {a} FROM {t} LIMIT 1")
    return Draft(q, f"SELECT {a} FROM {t} ORDER BY {c}{direction} LIMIT 1", foils)


def top_k(p: Picker) -> Draft:
    table = p.table()
    t, a, (c, _), k = table.name, table.label, p.number(table), p.rng.choice((2, 3, 4))
    word, direction, back = p.rng.choice([("highest", " DESC", ""), ("lowest", "", " DESC")])
    q = p.say(
        "List the {a} of the {k} {t} with the {w} {c}, {w} first.",
        "Show the {a} of the {k} {t} of {w} {c}, {w} first.",
        "Which {k} {t} have the {w} {c}? List the {a}, {w} first.",
        a=a,
        k=k,
        t=t,
        w=word,
        c=c,
    )
    foils = (
        f"SELECT {a} FROM {t} ORDER BY {c}{back} LIMIT {k}",
        f"SELECT {a} FROM {t} ORDER BY {c}{direction} LIMIT 1",
    )
    return Draft(q, f"SELECT {a} FROM {t} ORDER BY {c}{direction} LIMIT {k}", foils)


def sort_all(p: Picker) -> Draft:
    table = p.table()
    t, a, (c, _) = table.name, table.label, p.number(table)
    word, direction = p.rng.choice([("highest", " DESC"), ("lowest", "")])
    q = p.say(
        "List the {a} of all {t} by {c}, {w} first.",
        "Show the {a} of {t} ordered by {c}, {w} first.",
        "Sort {t} by {c}, {w} first, and give the {a}.",
        a=a,
        t=t,
        w=word,
        c=c,
    )
    return Draft(q, f"SELECT {a} FROM {t} ORDER BY {c}{direction}", (f"SELECT {a} FROM {t}",))


def group_count(p: Picker) -> Draft:
    table = p.table()
    t, (c, _) = table.name, p.category(table)
    q = p.say(
        "For each {c}, how many {t} are there?",
        "Show each {c} and the number of {t}.",
        "Count the {t} of each {c}.",
        "List each {c} with its count of {t}.",
        c=c,
        t=t,
    )
    return Draft(q, f"SELECT {c}, COUNT(*) FROM {t} GROUP BY {c}")


def distinct(p: Picker) -> Draft:
    table = p.table()
    t, (c, _) = table.name, p.category(table)
    q = p.say(
        "List the different {c} values of {t}.",
        "Show each distinct {c} in {t}.",
        "What different {c} values do {t} have?",
        "Give every {c} of {t} once.",
        c=c,
        t=t,
    )
    return Draft(q, f"SELECT DISTINCT {c} FROM {t}", (f"SELECT {c} FROM {t}",))


def count_distinct(p: Picker) -> Draft:
    table = p.table()
    t, (c, _) = table.name, p.category(table)
    q = p.say(
        "How many different {c} values do {t} have?",
        "Count the distinct {c} values in {t}.",
        "What is the number of different {c} values of {t}?",
        c=c,
        t=t,
    )
    return Draft(q, f"SELECT COUNT(DISTINCT {c}) FROM {t}", (f"SELECT COUNT({c}) FROM {t}",))


def negation(p: Picker) -> Draft:
    table = p.table()
    t, a, (c, v) = table.name, table.label, p.category(table)
    what, verb = p.rng.choice([("COUNT(*)", "Count the"), (a, f"List the {a} of")])
    q = p.say(
        "{b} {t} with {c} other than '{v}'.",
        "{b} {t} with {c} not '{v}'.",
        "{b} {t} that do not have {c} '{v}'.",
        b=verb,
        t=t,
        c=c,
        v=v,
    )
    return Draft(q, f"SELECT {what} FROM {t} WHERE {c} <> '{v}'", (f"SELECT {what} FROM {t} WHERE {c} = '{v}'",))


def missing(p: Picker) -> Draft:
    table = p.rng.choice([t for t in p.schema.tables if t.optional])
    t, a, c = table.name, table.label, p.rng.choice(sorted(table.optional))
    what, verb = p.rng.choice([("COUNT(*)", "Count the"), (a, f"List the {a} of")])
    word, test, back = p.rng.choice([("no", "IS NULL", "IS NOT NULL"), ("a known", "IS NOT NULL", "IS NULL")])
    q = p.say(
        "{b} {t} with {w} {c}.",
        "{b} {t} that have {w} {c}.",
        "{b} {t} having {w} {c}.",
        b=verb,
        t=t,
        w=word,
        c=c,
    )
    return Draft(q, f"SELECT {what} FROM {t} WHERE {c} {test}", (f"SELECT {what} FROM {t} WHERE {c} {back}",))

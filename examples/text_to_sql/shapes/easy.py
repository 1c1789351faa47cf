"""One table, one condition at most: counts, lists, look-ups and aggregates."""

from shapes.base import AGGREGATES, Draft, Picker, compare


def count_all(p: Picker) -> Draft:
    t = p.table().name
    q = p.say(
        "How many {t} are there?",
        "Count all {t}.",
        "What is the number of {t}?",
        "Give the number of {t}.",
        t=t,
    )
    return Draft(q, f"SELECT COUNT(*) FROM {t}")


def count_category(p: Picker) -> Draft:
    table = p.table()
    t, (c, v) = table.name, p.category(table)
    q = p.say(
        "How many {t} have {c} '{v}'?",
        "Count the {t} with {c} '{v}'.",
        "What is the number of {t} with {c} '{v}'?",
        t=t,
        c=c,
        v=v,
    )
    return Draft(q, f"SELECT COUNT(*) FROM {t} WHERE {c} = '{v}'", (f"SELECT COUNT(*) FROM {t}",))


def count_number(p: Picker) -> Draft:
    table = p.table()
    t, (c, span), (word, op) = table.name, p.number(table), compare(p)
    n = p.threshold(span)
    q = p.say(
        "How many {t} have {c} {w} {n}?",
        "Count the {t} with {c} {w} {n}.",
        "What is the number of {t} with {c} {w} {n}?",
        t=t,
        c=c,
        w=word,
        n=n,
    )
    other = "<" if op == ">" else ">"
    foils = (f"SELECT COUNT(*) FROM {t}", f"SELECT COUNT(*) FROM {t} WHERE {c} {other} {n}")
    return Draft(q, f"SELECT COUNT(*) FROM {t} WHERE {c} {op} {n}", foils)


def list_category(p: Picker) -> Draft:
    table = p.table()
    t, a, (c, v) = table.name, table.label, p.category(table)
    q = p.say(
        "List the {a} of {t} with {c} '{v}'.",
        "Show the {a} of all {t} that have {c} '{v}'.",
        "What is the {a} of {t} with {c} '{v}'?",
        a=a,
        t=t,
        c=c,
        v=v,
    )
    return Draft(q, f"SELECT {a} FROM {t} WHERE {c} = '{v}'", (f"SELECT {a} FROM {t}",))


def list_number(p: Picker) -> Draft:
    table = p.table()
    t, a, (c, span), (word, op) = table.name, table.label, p.number(table), compare(p)
    n = p.threshold(span)
    q = p.say(
        "List the {a} of {t} with {c} {w} {n}.",
        "Show the {a} of all {t} that have {c} {w} {n}.",
        "What is the {a} of {t} with {c} {w} {n}?",
        a=a,
        t=t,
        c=c,
        w=word,
        n=n,
    )
    return Draft(q, f"SELECT {a} FROM {t} WHERE {c} {op} {n}", (f"SELECT {a} FROM {t}",))


def lookup(p: Picker) -> Draft:
    table = p.table()
    t, a = table.name, table.label
    c = p.rng.choice(sorted([*table.categories, *table.numbers]))
    v = p.rng.choice(table.labels.split(","))
    q = p.say(
        "In {t}, what is the {c} of {a} '{v}'?",
        "From {t}, give the {c} of {a} '{v}'.",
        "What {c} in {t} does {a} '{v}' have?",
        a=a,
        t=t,
        c=c,
        v=v,
    )
    return Draft(q, f"SELECT {c} FROM {t} WHERE {a} = '{v}'")


def aggregate(p: Picker) -> Draft:
    table = p.table()
    t, (c, _), (word, function) = table.name, p.number(table), p.rng.choice(AGGREGATES)
    q = p.say(
        "What is the {w} {c} of all {t}?",
        "Give the {w} {c} of the {t}.",
        "Find the {w} {c} among {t}.",
        w=word,
        c=c,
        t=t,
    )
    return Draft(q, f"SELECT {function}({c}) FROM {t}")

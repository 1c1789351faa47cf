"""Two conditions, two tables, nested queries and groups with a condition."""

from shapes.base import AGGREGATES, Draft, Picker, compare


def two_conditions(p: Picker) -> Draft:
    table = p.table()
    t, a, (k, v), (c, span), (word, op) = (
        table.name,
        table.label,
        p.category(table),
        p.number(table),
        compare(p),
    )
    n = p.threshold(span)
    what, verb = p.rng.choice([("COUNT(*)", "Count the"), (a, f"List the {a} of")])
    q = p.say(
        "{b} {t} with {k} '{v}' and {c} {w} {n}.",
        "{b} {t} that have {k} '{v}' and {c} {w} {n}.",
        "{b} {t} with both {k} '{v}' and {c} {w} {n}.",
        b=verb,
        t=t,
        k=k,
        v=v,
        c=c,
        w=word,
        n=n,
    )
    foils = (f"SELECT {what} FROM {t} WHERE {k} = '{v}'", f"SELECT {what} FROM {t} WHERE {c} {op} {n}")
    return Draft(q, f"SELECT {what} FROM {t} WHERE {k} = '{v}' AND {c} {op} {n}", foils)


def join(p: Picker) -> Draft:
    child, parent = p.family()
    t, u, a, f, (c, v) = child.name, parent.name, child.label, parent.label, p.category(parent)
    what, verb = p.rng.choice([("COUNT(*)", "Count the"), (a, f"List the {a} of")])
    q = p.say(
        "{b} {t} whose {f} in {u} has {c} '{v}'.",
        "{b} {t} with a {f} from {u} with {c} '{v}'.",
        "{b} {t} whose {f} has {c} '{v}' in {u}.",
        b=verb,
        t=t,
        u=u,
        f=f,
        c=c,
        v=v,
    )
    return Draft(q, f"SELECT {what} FROM {t} JOIN {u} USING ({f}) WHERE {c} = '{v}'", (f"SELECT {what} FROM {t}",))


def join_lookup(p: Picker) -> Draft:
    child, parent = p.family()
    t, u, a, f, (c, _) = child.name, parent.name, child.label, parent.label, p.category(parent)
    v = p.rng.choice(child.labels.split(","))
    q = p.say(
        "In {u}, what {c} has the {f} of {t} with {a} '{v}'?",
        "Give the {c} in {u} of the {f} of {t} with {a} '{v}'.",
        "From {u}, what is the {c} of the {f} of {t} with {a} '{v}'?",
        u=u,
        c=c,
        f=f,
        t=t,
        a=a,
        v=v,
    )
    return Draft(q, f"SELECT {c} FROM {t} JOIN {u} USING ({f}) WHERE {a} = '{v}'")


def without(p: Picker) -> Draft:
    child, parent = p.family()
    t, u, f = child.name, parent.name, parent.label
    q = p.say(
        "Which {f} of {u} has no {t}?",
        "List each {f} of {u} without {t}.",
        "Show the {f} of {u} that is not in {t}.",
        f=f,
        u=u,
        t=t,
    )
    foils = (f"SELECT {f} FROM {u}", f"SELECT {f} FROM {u} WHERE {f} IN (SELECT {f} FROM {t})")
    return Draft(q, f"SELECT {f} FROM {u} WHERE {f} NOT IN (SELECT {f} FROM {t})", foils)


def most_common(p: Picker) -> Draft:
    table = p.table()
    t, (c, _) = table.name, p.category(table)
    word, direction, back = p.rng.choice([("most", " DESC", ""), ("fewest", "", " DESC")])
    q = p.say(
        "Which {c} has the {w} {t}?",
        "What {c} do the {w} {t} have?",
        "Find the {c} with the {w} {t}.",
        c=c,
        w=word,
        t=t,
    )
    tail = f"FROM {t} GROUP BY {c} ORDER BY COUNT(*)"
    foil = f"SELECT {c} {tail}{back} LIMIT 1"
    return Draft(q, f"SELECT {c} {tail}{direction} LIMIT 1", (foil,), f"SELECT {c}, COUNT(*) {tail}{direction} LIMIT 2")


def group_aggregate(p: Picker) -> Draft:
    table = p.table()
    t, (k, _), (c, _), (word, function) = (
        table.name,
        p.category(table),
        p.number(table),
        p.rng.choice(AGGREGATES),
    )
    q = p.say(
        "For each {k}, what is the {w} {c} of {t}?",
        "Show each {k} and the {w} {c} of {t}.",
        "List each {k} of {t} with the {w} {c}.",
        k=k,
        w=word,
        c=c,
        t=t,
    )
    return Draft(q, f"SELECT {k}, {function}({c}) FROM {t} GROUP BY {k}")


def having(p: Picker) -> Draft:
    table = p.table()
    t, (c, _), n = table.name, p.category(table), p.rng.choice((1, 2, 3, 4))
    q = p.say(
        "Which {c} has more than {n} {t}?",
        "List each {c} with more than {n} {t}.",
        "Show every {c} that has over {n} {t}.",
        c=c,
        n=n,
        t=t,
    )
    sql = f"SELECT {c} FROM {t} GROUP BY {c} HAVING COUNT(*) > {n}"
    return Draft(q, sql, (f"SELECT DISTINCT {c} FROM {t}",))


def above_average(p: Picker) -> Draft:
    table = p.table()
    t, a, (c, _) = table.name, table.label, p.number(table)
    word, op = p.rng.choice([("above", ">"), ("below", "<")])
    q = p.say(
        "List the {a} of {t} with {c} {w} the average.",
        "Show the {a} of all {t} that have {c} {w} the average.",
        "Which {a} of {t} has {c} {w} the average?",
        a=a,
        t=t,
        c=c,
        w=word,
    )
    sql = f"SELECT {a} FROM {t} WHERE {c} {op} (SELECT AVG({c}) FROM {t})"
    return Draft(q, sql, (f"SELECT {a} FROM {t}",))

"""Writes seeded orders: `{train,holdout,demos}.jsonl` under `data` beside this file, in a moment.

    python orders.py [--seed N] [--out FOLDER] [--train N] [--holdout N] [--demos N]

The same options give the same bytes. Customers and goods of the holdout occur nowhere else, and no message twice.
A demonstration is a call, so every order of `demos.jsonl` is two lines: one for the reader, one for the clerk.
"""

import argparse
import json
import random
from pathlib import Path
from typing import Any

from order_desk import messages_for

SHAPES = (
    "Hello, {who} here. Please send me {count} {colour} {goods} by Friday.",
    "My name is {who} and I would like to order {count} {colour} {goods}.",
    "Could I get {count} {colour} {goods}? Last time I had {less} {other} ones. Thank you, {who}.",
    "I thought of {less} {other} {goods} first, but please make it {count} {colour} ones. Best, {who}",
    "Not {less} but {count} {colour} {goods}, please. Yours, {who}",
    "We need {colour} {goods}, {count} of them, and no {other} ones. Regards, {who}",
    "{who} asked me to order {count} {colour} {goods}; the {less} {other} ones have come.",
    "The {less} {other} {goods} were fine. Now {count} {colour} ones for {who}, please.",
)
"""Half of them name a number or a colour that is not ordered."""
COLOURS = ("red", "green", "blue", "white", "black", "yellow")
LEARNED = {
    "who": ("Ana", "Tom", "Mia", "Raj", "Eva", "Leo", "Zoe", "Max", "Ida", "Ben"),
    "goods": ("lamps", "chairs", "mugs", "books", "shirts", "clocks", "bags", "pens"),
}
HELD = {
    "who": ("Kim", "Sam", "Lea", "Jon", "Amy", "Dan", "Ivy", "Gus"),
    "goods": ("plates", "hats", "boxes", "tables", "cups", "socks", "bowls"),
}


def order(draw: random.Random, names: dict[str, tuple[str, ...]]) -> dict[str, Any]:
    """The input and the answer of a task."""
    colour, other = draw.sample(COLOURS, 2)
    less, count = sorted(draw.sample(range(2, 13), 2))
    answer = {
        "who": draw.choice(names["who"]), "count": str(count), "colour": colour, "goods": draw.choice(names["goods"])
    }  # fmt: skip
    message = draw.choice(SHAPES).format(**answer, less=less, other=other)
    return {"input": {"message": message}, "answer": answer}


def note_of(answer: dict[str, str]) -> str:
    """What the reader is shown to write."""
    return "{who}: {count} {colour} {goods}".format(**answer)


def entry_of(answer: dict[str, str]) -> str:
    """The entry of the order book, which is what is scored."""
    return "{goods}, {colour}, {count}, for {who}".format(**answer)


def demonstration(task: dict[str, Any]) -> list[dict[str, Any]]:
    """How both agents should have gone about an order."""
    note = note_of(task["answer"])
    calls = (("reader", task["input"]["message"], note), ("clerk", note, entry_of(task["answer"])))
    return [
        {
            "task": task["id"],
            "policy": role,
            "messages": [*messages_for(role, asked), {"role": "assistant", "content": said}],
        }
        for role, asked, said in calls
    ]


def generate(out: Path, counts: dict[str, int], seed: int) -> None:
    """Write everything under `out`; `counts` maps train, holdout and demos to a number of orders."""
    draw, seen = random.Random(seed), set[str]()
    out.mkdir(parents=True, exist_ok=True)
    for name in ("holdout", "demos", "train"):
        rows: list[dict[str, Any]] = []
        while len(rows) < counts[name]:
            task = {"id": f"{name}-{len(rows)}", **order(draw, HELD if name == "holdout" else LEARNED)}
            if task["input"]["message"] not in seen:
                seen.add(task["input"]["message"])
                rows.append(task)
        if name == "demos":
            rows = [line for task in rows for line in demonstration(task)]
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (out / f"{name}.jsonl").write_text(text, encoding="utf-8")


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description="Write seeded orders for the example of two policies.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path(__file__).resolve().parent / "data")
    for name, count in (("train", 200), ("holdout", 100), ("demos", 8)):
        parser.add_argument(f"--{name}", type=int, default=count, help=f"orders in {name}.jsonl ({count})")
    options = parser.parse_args()
    generate(options.out, {name: getattr(options, name) for name in ("train", "holdout", "demos")}, options.seed)
    print(f"wrote {options.out}/train.jsonl, holdout.jsonl and demos.jsonl")


if __name__ == "__main__":
    main()

"""How many planted leaks does the near-duplicate guard find, and how many other tasks does it take for one? As JSON.

    python benchmarks/leaks.py                                  by words
    python benchmarks/leaks.py --model FOLDER                   and by a sentence model, at several cosines
    python benchmarks/leaks.py --model FOLDER --train train.jsonl --holdout holdout.jsonl

Planted are the rewordings of `tests/unit/base/paraphrases.py`. False alarms are counted among questions of the same
mould (`other`), among the questions themselves (each against all the rest), and among the tasks of `--train` against
those of `--holdout`, which no one planted anything into.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tests.unit.base.paraphrases import QUESTIONS

from leyden.base.leaks import Embed, Guard, Meaning, Vectors
from leyden.base.records import Task
from leyden.base.tasks import load_tasks

COSINES = (0.6, 0.65, 0.7, 0.75, 0.8)
WORDINGS = ("original", "light", "heavy", "other")

Make = Callable[[Sequence[Task]], Guard]


def planted(wording: str) -> list[Task]:
    """Every question in one wording."""
    return [Task(id=f"{wording}-{n}", input={"question": getattr(q, wording)}) for n, q in enumerate(QUESTIONS)]


def counts(make: Make, train: Sequence[Task], holdout: Sequence[Task]) -> dict[str, object]:
    """What a guard finds of everything that is planted, and of what is not."""
    guard = make(planted("original"))
    found: dict[str, object] = {word: len(guard.of_tasks(_renamed(planted(word)))) for word in WORDINGS}
    questions = planted("original")
    found["questions"] = sum(
        len(make([*questions[:n], *questions[n + 1 :]]).of_tasks([questions[n]])) for n in range(len(questions))
    )
    if train:
        began = time.perf_counter()
        leaks = make(holdout).of_tasks(train)
        found["train"] = len(leaks)
        found["train_seconds"] = round(time.perf_counter() - began, 2)
        found["train_nearest"] = [str(leak) for leak in sorted(leaks, key=lambda leak: -leak.similarity)[:3]]
    return found


def _renamed(tasks: Sequence[Task]) -> list[Task]:
    return [Task(id=f"planted-{task.id}", input=task.input) for task in tasks]


def remembering(embed: Embed) -> Embed:
    """The same, asking for each text once: the guards of this script embed the same texts again and again."""
    known: dict[str, NDArray[np.float32]] = {}

    def cached(texts: Sequence[str]) -> Vectors:
        new = [text for text in dict.fromkeys(texts) if text not in known]
        known.update(zip(new, embed(new), strict=True))
        return np.stack([known[text] for text in texts])

    return cached


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--model", type=Path, help="folder of a sentence model")
    parser.add_argument("--train", type=Path, help="task file that is trained on")
    parser.add_argument("--holdout", type=Path, help="task file that is not")
    args = parser.parse_args()
    train = load_tasks(args.train, split="train") if args.train else []
    holdout = load_tasks(args.holdout, split="holdout") if args.holdout else []
    report: dict[str, object] = {
        "num_questions": len(QUESTIONS), "num_train": len(train), "num_holdout": len(holdout),
        "words": counts(Guard, train, holdout),
    }  # fmt: skip
    if args.model:
        from leyden.learning.backends.embeddings import embedder

        embed = remembering(embedder(args.model))
        for cosine in COSINES:
            meaning = Meaning(embed=embed, cosine=cosine)
            report[f"cosine {cosine:g}"] = counts(lambda held: Guard(held, meaning=meaning), train, holdout)  # noqa: B023
    json.dump(report, sys.stdout, indent=2)
    print()


if __name__ == "__main__":
    main()

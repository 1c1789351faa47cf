"""The score of an order: is the entry right, and was the note good enough to enter it from?

`entry` is 1 when the entry of the order book is right to the letter. `noted` is the share of the four facts that stand
once in the reader's note, and `entered` the share of those in the note that the clerk put in their places: each agent
has a part of the reward that only it can earn, and the whole of it they earn together.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from orders import entry_of

FACTS = ("goods", "colour", "count", "who")
"""In the order of the entry."""


def verify(task: Mapping[str, Any], trace: Mapping[str, Any], workspace: Path) -> dict[str, float]:
    """See the module."""
    answer = task["answer"]
    note, entry = (_read(workspace / name) for name in ("note.txt", "entry.txt"))
    words = [word.strip(".,:;!") for word in note.split()]
    noted = [fact for fact in FACTS if words.count(answer[fact]) == 1]
    parts = [part.strip() for part in entry.split(",")]
    places = dict(zip(FACTS, parts, strict=False)) if len(parts) == len(FACTS) else {}
    wanted = {**answer, "who": f"for {answer['who']}"}
    return {
        "entry": float(entry == entry_of(answer)),
        "noted": len(noted) / len(FACTS),
        "entered": sum(places.get(fact) == wanted[fact] for fact in noted) / len(FACTS),
    }


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace").strip() if path.is_file() else ""

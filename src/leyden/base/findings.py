"""What an examination says: a word for how bad it is, what was seen, why it matters, and what to do."""

from dataclasses import dataclass
from typing import Literal

Level = Literal["ok", "note", "warning", "problem"]
"""`ok` as it should be; `note` worth knowing; `warning` a run works, but worse than it could; `problem` a run would
fail or train something else than it should."""

ORDER: tuple[Level, ...] = ("ok", "note", "warning", "problem")
"""From harmless to harmful."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that was examined."""

    name: str
    """What was examined, one or two words."""
    level: Level
    """How bad it is."""
    what: str
    """What was seen, with its value."""
    why: str = ""
    """Why it matters; empty where all is well."""
    do: str = ""
    """What to do; empty where there is nothing."""


def worst(findings: list[Finding]) -> Level:
    """The most harmful level; `ok` for none."""
    return max((finding.level for finding in findings), key=ORDER.index, default="ok")

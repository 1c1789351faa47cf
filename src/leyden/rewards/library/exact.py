"""Is the answer the wanted one, letter by letter or after normalising."""

import re
import unicodedata
from collections.abc import Sequence
from typing import Any, Literal

from pydantic import field_validator

from leyden.rewards.library.base import AnswerSettings, Evidence, Member, check_source

Normal = Literal["unicode", "case", "punctuation", "articles", "space"]
ALL: tuple[Normal, ...] = ("unicode", "case", "punctuation", "articles", "space")
"""Order in which they are applied: space last, because the others leave gaps."""


class ExactSettings(AnswerSettings):
    """`[rewards.settings.exact]`"""

    normalise: tuple[Normal, ...] = ("space",)
    """Differences that do not count: `unicode` (NFKC), `case`, `punctuation`, `articles` (a, an, the), `space`."""

    @field_validator("source")
    @classmethod
    def _source(cls, value: str) -> str:
        check_source(value)
        return value


def normalised(text: str, normals: Sequence[Normal] = ALL) -> str:
    """`text` without the differences named in `normals`."""
    if "unicode" in normals:
        text = unicodedata.normalize("NFKC", text)
    if "case" in normals:
        text = text.casefold()
    if "punctuation" in normals:
        text = "".join(" " if unicodedata.category(char).startswith("P") else char for char in text)
    if "articles" in normals:
        text = re.sub(r"\b(?:a|an|the)\b", " ", text, flags=re.IGNORECASE)
    if "space" in normals:
        text = " ".join(text.split())
    return text


def exact_match(said: str, wanted: Any, normals: Sequence[Normal] = ("space",)) -> float:
    """1.0 when `said` is `wanted`, or one of them when `wanted` is a list; else 0.0. An empty answer is never right."""
    accepted = wanted if isinstance(wanted, list | tuple) else [wanted]
    found = normalised(said, normals)
    return float(bool(found) and any(found == normalised(str(one), normals) for one in accepted))


def _score(evidence: Evidence, settings: ExactSettings) -> dict[str, float]:
    wanted = evidence.wanted(settings.answer)
    return {"exact": exact_match(evidence.text(settings.source), wanted, settings.normalise)}


MEMBER = Member(
    name="exact",
    says="the answer equals the wanted one, or one of a list; differences that do not count can be named",
    settings=ExactSettings,
    score=_score,
    components=("exact",),
    answer_key=lambda settings: settings.answer,
)

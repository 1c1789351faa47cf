"""Is the number in the answer the wanted one, within a tolerance."""

import math
import re
from typing import Any, Literal

from pydantic import Field, field_validator

from leyden.base.errors import VerifierError
from leyden.rewards.library.base import AnswerSettings, Evidence, Member, check_source

# Digits are bounded: a float of thousands of digits is infinity or a waste of time.
_NUMBER = re.compile(r"(?<![\w.])[-+]?(?:\d{1,3}(?:,\d{3}){1,6}|\d{1,40})?(?:\.\d{1,40})?(?:[eE][-+]?\d{1,4})?(?![\w])")


class NumericSettings(AnswerSettings):
    """`[rewards.settings.numeric]`"""

    relative: float = Field(1e-6, ge=0)
    """Share of the wanted number by which the answer may be off."""
    absolute: float = Field(1e-9, ge=0)
    """Amount by which it may be off."""
    which: Literal["last", "first", "only"] = "last"
    """Which number of the text counts; `only`: there must be exactly one."""

    @field_validator("source")
    @classmethod
    def _source(cls, value: str) -> str:
        check_source(value)
        return value


def numbers_in(text: str) -> list[float]:
    """Finite decimal numbers of a text in order, thousands separated by commas or not."""
    found = []
    for match in _NUMBER.finditer(text):
        word = match.group().replace(",", "")
        if any(char.isdigit() for char in word):
            number = float(word)
            if math.isfinite(number):
                found.append(number)
    return found


def numeric_match(
    said: str,
    wanted: float,
    *,
    relative: float = 1e-6,
    absolute: float = 1e-9,
    which: Literal["last", "first", "only"] = "last",
) -> float:
    """1.0 when the number of `said` is within max(relative * |wanted|, absolute) of `wanted`, else 0.0."""
    found = numbers_in(said)
    if not found or (which == "only" and len(found) != 1):
        return 0.0
    number = found[0] if which == "first" else found[-1]
    return float(abs(number - wanted) <= max(relative * abs(wanted), absolute))


def _score(evidence: Evidence, settings: NumericSettings) -> dict[str, float]:
    wanted = _wanted(evidence.task.get("id"), evidence.wanted(settings.answer))
    said = evidence.text(settings.source)
    value = numeric_match(said, wanted, relative=settings.relative, absolute=settings.absolute, which=settings.which)
    return {"numeric": value}


def _wanted(task_id: Any, answer: Any) -> float:
    try:
        number = float(str(answer).replace(",", ""))
    except ValueError:
        number = math.nan
    if isinstance(answer, bool) or not math.isfinite(number):
        raise VerifierError(f"the answer {answer!r} of task {task_id!r} is no finite number")
    return number


MEMBER = Member(
    name="numeric",
    says="a number of the answer is the wanted one, within a relative or an absolute tolerance",
    settings=NumericSettings,
    score=_score,
    components=("numeric",),
    answer_key=lambda settings: settings.answer,
)

"""Does the answer match, or avoid, regular expressions."""

import re
from collections.abc import Sequence

from pydantic import Field, field_validator

from leyden.rewards.library.base import Evidence, Member, TextSettings, check_pattern, check_source


class PatternSettings(TextSettings):
    """`[rewards.settings.pattern]`"""

    must: tuple[str, ...] = ()
    """Expressions of which each has to be found."""
    must_not: tuple[str, ...] = ()
    """Expressions of which none may be found."""
    whole: bool = False
    """True: an expression of `must` has to match the whole text, white space around it aside."""
    max_chars: int = Field(20_000, ge=1)
    """A longer text matches nothing: a bad expression can take very long on one."""

    @field_validator("source")
    @classmethod
    def _source(cls, value: str) -> str:
        check_source(value)
        return value

    @field_validator("must", "must_not")
    @classmethod
    def _patterns(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for pattern in value:
            check_pattern(pattern)
        return value


def pattern_match(said: str, must: Sequence[str], must_not: Sequence[str] = (), *, whole: bool = False) -> float:
    """1.0 when every expression of `must` and none of `must_not` is found in `said`, else 0.0."""
    text = said.strip()
    find = re.fullmatch if whole else re.search
    right = all(find(pattern, text, re.DOTALL) for pattern in must)
    return float(right and not any(re.search(pattern, text, re.DOTALL) for pattern in must_not))


def _score(evidence: Evidence, settings: PatternSettings) -> dict[str, float]:
    said = evidence.text(settings.source)
    if len(said) > settings.max_chars:
        return {"pattern": 0.0}
    return {"pattern": pattern_match(said, settings.must, settings.must_not, whole=settings.whole)}


MEMBER = Member(
    name="pattern",
    says="the answer matches regular expressions and avoids others",
    settings=PatternSettings,
    score=_score,
    components=("pattern",),
)

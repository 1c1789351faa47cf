"""The allow-list: which fields of a call may be stored, by the purpose of its data, and the redactor of
texts.

What is not allowed is never written. It does not look for personal data itself: the redactor does.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from leyden.base.errors import ConfigError

FIELDS = frozenset({"request", "response", "tokens", "spans"})
"""`request` the body as it came; `response` the answer with its texts and errors; `tokens` ids and
log-probabilities; `spans` attributes of spans."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Privacy:
    """What the recorder may write. ConfigError for a list that contradicts itself."""

    default: frozenset[str] = FIELDS
    """Fields for every purpose that `by_purpose` does not name."""
    by_purpose: Mapping[str, frozenset[str]] = field(default_factory=dict)
    """Purpose of the task to its fields."""
    redactor: Callable[[str], str] | None = None
    """Given every text of a body; what it returns is stored. It must not fail and must give equal for
    equal."""

    def __post_init__(self) -> None:
        for purpose, fields in (("default", self.default), *self.by_purpose.items()):
            unknown = fields - FIELDS
            if unknown:
                raise ConfigError(f"privacy for {purpose!r} allows {sorted(unknown)}; known fields: {sorted(FIELDS)}")
            if "tokens" in fields and not {"request", "response"} <= fields:
                raise ConfigError(
                    f"privacy for {purpose!r} allows tokens but not request and response; ids spell both "
                    "texts, so allow all three or leave tokens out"
                )

    def allowed(self, purpose: str | None) -> frozenset[str]:
        """Fields that may be stored of data with this purpose."""
        return self.default if purpose is None else self.by_purpose.get(purpose, self.default)

    @property
    def keeps_all(self) -> bool:
        """Whether nothing is ever held back or changed."""
        return self.redactor is None and all(f == FIELDS for f in (self.default, *self.by_purpose.values()))


KEEP = Privacy()
"""Everything as it is: tasks of one's own."""

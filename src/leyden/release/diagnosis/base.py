"""What a rule is and what it sees.

Promises: a rule is a pure function of the facts of one failed rollout and answers with the evidence, in words taken
from the trace, or None. Does not decide what is a failure (`release.evaluation` does).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, get_args

from leyden.base.records import Outcome, Trace
from leyden.traces.tool_calls import ToolCall, ToolResult, tool_calls, tool_results

Category = Literal["infrastructure", "budget", "format", "tool", "data", "execution", "reasoning"]

CATEGORIES: tuple[Category, ...] = get_args(Category)
"""Every category, in the order in which their rules are tried."""

MAX_EVIDENCE_CHARS = 200
"""Of one piece of evidence."""


@dataclass(frozen=True)
class Facts:
    """What rules look at; each is worked out once."""

    trace: Trace
    """The failed rollout."""

    @property
    def outcome(self) -> Outcome | None:
        """How the attempt ended."""
        return self.trace.attempt.outcome or self.trace.rollout.outcome

    @cached_property
    def components(self) -> Mapping[str, float]:
        """Reward components of the whole rollout."""
        return {reward.name: reward.value for reward in self.trace.rewards if reward.call_id is None}

    @cached_property
    def tool_calls(self) -> Sequence[ToolCall]:
        """Every tool call that the model asked for."""
        return [asked for call in self.trace.calls for asked in tool_calls(call)]

    @cached_property
    def tool_results(self) -> Sequence[ToolResult]:
        """What the harness said that tools returned."""
        return tool_results(self.trace)

    @cached_property
    def final_text(self) -> str:
        """Text of the last answer of the model."""
        for call in reversed(self.trace.calls):
            if call.choices:
                return call.choices[0].text
        return ""

    @property
    def finish_reason(self) -> str:
        """Of the last answer; empty if there was none."""
        for call in reversed(self.trace.calls):
            if call.choices:
                return call.choices[0].finish_reason
        return ""

    def low_component(self, *words: str) -> str | None:
        """Evidence of the first component at or below 0.5 whose name has one of `words` as a part."""
        for name, value in self.components.items():
            if set(name.lower().replace("-", "_").split("_")) & set(words) and value <= 0.5:
                return f"component {name!r} is {value:g}"
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One reason for failure."""

    name: str
    """Short, unique."""
    category: Category
    """What it belongs to."""
    meaning: str
    """What it says when it fits, for the documentation."""
    find: Callable[[Facts], str | None]
    """The evidence, or None when it does not fit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Why one rollout failed."""

    rule: str
    """Name of the rule, or `judge`."""
    category: Category
    """What it belongs to."""
    evidence: str
    """From the trace."""


def shorten(value: Any) -> str:
    """One line of evidence."""
    text = " ".join(str(value).split())
    return text if len(text) <= MAX_EVIDENCE_CHARS else f"{text[: MAX_EVIDENCE_CHARS - 3]}..."

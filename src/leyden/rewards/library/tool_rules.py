"""Did the agent use its tools as it should: called, never called, in order, with right arguments.

Tool calls are those that the model asked for in its answers, in the order of the calls, plus spans of kind `tool`
when `spans` is set, for harnesses that call tools in other ways.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import Field, field_validator

from leyden.rewards.library.base import Evidence, Member, Settings
from leyden.rewards.library.json_schema import _validator, fits

Used = tuple[str, Any]
"""(name of the tool, its arguments)."""


class ToolSettings(Settings):
    """`[rewards.settings.tool_rules]`"""

    called: tuple[str, ...] = ()
    """Tools that have to be called at least once."""
    never: tuple[str, ...] = ()
    """Tools that must not be called."""
    order: tuple[str, ...] = ()
    """Tools whose first calls have to come in this order; one that is never called breaks it."""
    at_most: dict[str, int] = Field({})
    """Tool to the number of calls that are allowed."""
    arguments: dict[str, dict[str, Any]] = {}
    """Tool to a JSON Schema that the arguments of each of its calls have to fit."""
    spans: bool = False
    """Also count spans of kind `tool`, with their attributes as arguments."""

    @field_validator("arguments")
    @classmethod
    def _schemas(cls, value: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
        import json

        for schema in value.values():
            _validator(json.dumps(schema, sort_keys=True))
        return value


def tools_used(trace: Mapping[str, Any], *, spans: bool = False) -> list[Used]:
    """Every tool call of an attempt, in order."""
    used: list[Used] = [
        (str(tool.get("name")), tool.get("arguments"))
        for call in trace.get("calls") or ()
        for tool in call.get("tool_calls") or ()
    ]
    if spans:
        used += [(str(s["name"]), s.get("attributes")) for s in trace.get("spans") or () if s.get("kind") == "tool"]
    return used


def in_order(names: Sequence[str], order: Sequence[str]) -> bool:
    """Whether the first calls of the tools of `order` come in that order, and all of them come."""
    if any(name not in names for name in order):
        return False
    firsts = [names.index(name) for name in order]
    return firsts == sorted(firsts)


def wrong_arguments(used: Sequence[Used], schemas: Mapping[str, Mapping[str, Any]]) -> int:
    """Calls whose arguments do not fit the schema of their tool."""
    return sum(name in schemas and not fits(arguments, schemas[name]) for name, arguments in used)


def _score(evidence: Evidence, settings: ToolSettings) -> dict[str, float]:
    used = tools_used(evidence.trace, spans=settings.spans)
    names = [name for name, _ in used]
    wrong = wrong_arguments(used, settings.arguments)
    broken = sum(name not in names for name in settings.called)
    broken += sum(names.count(name) for name in settings.never)
    broken += sum(max(0, names.count(name) - most) for name, most in settings.at_most.items())
    broken += int(bool(settings.order) and not in_order(names, settings.order))
    return {
        "tool_rules": float(broken + wrong == 0),
        "tool_violations": float(broken + wrong),
        "tool_wrong_arguments": float(wrong),
        "tool_calls": float(len(used)),
    }


MEMBER = Member(
    name="tool_rules",
    says="tools were called, never called, called in order, not too often, and with arguments that fit a schema",
    settings=ToolSettings,
    score=_score,
    components=("tool_rules", "tool_violations", "tool_wrong_arguments", "tool_calls"),
)

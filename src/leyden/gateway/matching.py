"""Whose call it is, where a harness sends one model name for several policies: decided by system message and tools.

Promises: only names of `match.models` are decided here; the same request always goes to the same policy; a call that
fits no matcher goes to `match.default`, and without one it is refused, as is a call that fits several, with the
matchers in the message. What is looked at is the request as an engine would read it, so every dialect is matched alike:
texts of system and developer messages, and the names of the tools that are offered. Pure.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from leyden.base.config import Config
from leyden.base.errors import RequestRefused
from leyden.gateway.dialects import Body

NEUTRAL = {"temperature": 1.0, "top_p": 1.0, "max_tokens": 1}
"""Sampling for a body that is looked at and not sent: what is sampled with depends on the policy."""
_SYSTEM = ("system", "developer")


@dataclass(frozen=True, slots=True)
class _Matcher:
    policy: str
    system: re.Pattern[str] | None
    tools: frozenset[str]

    def fits(self, system: str, tools: frozenset[str]) -> bool:
        return (self.system is None or self.system.search(system) is not None) and self.tools <= tools

    def __str__(self) -> str:
        parts = [f"system = {self.system.pattern!r}"] if self.system else []
        parts += [f"tools = {sorted(self.tools)}"] if self.tools else []
        return f"{self.policy} ({', '.join(parts)})"


class Matchers:
    """The matchers of a configuration, whose check has compiled every expression once already."""

    def __init__(self, config: Config) -> None:
        self.models = frozenset(config.match.models)
        self._default = config.match.default
        self._all = [
            _Matcher(name, re.compile(one.match.system) if one.match.system else None, frozenset(one.match.tools))
            for name, one in config.policies.items()
            if one.match.system or one.match.tools
        ]

    def policy_of(self, alias: str, body: Callable[[], Body]) -> str:
        """The policy that a call for `alias` belongs to; `body` makes the engine's request, if it has to be seen.

        Raises RequestRefused: 404 where nothing fits, 422 where several do.
        """
        if alias not in self.models:
            return alias
        engine = body()
        system, tools = system_of(engine), tools_of(engine)
        found = [one for one in self._all if one.fits(system, tools)]
        if len(found) == 1:
            return found[0].policy
        if not found and self._default:
            return self._default
        seen = f"system message {system[:80]!r}, tools {sorted(tools)}"
        if found:
            raise RequestRefused(
                f"a call for {alias!r} fits several policies: {_list(found)}; it has {seen}",
                status=422, kind="ambiguous_match", field="model",
                hint="make policies.NAME.match of one of them narrower, or ask for a policy by name",
            )  # fmt: skip
        raise RequestRefused(
            f"a call for {alias!r} fits no policy: {_list(self._all)}; it has {seen}",
            status=404, kind="no_match", field="model",
            hint="widen one of policies.NAME.match, set match.default, or ask for a policy by name",
        )  # fmt: skip


def system_of(engine: Body) -> str:
    """Texts of the system and developer messages, in order, a line break between them."""
    messages = engine.get("messages")
    found = messages if isinstance(messages, list) else []
    return "\n".join(_text(m.get("content")) for m in found if isinstance(m, dict) and m.get("role") in _SYSTEM)


def tools_of(engine: Body) -> frozenset[str]:
    """Names of the tools that a request offers."""
    tools = engine.get("tools")
    functions = [tool.get("function") for tool in tools if isinstance(tool, dict)] if isinstance(tools, list) else []
    return frozenset(str(one["name"]) for one in functions if isinstance(one, dict) and "name" in one)


def _text(content: Any) -> str:
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else []
    return "".join(str(part.get("text", "")) for part in parts if isinstance(part, dict))


def _list(matchers: Sequence[_Matcher]) -> str:
    return ", ".join(map(str, matchers))

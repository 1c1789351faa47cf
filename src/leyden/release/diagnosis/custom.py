"""Rules of your own, from a TOML file; they are tried before the built-in ones, in the order of the file.

    [[rule]]
    name = "stale_index"
    category = "data"
    field = "tool_result"
    pattern = "index is (old|empty)"

    [[rule]]
    name = "unsafe"
    category = "reasoning"
    field = "component.safe"
    below = 0.5

`field` is `final_text`, `tool_result`, `tool_call` (name and arguments), `stdout`, `stderr`, `outcome`,
`finish_reason`, `detail`, `diagnosis`, or `component.NAME`. Text is searched for `pattern` (a regular expression, case
ignored); a component fits when it is `below` the number or equal to it.
"""

import json
import re
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from leyden.base.errors import ConfigError
from leyden.release.diagnosis.base import CATEGORIES, Facts, Rule, shorten

_KEYS = {"name", "category", "field", "pattern", "below"}

_TEXTS: dict[str, Callable[[Facts], Sequence[str]]] = {
    "final_text": lambda facts: [facts.final_text],
    "tool_result": lambda facts: [result.text for result in facts.tool_results],
    "tool_call": lambda facts: [f"{c.name} {json.dumps(c.arguments, default=str)}" for c in facts.tool_calls],
    "stdout": lambda facts: [facts.trace.attempt.stdout_tail],
    "stderr": lambda facts: [facts.trace.attempt.stderr_tail],
    "outcome": lambda facts: [str(facts.outcome or "")],
    "finish_reason": lambda facts: [facts.finish_reason],
    "detail": lambda facts: [facts.trace.attempt.detail],
    "diagnosis": lambda facts: [facts.trace.attempt.diagnosis or ""],
}


def load_rules(path: Path) -> tuple[Rule, ...]:
    """The rules of a file. Raises ConfigError that names the file, the rule and the key."""
    try:
        tree = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"no rule file {path}; write [[rule]] tables as docs/evaluation.md shows") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None
    tables = tree.get("rule")
    if set(tree) != {"rule"} or not isinstance(tables, list):
        raise ConfigError(f"{path} holds {sorted(tree)}; it has [[rule]] tables and nothing else")
    rules = tuple(_rule(table, f"{path}, rule {number}") for number, table in enumerate(tables, start=1))
    names = [rule.name for rule in rules]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ConfigError(f"{path}: rule {twice!r} stands twice; give each its own name")
    return rules


def _rule(table: Any, where: str) -> Rule:
    if not isinstance(table, dict) or not {"name", "category", "field"} <= set(table):
        raise ConfigError(f"{where}: name, category and field are needed, and one of pattern and below")
    if unknown := sorted(set(table) - _KEYS):
        raise ConfigError(f"{where}: unknown key {unknown[0]!r}; known: {', '.join(sorted(_KEYS))}")
    if table["category"] not in CATEGORIES:
        raise ConfigError(f"{where}: category {table['category']!r} is none of {', '.join(CATEGORIES)}")
    if ("pattern" in table) == ("below" in table):
        raise ConfigError(f"{where}: give pattern for a text or below for a component, and not both")
    name, field = str(table["name"]), str(table["field"])
    find = _component(field, table["below"], where) if "below" in table else _text(field, table["pattern"], where)
    return Rule(name=name, category=table["category"], meaning=f"{where}: {field}", find=find)


def _component(field: str, below: Any, where: str) -> Callable[[Facts], str | None]:
    kind, _, component = field.partition(".")
    if kind != "component" or not component:
        raise ConfigError(f"{where}: below belongs to field component.NAME, not {field!r}; use pattern for a text")
    if isinstance(below, bool) or not isinstance(below, int | float):
        raise ConfigError(f"{where}: below is {below!r}, not a number")

    def find(facts: Facts) -> str | None:
        value = facts.components.get(component)
        return f"component {component!r} is {value:g}" if value is not None and value <= below else None

    return find


def _text(field: str, pattern: Any, where: str) -> Callable[[Facts], str | None]:
    if field not in _TEXTS:
        raise ConfigError(
            f"{where}: field {field!r} is no text; known: {', '.join(_TEXTS)} (and component.NAME with below)"
        )
    try:
        compiled = re.compile(pattern, re.IGNORECASE)
    except (re.error, TypeError) as error:
        raise ConfigError(f"{where}: pattern {pattern!r} is no regular expression: {error}") from None
    texts = _TEXTS[field]

    def find(facts: Facts) -> str | None:
        match = next((m for text in texts(facts) if (m := compiled.search(text))), None)
        return shorten(f"{field} has {match[0]!r}") if match else None

    return find

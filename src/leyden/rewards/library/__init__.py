"""Rewards that need no code: `rewards.verifier = "builtin:exact"`, or several, `"builtin:sql_rows+cost"`.

The same measures are plain functions that a verifier file imports: `from leyden.rewards.library import exact_match`.
The registry is closed; a measure of your own is a verifier file.
"""

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from leyden.base.errors import VerifierError
from leyden.base.records import Task
from leyden.rewards.library import (
    cost,
    exact,
    json_schema,
    numeric,
    pattern,
    retrieval,
    safety,
    sql_rows,
    tool_rules,
    unit_tests,
)
from leyden.rewards.library.base import Evidence, Member, Settings
from leyden.rewards.library.exact import exact_match, normalised
from leyden.rewards.library.json_schema import schema_match
from leyden.rewards.library.numeric import numbers_in, numeric_match
from leyden.rewards.library.pattern import pattern_match
from leyden.rewards.library.retrieval import retrieval_scores
from leyden.rewards.library.sql_rows import run_reading, same_rows, sql_match
from leyden.rewards.library.tool_rules import in_order, tools_used, wrong_arguments
from leyden.rewards.library.unit_tests import run_tests

__all__ = [
    "MEMBERS",
    "PREFIX",
    "Builtin",
    "Evidence",
    "Member",
    "Settings",
    "exact_match",
    "in_order",
    "make",
    "names_in",
    "normalised",
    "numbers_in",
    "numeric_match",
    "pattern_match",
    "retrieval_scores",
    "run_reading",
    "run_tests",
    "same_rows",
    "schema_match",
    "sql_match",
    "tools_used",
    "wrong_arguments",
]

PREFIX = "builtin:"
"""How `rewards.verifier` begins when it names members of the library."""

MEMBERS: Mapping[str, Member[Any]] = {
    module.MEMBER.name: module.MEMBER
    for module in (
        exact, numeric, pattern, json_schema, sql_rows, unit_tests, retrieval, tool_rules, cost, safety,
    )
}  # fmt: skip
"""By name."""


@dataclass(frozen=True, slots=True)
class Builtin:
    """Members with their settings, as one verifier function."""

    parts: Sequence[tuple[Member[Any], Settings]]
    """In the order of `rewards.verifier`."""
    base_dir: Path
    """Folder of the configuration."""

    def __call__(self, task: Mapping[str, Any], trace: Mapping[str, Any], workspace: Path) -> dict[str, float]:
        """Components of all members together. Raises VerifierError when the task lacks what a member needs."""
        evidence = Evidence(task, trace, Path(workspace), self.base_dir)
        found: dict[str, float] = {}
        for member, settings in self.parts:
            found.update(member.score(evidence, settings))
        return found

    def check(self, tasks: Sequence[Task]) -> None:
        """Raise VerifierError for tasks without the answer that a member compares with. Before the first rollout."""
        for member, settings in self.parts:
            key = member.answer_key(settings)
            if key is None:
                continue
            bad = [task.id for task in tasks if not _has_answer(task, key)]
            if bad:
                what = f"'answer.{key}'" if key else "'answer'"
                raise VerifierError(
                    f"builtin:{member.name} compares with {what}, but {len(bad)} of {len(tasks)} tasks have none "
                    f"(the first is {bad[0]!r}); add it to the task file, or choose another verifier"
                )


def names_in(verifier: str) -> list[str]:
    """Members that `builtin:A+B` names. Raises VerifierError for one that there is not."""
    names = [name.strip() for name in verifier.removeprefix(PREFIX).split("+")]
    for name in names:
        if name not in MEMBERS:
            near = difflib.get_close_matches(name, MEMBERS, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"there are: {', '.join(MEMBERS)}"
            raise VerifierError(f"rewards.verifier = {verifier!r}: no built-in verifier {name!r}; {hint}")
    if len(set(names)) != len(names):
        raise VerifierError(f"rewards.verifier = {verifier!r} names a member twice")
    return names


def make(verifier: str, settings: Mapping[str, Mapping[str, Any]], base_dir: Path) -> Builtin:
    """The verifier that `builtin:A+B` and `rewards.settings` describe. Raises VerifierError."""
    names = names_in(verifier)
    for name in settings:
        if name not in names:
            raise VerifierError(
                f"rewards.settings.{name} is set, but rewards.verifier = {verifier!r} does not use it; "
                f"settings are for: {', '.join(names)}"
            )
    parts = [(MEMBERS[name], MEMBERS[name].read(settings.get(name, {}))) for name in names]
    return Builtin(parts, base_dir)


def _has_answer(task: Task, key: str) -> bool:
    answer = task.answer
    if key:
        answer = answer.get(key) if isinstance(answer, Mapping) else None
    return answer is not None and answer not in ("", [])

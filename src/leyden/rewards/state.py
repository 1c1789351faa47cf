"""What an attempt changed in its environment: the difference of the snapshots before and after it.

Reads the spans that the runner records (kind `state_before` and `state_after`), as a verifier is shown them.
Rows are compared as multisets: a changed row is one removed and one added. Raises VerifierError when a state
that is asked for was not captured; an unknown state is never taken for an unchanged one.
"""

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from leyden.base.errors import VerifierError

WORKSPACE = "workspace"
"""Name of the snapshot of the workspace's files, which every attempt has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileChanges:
    """Files of the workspace, by path relative to it."""

    added: tuple[str, ...]
    """There after, not before."""
    removed: tuple[str, ...]
    """There before, not after."""
    changed: tuple[str, ...]
    """There both times, with other bytes."""

    @property
    def touched(self) -> tuple[str, ...]:
        """All of them, sorted."""
        return tuple(sorted({*self.added, *self.removed, *self.changed}))


@dataclass(frozen=True, slots=True, kw_only=True)
class RowChanges:
    """Rows of a query."""

    added: tuple[tuple[Any, ...], ...]
    """Rows that came."""
    removed: tuple[tuple[Any, ...], ...]
    """Rows that went."""


def states(trace: Mapping[str, Any], name: str) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """(before, after) of a snapshot. Raises VerifierError when one is missing or could not be taken."""
    found: dict[str, Mapping[str, Any]] = {}
    for span in trace.get("spans") or ():
        if span.get("name") == name and span.get("kind") in ("state_before", "state_after"):
            found[span["kind"]] = span.get("attributes") or {}
    for kind in ("state_before", "state_after"):
        if kind not in found:
            names = sorted({s["name"] for s in trace.get("spans") or () if s.get("kind") == kind})
            raise VerifierError(
                f"this attempt has no {kind} named {name!r} (it has: {', '.join(names) or 'none'}); "
                "add it under [harness.snapshots]"
            )
        if "error" in found[kind]:
            raise VerifierError(f"the {kind} {name!r} could not be taken: {found[kind]['error']}")
    return found["state_before"], found["state_after"]


def file_changes(trace: Mapping[str, Any]) -> FileChanges:
    """What happened to the files of the workspace."""
    before, after = (side["files"] for side in states(trace, WORKSPACE))
    return FileChanges(
        added=tuple(sorted(set(after) - set(before))),
        removed=tuple(sorted(set(before) - set(after))),
        changed=tuple(sorted(p for p in set(before) & set(after) if _bytes(before[p]) != _bytes(after[p]))),
    )


def row_changes(trace: Mapping[str, Any], name: str) -> RowChanges:
    """What happened to the rows of a query. Raises VerifierError when there were too many to compare."""
    before, after = states(trace, name)
    for side in (before, after):
        if side.get("num_unlisted"):
            raise VerifierError(
                f"snapshot {name!r} left out {side['num_unlisted']} rows; narrow its query or raise "
                "harness.snapshots.max_rows"
            )
    rows = [Counter(json.dumps(row) for row in side["rows"]) for side in (before, after)]
    return RowChanges(added=_rows(rows[1] - rows[0]), removed=_rows(rows[0] - rows[1]))


def _bytes(entry: Mapping[str, Any]) -> Any:
    """What tells two states of a file apart; a file too large to hash is known by its size only."""
    return entry.get("sha256") or entry.get("link") or entry.get("bytes")


def _rows(counted: Counter[str]) -> tuple[tuple[Any, ...], ...]:
    return tuple(tuple(json.loads(text)) for text in sorted(counted.elements()))

"""Cutting one set of tasks into train, val and holdout: by time, by domain, or by chance.

Promises: every task is in exactly one part, the same arguments give the same parts, and tasks that belong together
(the same domain, the same instant) are never torn apart. Does not look for near-duplicates (`leaks` does).
"""

import hashlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any

from leyden.base.errors import TaskError
from leyden.base.records import Split, Task, to_json

Parts = dict[Split, list[Task]]


def by_time(tasks: Sequence[Task], key: str, *, holdout: float, val: float = 0.0) -> Parts:
    """The newest share is the holdout, the next newest `val`, the rest `train`: tomorrow's work is what counts.

    `key` names the field of `input` with the time, dotted for nested ones: a number or an ISO 8601 text. Tasks of one
    instant stay together, in the newer part, so a part may be a little larger than asked. Raises TaskError.
    """
    _check_shares(holdout, val)
    times = {task.id: _time(task, key) for task in tasks}
    kinds = {isinstance(time, datetime) for time in times.values()}
    if len(kinds) > 1:
        raise TaskError(f"input.{key} is a number in some tasks and a date in others; use one of them")
    aware = {time.tzinfo is not None for time in times.values() if isinstance(time, datetime)}
    if len(aware) > 1:
        raise TaskError(f"input.{key} has a time zone in some tasks and none in others; use one of them")
    ordered = sorted(tasks, key=lambda task: (_seconds(times[task.id]), task.id))
    return _cut(ordered, holdout, val, lambda task: times[task.id])


def by_domain(tasks: Sequence[Task], *, holdout: Iterable[str], val: Iterable[str] = ()) -> Parts:
    """Whole domains are held out: does what was learned carry over to work of another kind?

    Raises TaskError for a domain that no task has, one that is asked for twice, and when nothing is left to train.
    """
    held, watched = set(holdout), set(val)
    known = {task.domain for task in tasks}
    if unknown := sorted((held | watched) - known):
        raise TaskError(f"no task has domain {unknown[0]!r}; there are: {', '.join(map(repr, sorted(known)))}")
    if both := sorted(held & watched):
        raise TaskError(f"domain {both[0]!r} is asked for as holdout and as val; choose one")
    parts: Parts = {"train": [], "val": [], "holdout": []}
    for task in tasks:
        part: Split = "holdout" if task.domain in held else "val" if task.domain in watched else "train"
        parts[part].append(replace(task, split=part))
    return _filled(parts, bool(watched))


def by_chance(tasks: Sequence[Task], *, holdout: float, val: float = 0.0, seed: int = 0) -> Parts:
    """A random cut, in the order of a hash of (seed, input): adding tasks later moves none from part to part
    except at the boundary, and equal inputs stay together. Raises TaskError.
    """
    _check_shares(holdout, val)

    def place(task: Task) -> str:
        return hashlib.sha256(to_json([seed, task.input]).encode()).hexdigest()

    return _cut(sorted(tasks, key=lambda task: (place(task), task.id)), holdout, val, place)


def _check_shares(holdout: float, val: float) -> None:
    if not 0 < holdout < 1 or not 0 <= val < 1:
        raise TaskError(f"shares holdout {holdout} and val {val}: holdout lies between 0 and 1, val from 0 to 1")
    if holdout + val >= 1:
        raise TaskError(f"holdout {holdout} and val {val} together leave nothing to train; make one smaller")


def _cut(ordered: Sequence[Task], holdout: float, val: float, group: Callable[[Task], object]) -> Parts:
    total = len(ordered)
    # The epsilon keeps 0.2 of 10 at 2 although 0.2 * 10 may come out above it.
    starts = [_start(ordered, total - math.ceil(total * share - 1e-9), group) for share in (holdout, holdout + val)]
    parts: Parts = {
        "train": [replace(task, split="train") for task in ordered[: starts[1]]],
        "val": [replace(task, split="val") for task in ordered[starts[1] : starts[0]]],
        "holdout": [replace(task, split="holdout") for task in ordered[starts[0] :]],
    }
    return _filled(parts, val > 0)


def _start(ordered: Sequence[Task], position: int, group: Callable[[Task], object]) -> int:
    while 0 < position < len(ordered) and group(ordered[position - 1]) == group(ordered[position]):
        position -= 1
    return position


def _filled(parts: Parts, wants_val: bool) -> Parts:
    for name in ("train", "val", "holdout") if wants_val else ("train", "holdout"):
        if not parts[name]:
            sizes = ", ".join(f"{part} {len(found)}" for part, found in parts.items())
            raise TaskError(f"the split leaves no task for {name} ({sizes}); change the shares, or use more tasks")
    return parts


def _time(task: Task, key: str) -> float | datetime:
    value: Any = task.input
    for part in key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
        return float(value)
    if isinstance(value, str):
        try:
            return datetime.fromisoformat(value)
        except ValueError:
            pass
    raise TaskError(
        f"task {task.id!r}: input.{key} is {value!r}, which is no time; give a number or ISO 8601, as 2025-03-01T12:00"
    )


def _seconds(time: float | datetime) -> float:
    if isinstance(time, float):
        return time
    if time.tzinfo is not None:
        return time.timestamp()
    # A time without a zone is only compared with others without one, so any fixed reading of it will do.
    return (time - datetime(1970, 1, 1)).total_seconds()

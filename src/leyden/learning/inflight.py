"""Which groups run, which wait, and which are learned from now: whole groups, bounded staleness, nothing thrown away.

Letters: B = groups per step, S = largest staleness in versions, v = versions made so far (v * B groups were consumed).
A group is known by its place in the order of tasks, counted from 0. It starts under a version; its staleness when it
is consumed is the difference of the versions. S = 0 is the synchronous schedule.

Two rules keep the promise:

    start    min(C - running, (S + v + 1) * B - started) groups may start; C = concurrency in groups
    take     the B finished groups that started first, if every group that is left can still be consumed in time

A group that started under u is due at version u + S. What is left can be consumed in time if, for every t > v, at most
(t - v) * B of it are due at t or before. The first rule makes that true for groups that start, the second keeps it
true; so no group gets too old, and a step waits only when it has to: for a group that is due, or for one without which
a later step would have more groups due than fit into it. Groups are taken in the order in which they started, not in
the order in which they finished, which would prefer short episodes.

The capacity rule is that of AReaL (arXiv 2505.24298, section 5.1), here in groups.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from leyden.base.records import Trace
from leyden.learning.schedule import TaskOrder


@dataclass(slots=True)
class InFlight:
    """The groups of a run that have started and are not consumed."""

    groups_per_step: int
    """B."""
    max_staleness: int
    """S."""
    num_groups: int
    """Groups of the whole run; none starts beyond."""
    max_running: int
    """C: groups that may run at once, at least 1."""
    num_started: int = 0
    """Groups that ever started: places 0 to num_started - 1."""
    running: dict[int, int] = field(default_factory=dict)
    """Place to the version that the group started under."""
    finished: dict[int, int] = field(default_factory=dict)
    """The same of groups that wait to be consumed."""

    def __post_init__(self) -> None:
        assert self.groups_per_step >= 1 and self.max_staleness >= 0 and self.max_running >= 1

    def room(self, version: int) -> int:
        """How many groups may start under `version`, counted from 0 at the start of the run."""
        allowed = (self.max_staleness + version + 1) * self.groups_per_step - self.num_started
        return max(0, min(self.max_running - len(self.running), allowed, self.num_groups - self.num_started))

    def start(self, version: int) -> list[int]:
        """Start what there is room for; the places, in order."""
        places = list(range(self.num_started, self.num_started + self.room(version)))
        self.running.update(dict.fromkeys(places, version))
        self.num_started += len(places)
        return places

    def finish(self, place: int) -> None:
        """Every rollout of a group is over."""
        self.finished[place] = self.running.pop(place)

    def take(self, version: int) -> list[int] | None:
        """The places of the groups to learn from as step `version`, in order; None while they are not complete."""
        chosen = sorted(self.finished)[: self.groups_per_step]
        if len(chosen) < self.groups_per_step or not self._in_time(version, set(chosen)):
            return None
        for place in chosen:
            del self.finished[place]
        return chosen

    def _in_time(self, version: int, chosen: set[int]) -> bool:
        """Whether everything but `chosen` can be consumed by the steps after `version` before it is too old."""
        left = sorted(u for place, u in (*self.running.items(), *self.finished.items()) if place not in chosen)
        return all(
            number <= (started + self.max_staleness - version) * self.groups_per_step
            for number, started in enumerate(left, 1)
        )


@dataclass(kw_only=True)
class Carried:
    """What a process remembers of the groups in flight."""

    flight: InFlight
    """Places of groups that run or wait."""
    order: TaskOrder
    """Which task stands at which place."""
    ids: Mapping[int, list[str]]
    """Ids of the rollouts of every place of the run."""
    recorded: dict[int, list[int]] = field(default_factory=dict)
    """Steps that an earlier process made and this one has to repeat, with the places of their groups."""
    traces: dict[int, list[Trace]] = field(default_factory=dict)
    """Of groups that wait to be learned from."""


def restored(in_flight: InFlight, started_under: Mapping[int, int], consumed: set[int], finished: set[int]) -> InFlight:
    """`in_flight` as it was, from what the store knows: versions at the start, places consumed, places finished.

    Raises nothing: places that were never started are simply not there.
    """
    in_flight.num_started = max(started_under, default=-1) + 1
    for place, version in sorted(started_under.items()):
        if place not in consumed:
            (in_flight.finished if place in finished else in_flight.running)[place] = version
    return in_flight

"""Whole groups, bounded staleness, nothing thrown away: the schedule against every order of finishing."""

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from leyden.learning.inflight import InFlight, restored


def play(
    draw: random.Random, *, steps: int, per_step: int, staleness: int, running: int
) -> list[list[tuple[int, int]]]:
    """A run in which running groups finish in any order: the (place, staleness) of every step's groups."""
    flight = InFlight(per_step, staleness, steps * per_step, running)
    began: dict[int, int] = {}
    taken: list[list[tuple[int, int]]] = []
    for version in range(steps):
        for _ in range(10_000):
            began.update(dict.fromkeys(flight.start(version), version))
            chosen = flight.take(version)
            if chosen is not None:
                taken.append([(place, version - began[place]) for place in chosen])
                break
            assert flight.running, "a step waits for nobody"
            flight.finish(draw.choice(sorted(flight.running)))
        else:
            raise AssertionError("a step never came together")
    assert not flight.running and not flight.finished, "groups were started for nothing"
    return taken


runs = st.fixed_dictionaries(
    {
        "steps": st.integers(1, 12),
        "per_step": st.integers(1, 5),
        "staleness": st.integers(0, 4),
        "running": st.integers(1, 12),
    }
)


@given(runs, st.integers())
@settings(max_examples=200, deadline=None)
def test_every_group_is_consumed_once_whole_and_never_too_old(run: dict[str, int], seed: int) -> None:
    taken = play(random.Random(seed), **run)
    assert [len(step) for step in taken] == [run["per_step"]] * run["steps"]
    assert sorted(place for step in taken for place, _ in step) == list(range(run["steps"] * run["per_step"]))
    assert all(0 <= age <= run["staleness"] for step in taken for _, age in step)


@given(runs, st.integers())
@settings(max_examples=50, deadline=None)
def test_without_staleness_each_step_is_the_next_groups(run: dict[str, int], seed: int) -> None:
    taken = play(random.Random(seed), **{**run, "staleness": 0})
    size = run["per_step"]
    assert [[place for place, _ in step] for step in taken] == [
        list(range(step * size, (step + 1) * size)) for step in range(run["steps"])
    ]


def test_a_slow_group_does_not_hold_up_the_first_steps_and_is_not_lost() -> None:
    flight = InFlight(groups_per_step=2, max_staleness=1, num_groups=6, max_running=8)
    assert flight.start(0) == [0, 1, 2, 3]
    for place in (1, 2, 3):
        flight.finish(place)
    assert flight.take(0) == [1, 2], "in the order of starting, not of finishing"
    assert flight.start(1) == [4, 5]
    flight.finish(5)
    flight.finish(4)
    assert flight.take(1) is None, "it is due now, though three others are finished"
    flight.finish(0)
    assert flight.take(1) == [0, 3]


def test_short_episodes_are_not_preferred() -> None:
    """Groups with an even place take four times as long; consumed steps hold as many of them as of the others."""
    flight = InFlight(groups_per_step=2, max_staleness=2, num_groups=40, max_running=6)
    left: dict[int, int] = {}
    num_long: list[int] = []
    for version in range(20):
        while True:
            left.update({place: 4 if place % 2 == 0 else 1 for place in flight.start(version)})
            chosen = flight.take(version)
            if chosen is not None:
                break
            for place in sorted(flight.running):
                left[place] -= 1
                if left[place] <= 0:
                    flight.finish(place)
        num_long.append(sum(place % 2 == 0 for place in chosen))
    # First come, first served would give 0 long ones at the beginning and 2 at the end.
    assert sum(num_long[:10]) >= 7 and sum(num_long) == 20


@given(runs, st.integers(), st.integers(0, 200))
@settings(max_examples=100, deadline=None)
def test_a_schedule_that_is_read_back_goes_on_as_it_was(run: dict[str, int], seed: int, cut: int) -> None:
    draw = random.Random(seed)
    flight = InFlight(run["per_step"], run["staleness"], run["steps"] * run["per_step"], run["running"])
    began: dict[int, int] = {}
    consumed: set[int] = set()
    version = 0
    for _ in range(cut):
        began.update(dict.fromkeys(flight.start(version), version))
        chosen = flight.take(version) if version < run["steps"] else None
        if chosen is not None:
            consumed |= set(chosen)
            version += 1
        elif flight.running:
            flight.finish(draw.choice(sorted(flight.running)))
    fresh = InFlight(run["per_step"], run["staleness"], run["steps"] * run["per_step"], run["running"])
    assert restored(fresh, began, consumed, set(began) - set(flight.running)) == flight

"""The asynchronous way to get the rollouts of a step: groups of later steps run on while one is learned from.

Groups are whole, none is older than `learn.max_staleness` versions when it is learned from, none is thrown away:
`leyden.learning.inflight` decides, this module starts groups in the store, sees them end, and reads their traces. What
was decided is in the step reports (`groups`), so a resumed run repeats the steps that its checkpoint does not hold with
the same groups, and then goes on with the others.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import mean
from typing import Any

from sqlalchemy import Connection

from leyden.base.config import Config
from leyden.base.records import Rollout, Trace
from leyden.house import House
from leyden.learning import schedule
from leyden.learning.inflight import Carried, InFlight, restored
from leyden.step_report import refuse_if_nothing_was_captured
from leyden.store import aio, ledger, queue
from leyden.store.attempts import TERMINAL
from leyden.traces.reader import Reader

STARTED_UNDER = "started_under"
"""Key of a rollout's metadata: steps that were behind the run when its group started."""


async def groups(house: House, step: int, versions: Mapping[str, int]) -> tuple[list[Trace], dict[str, Any]]:
    """(traces of the groups that step `step` learns from, what its report says about the choice).

    Raises LearningError when the groups that the step cannot do without are not over after `learn.step_timeout_s`, or
    when no rollout of the step made a model call.
    """
    learn = house.config.learn
    if house.carried is None:
        house.carried = await _restore(house, step)
    carried = house.carried
    done = carried.recorded.pop(step, None)
    if done is not None:
        ids = [one for place in done for one in carried.ids[place]]
        return await asyncio.to_thread(Reader(house.store).traces, ids), {"groups": done}
    phase = f"step {step + 1}/{learn.steps}: rollouts"
    house.progress.begin(phase, learn.tasks_per_step * learn.group_size)
    deadline = time.monotonic() + learn.step_timeout_s

    def late() -> str:
        waiting = Counter(r.state.value for r in states if r.state not in TERMINAL)
        return (
            f"{phase}: the groups that this step needs were not over after {learn.step_timeout_s:.0f} s "
            f"({dict(waiting)}); raise learn.step_timeout_s, or see the logs in {house.folder / 'logs'}"
        )

    while True:
        seen = house.store.count(queue.TOPIC)
        await _start(house, carried, step, versions)
        states = await _see_ends(house, carried)
        chosen = carried.flight.take(step)
        if chosen is not None:
            break
        over = sum(r.state in TERMINAL for r in states) + learn.group_size * len(carried.flight.finished)
        house.progress.advance(min(over, learn.tasks_per_step * learn.group_size), _note(carried))
        await house.wait(seen, deadline, late)
    house.progress.end()
    refuse_if_nothing_was_captured(phase, [trace for place in chosen for trace in carried.traces[place]])
    offered = [_tokens(traces) for traces in carried.traces.values()]
    taken = [carried.traces.pop(place) for place in chosen]
    report = {
        "groups": chosen,
        "groups_running": len(carried.flight.running),
        "groups_waiting": len(carried.flight.finished),
        # Equal in the long run; consumed below offered would mean that short episodes are preferred.
        "tokens_offered": mean(offered),
        "tokens_consumed": mean(map(_tokens, taken)),
    }
    return [trace for traces in taken for trace in traces], report


async def repin(house: House) -> None:
    """After an update: from their next call on, rollouts in flight ask for the weights that are served now."""
    if not house.config.learn.max_staleness:
        return
    now = time.time()

    def pin(connection: Connection) -> None:
        for policy, version in house.versions.items():
            queue.repin(connection, house.store, house.run_id, policy, version, now)

    await aio.write(house.store, pin)


async def _start(house: House, carried: Carried, step: int, versions: Mapping[str, int]) -> None:
    places = carried.flight.start(step)
    rollouts = [rollout for place in places for rollout in _planned(house, carried.order, place, versions, step)]
    if rollouts:
        await aio.write(house.store, lambda connection: queue.enqueue(connection, house.store, rollouts))


async def _see_ends(house: House, carried: Carried) -> list[Rollout]:
    """Take note of groups of which every rollout is over; the rollouts of those that still run."""
    ids = {place: carried.ids[place] for place in carried.flight.running}
    if not ids:
        return []
    wanted = [one for group in ids.values() for one in group]
    found = await aio.read(house.store, lambda connection: queue.get_many(connection, wanted))
    states = {rollout.id: rollout for rollout in found}
    ended = [place for place, group in ids.items() if all(states[one].state in TERMINAL for one in group)]
    for place in ended:
        carried.traces[place] = await asyncio.to_thread(Reader(house.store).traces, ids[place])
        carried.flight.finish(place)
    return [states[one] for place in carried.flight.running for one in ids[place]]


async def _restore(house: House, step: int) -> Carried:
    """What the store knows of the groups that started and were not learned from; and of steps from `step` on that an
    earlier process made and no checkpoint holds."""
    learn = house.config.learn
    flight = InFlight(
        groups_per_step=learn.tasks_per_step,
        max_staleness=learn.max_staleness,
        num_groups=learn.steps * learn.tasks_per_step,
        max_running=_max_running(house.config),
    )
    rows = await aio.read(house.store, lambda connection: ledger.steps(connection, house.run_id))
    made = {row.step: [int(place) for place in row.report["groups"]] for row in rows if row.stage == "rl"}
    consumed = {place for places in made.values() for place in places}
    order = schedule.TaskOrder(house.train_tasks, learn.tasks_per_step, house.config.run.seed)
    by_place = {p: [r.id for r in _planned(house, order, p, {}, 0)] for p in range(flight.num_groups)}
    every = [one for ids in by_place.values() for one in ids]
    found = await aio.read(house.store, lambda connection: queue.existing(connection, every))
    under = {p: int(found[ids[0]].metadata[STARTED_UNDER]) for p, ids in by_place.items() if ids[0] in found}
    over = {p for p in under if all(found[one].state in TERMINAL for one in by_place[p])}
    recorded = {number: places for number, places in made.items() if number >= step}
    flight = restored(flight, under, consumed, over)
    carried = Carried(flight=flight, order=order, ids=by_place, recorded=recorded)
    for place in carried.flight.finished:
        carried.traces[place] = await asyncio.to_thread(Reader(house.store).traces, by_place[place])
    return carried


def _max_running(config: Config) -> int:
    """Groups that may run at once: what the runner can take, and one more that waits for a free place."""
    return -(-config.harness.concurrency // config.learn.group_size) + 1


def _planned(
    house: House, order: schedule.TaskOrder, place: int, versions: Mapping[str, int], step: int
) -> Sequence[Rollout]:
    """The rollouts of the group at a place; their ids do not depend on versions and step."""
    learn = house.config.learn
    turn, within = divmod(place, learn.tasks_per_step)
    return schedule.plan_step(
        run_id=house.run_id,
        step=turn,
        tasks=order.tasks_at(turn)[within : within + 1],
        group_size=learn.group_size,
        policy_versions=versions,
        seed=house.config.run.seed,
        metadata={STARTED_UNDER: step},
        first_place=within,
    )


def _tokens(traces: Sequence[Trace]) -> float:
    return mean(sum(call.num_sampled for call in trace.calls) for trace in traces)


def _note(carried: Carried) -> str:
    return f"{len(carried.flight.running)} groups run, {len(carried.flight.finished)} wait"

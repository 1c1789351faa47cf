"""The asynchronous loop with a backend without weights: what is learned from when, and what a resumed run repeats."""

import asyncio
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from tests.unit.test_loop import config_of, house_of, mixed, rows_of, store

from leyden.base.config import from_tree
from leyden.base.errors import ConfigError, LearningError
from leyden.base.records import RolloutState
from leyden.carry import STARTED_UNDER
from leyden.house import House, Learner
from leyden.loop import improve
from leyden.store import Store, ledger, selections
from leyden.testing.fake_backend import FakeBackend, ScriptedServices

__all__ = ["store"]  # the fixture


class Slow(ScriptedServices):
    """Runs only one rollout a look, any of those that wait, so that groups overlap in every way."""

    draw = random.Random(0)

    def check(self) -> None:
        waiting = self._store.read(lambda c: selections.select_by_state(c, [RolloutState.QUEUING], 10_000))
        for rollout in self.draw.sample(waiting, min(3, len(waiting))):
            assert not self.held
            self._run(rollout)
            self.played.append(rollout)


def slow_house(store: Store, folder: Path, seed: int = 0, **learn: Any) -> House:
    config = config_of(folder, steps=5, max_staleness=2, checkpoint_every=2, **learn)
    house = house_of(store, folder, mixed(), config, holdout_tasks=[])
    house.services = Slow(store, mixed())
    Slow.draw = random.Random(seed)
    return house


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("leyden.house.POLL_S", 0.0)


def places(rows: list[Mapping[str, Any]]) -> list[list[int]]:
    return [row["groups"] for row in rows]


@pytest.mark.parametrize("seed", range(3))
def test_every_group_is_learned_from_once_while_others_run_on(store: Store, tmp_path: Path, seed: int) -> None:
    house = slow_house(store, tmp_path, seed)
    asyncio.run(improve(house))
    rows = rows_of(house)
    assert sorted(place for step in places(rows) for place in step) == list(range(10))
    assert all(len(step) == 2 for step in places(rows))
    assert max(row["groups_running"] + row["groups_waiting"] for row in rows) > 0, "nothing ran on during an update"
    for row in rows:
        assert row["conservation"] == {"sampled": 24, "trained": 24, "dropped": {}}
        assert row["staleness"] <= 2 and row["tokens_consumed"] == row["tokens_offered"] == 3
    assert house.lead.backend.version == 5


def test_rollouts_in_flight_ask_for_the_weights_that_are_served(store: Store, tmp_path: Path) -> None:
    house = slow_house(store, tmp_path)
    asyncio.run(improve(house))
    assert isinstance(house.services, Slow)
    under = [rollout.metadata[STARTED_UNDER] for rollout in house.services.played]
    pinned = [rollout.policy_versions["main"] for rollout in house.services.played]
    assert all(version >= start for version, start in zip(pinned, under, strict=True))
    assert any(version > start for version, start in zip(pinned, under, strict=True)), "none was pinned again"


def test_a_resumed_run_repeats_recorded_steps_with_their_groups_and_then_goes_on(store: Store, tmp_path: Path) -> None:
    first = slow_house(store, tmp_path)
    stopped_after = 3

    def stop() -> None:
        if first.lead.backend.version >= stopped_after:
            raise KeyboardInterrupt

    first.stop_requested = stop
    with pytest.raises(KeyboardInterrupt):
        asyncio.run(improve(first))
    before = places(rows_of(first))
    num_played = len(first.services.played)  # type: ignore[attr-defined]
    assert len(before) == stopped_after
    second = House(
        learners=[Learner(config=first.config, backend=FakeBackend(version=2))], run_id=first.run_id,
        folder=first.folder, store=store, services=Slow(store, mixed()), progress=type(first.progress)(),
        train_tasks=first.train_tasks, holdout_tasks=[], done_steps=2,
    )  # fmt: skip
    asyncio.run(improve(second))
    after = places(rows_of(second))
    assert after[: stopped_after - 2] == before[2:], "a recorded step came out with other groups"
    assert sorted(p for step in before[:2] + after for p in step) == list(range(10))
    runs = [r.id for services in (first.services, second.services) for r in services.played]  # type: ignore[attr-defined]
    assert len(runs) == len(set(runs)) == 40 and num_played < 40, "a rollout ran twice, or none was left to run"


def test_groups_that_never_end_are_told_with_their_states(store: Store, tmp_path: Path) -> None:
    house = slow_house(store, tmp_path, step_timeout_s=0.05)
    house.services.check = lambda: None  # type: ignore[method-assign]
    with pytest.raises(LearningError, match=r"were not over after 0 s \(\{'queuing': "):
        asyncio.run(improve(house))


def test_a_harness_that_never_calls_stops_the_run_with_its_diagnosis(store: Store, tmp_path: Path) -> None:
    house = slow_house(store, tmp_path)
    house.services = Slow(store, lambda rollout: None)
    with pytest.raises(LearningError, match=r"step 1/5: rollouts: none of 8 rollouts made a model call.*no_calls"):
        asyncio.run(improve(house))
    assert rows_of(house) == [] and house.lead.backend.version == 0, "something was learned from nothing"


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        ({"max_staleness": 1, "importance_cap": 0.0}, "nothing corrects for that"),
        ({"max_staleness": 1, "algorithm": "dapo", "refills": 2}, "waits for the groups of its own step"),
    ],
)
def test_what_does_not_go_with_older_rollouts_is_refused(tmp_path: Path, keys: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        from_tree({"learn": keys}, base_dir=tmp_path)


def test_the_store_has_what_a_run_of_carried_groups_made(store: Store, tmp_path: Path) -> None:
    asyncio.run(improve(slow_house(store, tmp_path)))
    steps = store.read(lambda connection: ledger.steps(connection, "run-1"))
    assert [(s.version_before, s.version_after) for s in steps] == [(i, i + 1) for i in range(5)]

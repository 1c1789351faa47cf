"""A run that learns to fool its reward: the hidden verifier sees it, and the loop says so."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from tests.unit.test_loop import Said, config_of, house_of, mixed, rows_of

from leyden.base.records import Attempt, Reward, Rollout
from leyden.loop import improve
from leyden.store import Store, ledger, open_store
from leyden.testing.fake_backend import ScriptedServices


class Fooled(ScriptedServices):
    """Rollouts whose hidden score agrees with the reward up to a step, and is 0 from then on."""

    fooled_from = 10**6

    def _score(self, rollout: Rollout, attempt: Attempt, reward: float) -> None:
        super()._score(rollout, attempt, reward)
        if rollout.mode == "train":
            hidden = 0.0 if (rollout.step or 0) >= self.fooled_from else reward
            self._recorder.rewards(
                rollout.id, attempt.id, [Reward(name="canary", value=hidden, source="canary")]
            ).result(20)


@pytest.fixture
def store(tmp_path: Path) -> Any:
    opened = open_store(f"sqlite:///{tmp_path / 'leyden.db'}")
    yield opened
    opened.close()


def run(store: Store, folder: Path, fooled_from: int) -> tuple[list[Any], list[str]]:
    config = config_of(folder, steps=8)
    rewards = config.rewards.model_copy(update={"canary_verifier": "hidden.py:solved", "canary_baseline": 3})
    house = house_of(store, folder, mixed(), config.model_copy(update={"rewards": rewards}), holdout_tasks=())
    services = Fooled(store, mixed(2))
    services.fooled_from = fooled_from
    house.services = services
    asyncio.run(improve(house))
    assert isinstance(house.progress, Said)
    return [row["canary"] for row in rows_of(house)], house.progress.sentences


def test_the_alarm_goes_when_the_reward_leaves_the_hidden_verifier_behind(store: Store, tmp_path: Path) -> None:
    rows, said = run(store, tmp_path, fooled_from=4)
    assert [row["gap"] for row in rows] == [0.0] * 4 + [0.5] * 4
    assert [row["cusum"] is None for row in rows] == [True] * 3 + [False] * 5
    assert [row["alarm"] for row in rows] == [False] * 4 + [True] * 4
    assert sum("drifting away from the hidden verifier" in sentence for sentence in said) == 4
    kept = store.read(lambda connection: ledger.steps(connection, "run-1"))
    assert [step.report["canary"] for step in kept] == rows


def test_a_reward_that_agrees_with_the_hidden_verifier_rings_no_alarm(store: Store, tmp_path: Path) -> None:
    rows, said = run(store, tmp_path, fooled_from=10**6)
    assert [row["alarm"] for row in rows] == [False] * 8
    assert not any("ALARM" in sentence for sentence in said)

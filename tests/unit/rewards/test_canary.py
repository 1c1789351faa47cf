"""The hidden verifier: which tasks, what gap, and when the alarm goes. The mathematics against simulation."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from leyden.base.config import RewardsConfig
from leyden.base.errors import VerifierError
from leyden.base.records import Attempt, Reward, Rollout, Task, Trace
from leyden.rewards.canary import cusum, gaps, is_canary, look, mean_steps_to_alarm, sentence, watch
from leyden.rewards.verifiers import Assessment

CONFIG = RewardsConfig(canary_verifier="h.py:v", canary_share=0.5, weights={"correct": 1.0}, success="correct")


def trace(task: str = "t", shown: float = 1.0, hidden: float | None = None, **fields: Any) -> Trace:
    rollout = Rollout(id=f"r-{task}", task=Task(id=task), reward=shown, **fields)
    rewards = [Reward(name="correct", value=shown)]
    rewards += [Reward(name="canary", value=hidden, source="canary")] if hidden is not None else []
    return Trace(
        rollout=rollout,
        attempt=Attempt(id="a", rollout_id=rollout.id, number=1, started_at=0),
        calls=(),
        rewards=rewards,
    )


def row(gap: float, num: int = 16, spread: float = 0.25) -> dict[str, Any]:
    """A step whose gaps have this mean and (about) this variance."""
    return {"num": num, "gap": gap, "sum": gap * num, "sum_squares": num * (spread + gap * gap)}


def simulated(shift: float, drift: float, limit: float, runs: int, longest: int) -> float:
    """Mean steps to an alarm of unit-variance steps whose mean is shifted, by brute force."""
    rng = np.random.default_rng(0)
    score, alive, total = np.zeros(runs), np.ones(runs, bool), np.zeros(runs)
    for _ in range(longest):
        total += alive
        score = np.maximum(0.0, score + rng.standard_normal(runs) + shift - drift)
        alive &= score <= limit
        if not alive.any():
            break
    return float(total.mean())


@pytest.mark.parametrize(("shift", "longest"), [(1.0, 400), (0.5, 2000), (2.0, 200)])
def test_the_mean_delay_of_the_alarm_is_what_the_formula_says(shift: float, longest: int) -> None:
    expected = mean_steps_to_alarm(shift, drift=0.5, limit=5.0)
    assert simulated(shift, 0.5, 5.0, 4000, longest) == pytest.approx(expected, rel=0.08)


def test_a_false_alarm_comes_once_in_about_930_steps() -> None:
    assert mean_steps_to_alarm(0.0, drift=0.5, limit=5.0) == pytest.approx(931, rel=0.01)
    assert simulated(0.0, 0.5, 5.0, 1500, 12_000) == pytest.approx(931, rel=0.1)


def test_cusum_is_that_of_the_textbook() -> None:
    rows = [row(0.0) for _ in range(5)] + [row(g) for g in (0.125, 0.25, -0.5, 0.375)]
    assert cusum(rows[:5], baseline=5, drift=0.5) is None
    z = [g / (0.5 / 4) for g in (0.125, 0.25, -0.5, 0.375)]
    score = 0.0
    for value in z:
        score = max(0.0, score + value - 0.5)
    assert cusum(rows, baseline=5, drift=0.5) == pytest.approx(score)


def test_a_steady_gap_is_normal_and_a_growing_one_rings() -> None:
    steady = [row(0.2) for _ in range(40)]
    assert cusum(steady, baseline=5, drift=0.5) == 0.0
    growing = steady + [row(0.2 + 0.05 * i) for i in range(10)]
    score = cusum(growing, baseline=5, drift=0.5)
    assert score is not None and score > 5.0


def test_one_odd_rollout_after_a_baseline_without_a_gap_is_no_alarm() -> None:
    traces = [trace(f"t{i}", 1.0, 1.0) for i in range(16)]
    history: list[dict[str, Any]] = []
    for _ in range(5):
        found = watch(CONFIG, traces, history)
        assert found is not None and not found["alarm"]
        history.append(found)
    one_odd = watch(CONFIG, [trace("odd", 1.0, 0.0), *traces[1:]], history)
    assert one_odd is not None and one_odd["cusum"] == pytest.approx(1 / 16 / (0.05 / 4) - 0.5) and not one_odd["alarm"]
    fooled = watch(CONFIG, [trace(f"t{i}", 1.0, 0.0) for i in range(16)], history)
    assert fooled is not None and fooled["alarm"] and "+100%" in sentence(fooled, 5.0)


def test_the_gap_is_solved_by_the_reward_minus_solved_in_truth() -> None:
    traces = [trace("a", 1.0, 0.0), trace("b", 0.0, 0.0), trace("c", 1.0, 1.0), trace("d", 1.0)]
    assert gaps(traces, CONFIG) == [1.0, 0.0, 0.0]
    assert watch(replace_verifier(""), traces, []) is None


def replace_verifier(name: str) -> RewardsConfig:
    return CONFIG.model_copy(update={"canary_verifier": name})


def test_the_share_of_canary_tasks_is_the_one_asked_for_and_depends_on_the_id_only() -> None:
    chosen = [f"task-{i}" for i in range(4000) if is_canary(f"task-{i}", 0.25)]
    assert len(chosen) == pytest.approx(1000, abs=100)
    assert all(is_canary(task, 0.5) for task in chosen) and is_canary("anything", 1.0)


class Hidden:
    """A hidden verifier that says what it is told, or fails."""

    def __init__(self, says: dict[str, float] | VerifierError | None) -> None:
        self.says = says

    async def verify(self, task: Task, trace: Trace, workspace: Path) -> dict[str, float] | None:
        if isinstance(self.says, VerifierError):
            raise self.says
        return self.says

    async def assess(self, task: Task, trace: Trace, workspace: Path) -> Assessment:
        return Assessment(components=await self.verify(task, trace, workspace))

    async def close(self) -> None:
        """Nothing is open."""


async def test_the_hidden_verifier_looks_at_training_rollouts_of_canary_tasks_only() -> None:
    every = CONFIG.model_copy(update={"canary_share": 1.0})
    found = await look(Hidden({"solved": 1.0}), every, trace(), Path())
    assert [(r.name, r.value, r.source) for r in found] == [("canary", 1.0, "canary")]
    val = replace(trace(), rollout=replace(trace().rollout, mode="val"))
    assert await look(Hidden({"solved": 1.0}), every, val, Path()) == []
    assert await look(Hidden(None), every, trace(), Path()) == []


async def test_a_hidden_verifier_that_fails_changes_nothing_and_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    every = CONFIG.model_copy(update={"canary_share": 1.0})
    for says in (VerifierError("it died"), {"a": 1.0, "b": 0.0}):
        assert await look(Hidden(says), every, trace(), Path()) == []
    assert "it died" in caplog.text and "gives one number" in caplog.text

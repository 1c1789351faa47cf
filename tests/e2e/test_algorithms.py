"""Each algorithm raises the reward of the tiny model through the real gateway, runner, verifier, store and trainer."""

from pathlib import Path
from statistics import mean

import pytest
from tests.e2e.project import LEAN_AGENT, assert_conserved, make_project
from tests.e2e.test_learning import learn

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.timeout(300),
    # As in test_learning: what is sampled depends on timing.
    pytest.mark.flaky(reruns=2, only_rerun=["AssertionError"]),
]

CASES = {
    "dr_grpo": (),
    "rloo": (),
    "reinforce_pp": (),
    "reinforce_pp_baseline": (),
    "gspo": ("learn.epochs=2",),
    "cispo": ("learn.epochs=2",),
    "dapo": (),
    "discounted": (),
    "process": (),
    "step_group": (),
    "ppo": ("learn.value_learning_rate=0.02",),
    "dpo": ("learn.dpo_beta=0.5",),
    "rejection_sft": ("learn.min_reward=0.3",),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_the_reward_rises(tmp_path: Path, name: str) -> None:
    path = make_project(tmp_path, agent=LEAN_AGENT)
    _, rows = learn(path, "learn.steps=6", f"learn.algorithm={name}", 'tasks.holdout=""', *CASES[name])
    rewards = [row["reward_mean"] for row in rows]
    assert mean(rewards[-2:]) > mean(rewards[:2]) + 0.15, rewards
    for row in rows:
        assert_conserved(row)

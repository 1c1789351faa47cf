"""Algorithms through the real gateway, runner, verifier, store and trainer: those that take another road than GRPO.

That each of them learns is tested in memory, in tests/unit/learning/backends/test_algorithms_learn.py.
"""

from pathlib import Path
from statistics import mean

import pytest
from tests.e2e.project import LEAN_AGENT, assert_conserved, make_project
from tests.e2e.test_learning import learn
from tests.tiny_model import build_tiny_model

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.timeout(900),
    # As in test_learning: what is sampled depends on timing.
    pytest.mark.flaky(reruns=2, only_rerun=["AssertionError"]),
]

CASES: dict[str, tuple[str, ...]] = {
    "dapo": (),
    "gspo": ("learn.epochs=2", "learn.clip_low=0.2", "learn.clip_high=0.2"),
    "ppo": ("learn.value_learning_rate=0.02", "learn.epochs=2"),
    "dpo": ("learn.dpo_beta=0.5", "learn.epochs=2"),
    "best.py:Best": (),
}

BEST = """\
from leyden.learning.algorithms import Algorithm


class Best(Algorithm):
    def __init__(self, learn):
        pass

    def credit(self, rewards_G):
        mean = sum(rewards_G) / len(rewards_G)
        return [max(reward - mean, 0.0) for reward in rewards_G]
"""


@pytest.mark.parametrize("name", CASES)
def test_the_reward_rises(tmp_path: Path, name: str) -> None:
    path = make_project(tmp_path, agent=LEAN_AGENT)
    (tmp_path / "best.py").write_text(BEST, encoding="utf-8")
    _, rows = learn(path, "learn.steps=7", f"learn.algorithm={name}", 'tasks.holdout=""', *CASES[name])
    rewards = [row["reward_mean"] for row in rows]
    assert mean(rewards[-2:]) > mean(rewards[:2]) + 0.1, rewards
    for row in rows:
        assert_conserved(row)
        assert row["staleness"] == 0
        assert (row["value_loss"] > 0) == (name == "ppo")


def test_a_teacher_beside_the_model_is_loaded_and_listened_to(tmp_path: Path) -> None:
    path = make_project(tmp_path, agent=LEAN_AGENT)
    build_tiny_model(tmp_path / "teacher", pad_is_eos=True, hidden_size=48, seed=9)
    teaching = (
        'policies.teacher={ model = "teacher", trainable = false, max_context = 128, dtype = "float32" }',
        "learn.algorithm=distill",
        "learn.teacher=teacher",
        "learn.normalisation=token_mean",
        "learn.learning_rate=0.01",
    )
    _, rows = learn(path, "learn.steps=4", *teaching, 'tasks.holdout=""')
    for row in rows:
        assert_conserved(row)
        assert row["grad_norm"] > 0 and row["num_optimizer_steps"] == 2

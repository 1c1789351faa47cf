"""Who gets credit: a closed registry of algorithms by the name that `learn.algorithm` takes. No torch."""

from collections.abc import Callable, Mapping

from leyden.base.config import LearnConfig
from leyden.learning.algorithms.base import Algorithm
from leyden.learning.algorithms.group_relative import GroupRelative
from leyden.learning.algorithms.prompts import OPTIMISERS
from leyden.learning.algorithms.sft import Sft
from leyden.learning.backends.base import Surrogate

__all__ = ["ALGORITHMS", "Algorithm", "GroupRelative", "Sft", "make", "surrogate_of"]

ALGORITHMS: Mapping[str, Callable[[LearnConfig], Algorithm]] = {
    "grpo": lambda config: GroupRelative(name="grpo", divide_by_std=True),
    "dr_grpo": lambda config: GroupRelative(name="dr_grpo"),
    "rloo": lambda config: GroupRelative(name="rloo", baseline="leave_one_out"),
    "rejection_sft": lambda config: Sft(name="rejection_sft", min_reward=config.min_reward),
}
"""Every algorithm that can be configured."""


def make(config: LearnConfig) -> Algorithm:
    """The algorithm that `config.algorithm` names. One that improves prompts moves no weight; groups that were
    recorded are then compared as in Dr. GRPO, for whoever looks at them."""
    if config.algorithm in OPTIMISERS:
        return GroupRelative(name=config.algorithm)
    return ALGORITHMS[config.algorithm](config)


def surrogate_of(config: LearnConfig, algorithm: Algorithm) -> Surrogate:
    """The surrogate to train with: imitation is always likelihood, comparison takes the configured one."""
    return config.surrogate if algorithm.negative_credit else algorithm.surrogate_default

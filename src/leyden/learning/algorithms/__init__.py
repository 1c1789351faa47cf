"""Who gets credit: the algorithms by the name that `learn.algorithm` takes, and those of a file. No torch."""

from collections.abc import Callable, Mapping
from pathlib import Path

from leyden.base import recipes
from leyden.base.config import LearnConfig
from leyden.learning.algorithms.actor_critic import ActorCritic
from leyden.learning.algorithms.base import Algorithm, Award, ScoredCall, ScoredGroup, ScoredRollout
from leyden.learning.algorithms.by_call import Discounted, StepGroups
from leyden.learning.algorithms.custom import load
from leyden.learning.algorithms.distill import Distill
from leyden.learning.algorithms.global_relative import GlobalRelative
from leyden.learning.algorithms.group_relative import GroupRelative
from leyden.learning.algorithms.preference import Preference
from leyden.learning.algorithms.prompts import OPTIMISERS
from leyden.learning.algorithms.sft import Sft
from leyden.learning.backends.base import Surrogate

__all__ = [
    "ALGORITHMS", "ActorCritic", "Algorithm", "Award", "Discounted", "Distill", "GlobalRelative", "GroupRelative",
    "Preference", "ScoredCall", "ScoredGroup", "ScoredRollout", "Sft", "StepGroups", "make", "surrogate_of",
]  # fmt: skip

ALGORITHMS: Mapping[str, Callable[[LearnConfig], Algorithm]] = {
    "grpo": lambda config: GroupRelative(name="grpo", divide_by_std=True),
    "dr_grpo": lambda config: GroupRelative(name="dr_grpo"),
    "rloo": lambda config: GroupRelative(name="rloo", baseline="leave_one_out"),
    "reinforce_pp": lambda config: GlobalRelative(),
    "reinforce_pp_baseline": lambda config: GlobalRelative(name="reinforce_pp_baseline", group_baseline=True),
    # These three are GRPO in who gets credit; what they change is in leyden.base.recipes and in the surrogate.
    "gspo": lambda config: GroupRelative(name="gspo", divide_by_std=True),
    "cispo": lambda config: GroupRelative(name="cispo", divide_by_std=True),
    "dapo": lambda config: GroupRelative(name="dapo", divide_by_std=True),
    "discounted": lambda config: Discounted(gamma=config.gamma),
    "process": lambda config: Discounted(name="process", gamma=config.gamma, step_rewards=True),
    "step_group": lambda config: StepGroups(gamma=config.gamma, weight=config.state_weight, state=config.state),
    "ppo": lambda config: ActorCritic(gamma=config.gamma, gae_lambda=config.gae_lambda),
    "dpo": lambda config: Preference(),
    "distill": lambda config: Distill(),
    "rejection_sft": lambda config: Sft(name="rejection_sft", min_reward=config.min_reward),
}
"""Every algorithm that has a name; the same names as `leyden.base.recipes.RECIPES`."""


def make(config: LearnConfig, folder: Path = Path(".")) -> Algorithm:
    """The algorithm that `config.algorithm` names; a file is looked for below `folder`. Raises ConfigError.

    One that improves prompts moves no weight; groups that were recorded are then compared as in Dr. GRPO, for whoever
    looks at them.
    """
    if recipes.is_custom(config.algorithm):
        return load(config, folder)
    if config.algorithm in OPTIMISERS:
        return GroupRelative(name=config.algorithm)
    return ALGORITHMS[config.algorithm](config)


def surrogate_of(config: LearnConfig, algorithm: Algorithm) -> Surrogate:
    """The surrogate to train with: the one that the credit is meant for, or else the configured one."""
    return algorithm.surrogate or config.surrogate

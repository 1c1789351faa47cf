"""Credit that differs from call to call: discounted outcomes, process rewards and step groups.

With call k = 0..K-1 of rollout i, rewards s_k of single calls and r_i of the rollout, and b_i = r_i - mean of the
group's r:

    discounted   gamma^(K-1-k) * b_i
    process      sum_{j >= k} gamma^(j-k) * (s_j - mean of all s of the group) + gamma^(K-1-k) * b_i
    step_group   b_i + w * (G_k - mean of G over the group's calls in the state of k),
                 G_k = sum_{j >= k} gamma^(j-k) * s_j + gamma^(K-1-k) * r_i

Sources: process supervision arXiv 2402.03300 section 4.1.3 (there with a division by the standard deviation), step
groups arXiv 2505.10978 (GiGPO; the variant without division). A group without any difference in its rewards has
b = 0, and a call that is alone in its state has the second part 0. Without step rewards and with gamma = 1 the first
two are Dr. GRPO. Means are exact (fsum). A rollout without calls is given b_i.
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from leyden.learning.algorithms.base import Algorithm, Award, ScoredGroup, ScoredRollout


@dataclass(frozen=True, kw_only=True)
class Discounted(Algorithm):
    """The outcome, compared in the group, counts less for calls that are farther from it."""

    name: str = "discounted"
    """As the configuration calls it."""
    gamma: float = 0.95
    """Discount from call to call."""
    step_rewards: bool = False
    """Whether rewards of single calls count too."""

    def award(self, groups: Sequence[ScoredGroup]) -> list[Award]:
        """One award per rollout; see the module for the formulas."""
        awards: list[Award] = []
        for group in groups:
            steps = [call.reward for rollout in group.rollouts for call in rollout.calls]
            mean = _mean(steps) if self.step_rewards else 0.0
            for rollout, outcome in zip(group.rollouts, centred(group.rewards), strict=True):
                own = [call.reward - mean if self.step_rewards else 0.0 for call in rollout.calls]
                awards.append(Award(rollout=outcome, calls=returns(own, outcome, self.gamma)))
        return awards


@dataclass(frozen=True, kw_only=True)
class StepGroups(Algorithm):
    """Rollouts are compared by their outcome, and their calls with calls that stood in the same state."""

    name: str = "step_group"
    """As the configuration calls it."""
    gamma: float = 0.95
    """Discount from call to call in the returns that are compared."""
    weight: float = 1.0
    """Of the comparison of calls, w."""
    state: Literal["prompt", "observation"] = "prompt"
    """What makes two states equal: all tokens of the prompt, or those that the rollout's calls before had not seen."""

    def award(self, groups: Sequence[ScoredGroup]) -> list[Award]:
        """One award per rollout; see the module for the formula."""
        awards: list[Award] = []
        for group in groups:
            returned = [returns([c.reward for c in r.calls], r.reward, self.gamma) for r in group.rollouts]
            states = [states_of(rollout, self.state) for rollout in group.rollouts]
            members: defaultdict[bytes, list[float]] = defaultdict(list)
            for keys, values in zip(states, returned, strict=True):
                for key, value in zip(keys, values, strict=True):
                    members[key].append(value)
            means = {key: _mean(values) for key, values in members.items()}
            for outcome, keys, values in zip(centred(group.rewards), states, returned, strict=True):
                calls = [outcome + self.weight * (v - means[k]) for k, v in zip(keys, values, strict=True)]
                awards.append(Award(rollout=outcome, calls=calls))
        return awards


def returns(rewards_K: Sequence[float], last: float, gamma: float) -> list[float]:
    """Discounted sum from each call on, with `last` added to the reward of the last call; shape (K,)."""
    found: list[float] = []
    following = 0.0
    for k in range(len(rewards_K) - 1, -1, -1):
        own = rewards_K[k] + (last if k == len(rewards_K) - 1 else 0.0)
        following = own + gamma * following
        found.append(following)
    return found[::-1]


def centred(rewards_G: Sequence[float]) -> list[float]:
    """Each reward less their mean; exactly 0 where all are equal."""
    mean = _mean(rewards_G)
    return [reward - mean for reward in rewards_G]


def states_of(rollout: ScoredRollout, kind: Literal["prompt", "observation"]) -> list[bytes]:
    """A name of the state of each call of a rollout; equal names, equal states."""
    names: list[bytes] = []
    seen = np.zeros(0, np.int32)
    for call in rollout.calls:
        prompt = np.asarray(call.prompt_ids, np.int32)
        shared = 0
        if kind == "observation":
            num = min(len(seen), len(prompt))
            differs = np.flatnonzero(seen[:num] != prompt[:num])
            shared = int(differs[0]) if len(differs) else num
            seen = np.concatenate((prompt, np.asarray(call.actions[0].completion_ids, np.int32)))
        names.append(prompt[shared:].tobytes())
    return names


def _mean(values: Sequence[float]) -> float:
    """Exact, and exactly the value where all are equal; 0 for none."""
    if not values:
        return 0.0
    return values[0] if min(values) == max(values) else math.fsum(values) / len(values)

"""What happens to the actions of a step before credit: answers that are too long lose reward, and a step that was
sampled from another distribution than the one that is trained is refused. Pure; no torch.

The soft punishment of DAPO (arXiv 2503.14476, equation 13) with L = `sampling.max_tokens`, B = `overlong_buffer` * L
and n = tokens of the longest completion of the rollout:

    0                                     n <= L - B
    -penalty * (n - (L - B)) / B          L - B < n <= L
"""

from collections.abc import Sequence
from dataclasses import replace

from leyden.base.config import Config
from leyden.base.errors import ConfigError, ObjectiveError
from leyden.base.records import Drop
from leyden.learning.algorithms.base import Algorithm
from leyden.learning.credit import NOT_OURS
from leyden.traces.assemble import Assembly, Scored


def punishment(num_tokens: int, max_tokens: int, buffer: float, penalty: float) -> float:
    """What a completion of `num_tokens` adds to the reward of its rollout: 0 or less."""
    room = buffer * max_tokens
    excess = num_tokens - (max_tokens - room)
    return -penalty * min(excess / room, 1.0) if room > 0 and excess > 0 else 0.0


def shaped(assembly: Assembly, *, max_tokens: int, buffer: float, penalty: float) -> Assembly:
    """The assembly with rewards after the punishment of long answers; `buffer` 0 changes nothing."""
    if not buffer:
        return assembly
    longest: dict[str, int] = {}
    for action in assembly.actions:
        if action.drop not in NOT_OURS:
            longest[action.rollout_id] = max(longest.get(action.rollout_id, 0), action.num_tokens)

    def one(scored: Scored) -> Scored:
        lost = punishment(longest.get(scored.rollout_id, 0), max_tokens, buffer, penalty)
        return scored if scored.reward is None or not lost else replace(scored, reward=scored.reward + lost)

    return replace(assembly, rollouts=tuple(one(scored) for scored in assembly.rollouts))


def check_sampling(config: Config) -> None:
    """Raise ConfigError where a run would sample from a distribution that the update does not train."""
    name = config.learn.policy
    sampling = config.policies[name].sampling
    if not config.learn.steps or config.learn.improves_prompts:
        return
    if sampling.temperature == 0:
        raise ConfigError(
            f"policies.{name}.sampling.temperature is 0: greedy rollouts of a task are all alike and have no "
            "distribution to train; set it above 0, for example 1.0"
        )
    if sampling.top_p < 1:
        raise ConfigError(
            f"policies.{name}.sampling.top_p is {sampling.top_p}: tokens would be sampled from a cut distribution "
            "while the full one is trained; set it to 1.0 (evaluation may keep its own)"
        )


def refuse_mismatch(assembly: Assembly, algorithm: Algorithm) -> None:
    """Raise ObjectiveError when a step has nothing to train because of how all of it was sampled.

    The record of each call says what was sampled with; a single call that does not fit is dropped by name, but a step
    of them means that the harness or the engine does not do what the configuration says.
    """
    if assembly.trained or not assembly.dropped.get(Drop.SAMPLING_MISMATCH):
        return
    details = sorted({a.detail for a in assembly.actions if a.drop is Drop.SAMPLING_MISMATCH})
    raise ObjectiveError(
        f"{algorithm.name} trains the distribution that tokens are sampled from, and no token of this step was: "
        f"{details[0]} ({assembly.dropped[Drop.SAMPLING_MISMATCH]} tokens). Set policies.NAME.sampling accordingly, or "
        "policies.NAME.respect_harness = false"
    )


def dull_groups(assembly: Assembly, group_ids: Sequence[str]) -> set[str]:
    """Groups of `group_ids` in which no two rewards differ, those without any reward included."""
    rewards: dict[str, set[float]] = {group_id: set() for group_id in group_ids}
    for scored in assembly.rollouts:
        if scored.drop is None and scored.reward is not None:
            rewards[scored.group_id].add(scored.reward)
    return {group_id for group_id, values in rewards.items() if len(values) < 2}

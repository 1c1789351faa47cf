"""Who is compared with whom: rewards of groups become credit of rollouts. No torch.

The order of work is credit first, drops after: `credit_groups` compares all scored rollouts of a group,
whatever happened to their tokens; `apply_credit` then drops what the algorithm does not train;
`leyden.learning.batch.build` makes arrays of the rest. So a group never shrinks because a call was overlong.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from leyden.learning.algorithms.base import Algorithm
from leyden.traces.assemble import Assembly, balanced


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupStats:
    """Rewards of one group, as they were compared."""

    group_id: str
    """Which group."""
    task_id: str
    """What was asked."""
    rewards: Sequence[float]
    """Of its scored rollouts, in the order of their ids."""
    num_survivors: int
    """Scored rollouts with at least one trained token."""

    @property
    def is_flat(self) -> bool:
        """Whether two or more rewards are there and all are equal."""
        return len(self.rewards) > 1 and min(self.rewards) == max(self.rewards)


@dataclass(frozen=True, slots=True, kw_only=True)
class Credit:
    """What comparison gave to each scored rollout, with the counts of the step report."""

    by_rollout: Mapping[str, float]
    """Credit of every scored rollout, those without a trained token included."""
    groups: Sequence[GroupStats]
    """Groups with at least one scored rollout, in the order of their ids."""

    @property
    def num_groups(self) -> int:
        """Groups that were compared."""
        return len(self.groups)

    @property
    def zero_variance_tasks(self) -> list[str]:
        """Tasks of groups of two or more whose rewards are all equal; a task once per such group."""
        return [group.task_id for group in self.groups if group.is_flat]

    @property
    def num_singletons(self) -> int:
        """Groups with a single scored rollout."""
        return sum(len(group.rewards) == 1 for group in self.groups)

    @property
    def num_survivors(self) -> int:
        """Rollouts with credit and at least one trained token."""
        return sum(group.num_survivors for group in self.groups)


def credit_groups(assembly: Assembly, algorithm: Algorithm) -> Credit:
    """Credit of every rollout that has a trainable outcome and a reward, before any token is dropped.

    A rollout counts in its group even if all its calls are dropped or it made none; a rollout that is
    excluded (`Scored.drop`) does not. The order of the assembly does not matter.
    """
    alive = {action.rollout_id for action in assembly.actions if action.drop is None and action.num_tokens}
    members: defaultdict[str, dict[str, tuple[str, float]]] = defaultdict(dict)
    for scored in assembly.rollouts:
        if scored.drop is None:
            assert scored.reward is not None and scored.rollout_id not in members[scored.group_id]
            members[scored.group_id][scored.rollout_id] = (scored.task_id, scored.reward)
    by_rollout: dict[str, float] = {}
    groups: list[GroupStats] = []
    for group_id in sorted(members):
        ids = sorted(members[group_id])
        rewards = [members[group_id][i][1] for i in ids]
        by_rollout.update(zip(ids, algorithm.credit(rewards), strict=True))
        groups.append(
            GroupStats(
                group_id=group_id,
                task_id=members[group_id][ids[0]][0],
                rewards=rewards,
                num_survivors=sum(i in alive for i in ids),
            )
        )
    return Credit(by_rollout=by_rollout, groups=groups)


def apply_credit(assembly: Assembly, credit: Credit, algorithm: Algorithm) -> Assembly:
    """The assembly with actions dropped whose credit 0 means "not trained"; conserved as before."""
    reason = algorithm.zero_credit_drop
    if reason is None:
        return assembly
    actions = [
        replace(action, drop=reason, detail=f"reward {action.reward} gets no credit from {algorithm.name}")
        if action.drop is None and credit.by_rollout[action.rollout_id] == 0.0
        else action
        for action in assembly.actions
    ]
    return balanced(assembly.rollouts, actions, assembly.sampled, assembly.num_calls_without_choices)

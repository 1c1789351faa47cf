"""Who is compared with whom: rewards of groups become credit of rollouts and of their calls. No torch.

The order of work is credit first, drops after: `credit_groups` compares all scored rollouts of a step, group by group
or all together as the algorithm wants, whatever happened to their tokens; `apply_credit` then drops what the algorithm
does not train; `leyden.learning.batch.build` makes arrays of the rest. So a group never shrinks because a call was
overlong.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from leyden.base.config import LearnConfig
from leyden.base.errors import ObjectiveError
from leyden.base.records import Drop, FloatArray, Trace
from leyden.learning.algorithms.base import Algorithm, Award, ScoredCall, ScoredGroup, ScoredRollout
from leyden.learning.batch import NO_DETAILS, ActionKey, Details, key_of
from leyden.learning.evidence import Evidence, step_rewards
from leyden.traces.assemble import Action, Assembly, balanced

NOT_OURS = (Drop.SUPERSEDED, Drop.NOT_TRAINABLE)
"""Actions that are no decision of the policy in this attempt: credit does not see them."""


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
    details: Details = NO_DETAILS
    """Credit of single calls and tokens, targets of a critic, pairs."""

    def of(self, action: Action) -> float | FloatArray | None:
        """Credit of an action: one number, or one per token; None where its rollout was given none."""
        return self.details.credit.get(key_of(action), self.by_rollout.get(action.rollout_id))

    def number_of(self, action: Action) -> float | None:
        """`of` as one number: the mean over tokens where they differ."""
        given = self.of(action)
        return None if given is None else float(np.mean(given)) if np.size(given) else 0.0

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


def credit_groups(assembly: Assembly, algorithm: Algorithm, evidence: Evidence | None = None) -> Credit:
    """Credit of every rollout that has a trainable outcome and a reward, before any token is dropped.

    A rollout counts in its group even if all its calls are dropped or it made none; a rollout that is
    excluded (`Scored.drop`) does not. The order of the assembly does not matter. Raises ObjectiveError for an
    algorithm that gives what is no finite number, or not one award to each rollout.
    """
    alive = {action.rollout_id for action in assembly.actions if action.drop is None and action.num_tokens}
    groups = scored_groups(assembly, evidence or Evidence())
    awards = algorithm.award(groups)
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    if len(awards) != len(rollouts):
        raise ObjectiveError(
            f"{algorithm.name} gave {len(awards)} awards to {len(rollouts)} rollouts; give one to each"
        )
    return Credit(
        by_rollout={r.rollout_id: _number(award.rollout, algorithm) for r, award in zip(rollouts, awards, strict=True)},
        groups=[
            GroupStats(
                group_id=group.group_id,
                task_id=group.task_id,
                rewards=group.rewards,
                num_survivors=sum(r.rollout_id in alive for r in group.rollouts),
            )
            for group in groups
        ],
        details=_details(rollouts, awards, algorithm),
    )


def credit_alone(
    traces: Sequence[Trace], assembly: Assembly, algorithm: Algorithm, learn: LearnConfig
) -> Credit | None:
    """Credit of whole groups looked at outside a run; None where it takes the rest of a step, a critic or a teacher."""
    if algorithm.needs or algorithm.scope == "step":
        return None
    return credit_groups(assembly, algorithm, Evidence(step_rewards=step_rewards(traces, learn.step_reward_weight)))


def explained_variance(details: Details) -> float | None:
    """1 - var(target - value) / var(target) over the calls that a critic learns; None where targets do not differ."""
    keys = [key for key, target in details.target.items() if np.isfinite(target)]
    target_K = np.asarray([details.target[key] for key in keys])
    value_K = np.asarray([details.value[key] for key in keys])
    spread = float(target_K.var()) if len(keys) > 1 else 0.0
    return 1.0 - float((target_K - value_K).var()) / spread if spread > 0 else None


def scored_groups(assembly: Assembly, evidence: Evidence) -> list[ScoredGroup]:
    """What an algorithm sees of a step: groups and rollouts in the order of their ids, calls in order of time."""
    calls: defaultdict[str, list[list[Action]]] = defaultdict(list)
    for action in sorted(assembly.actions, key=lambda a: (a.rollout_id, a.order)):
        mine = calls[action.rollout_id]
        if mine and mine[-1][0].call_id == action.call_id:
            mine[-1].append(action)
        else:
            mine.append([action])
    members: defaultdict[str, dict[str, ScoredRollout]] = defaultdict(dict)
    tasks: dict[str, str] = {}
    for scored in assembly.rollouts:
        if scored.drop is None:
            assert scored.reward is not None and scored.rollout_id not in members[scored.group_id]
            members[scored.group_id][scored.rollout_id] = ScoredRollout(
                rollout_id=scored.rollout_id,
                reward=scored.reward,
                calls=_calls(calls[scored.rollout_id], evidence),
            )
            tasks.setdefault(scored.group_id, scored.task_id)
    return [
        ScoredGroup(group_id=g, task_id=tasks[g], rollouts=[members[g][i] for i in sorted(members[g])])
        for g in sorted(members)
    ]


def _calls(calls: Sequence[Sequence[Action]], evidence: Evidence) -> list[ScoredCall]:
    """The policy's own calls; the reward of another call counts for the own call before it."""
    found: list[ScoredCall] = []
    for actions in calls:
        reward = evidence.step_rewards.get(actions[0].call_id, 0.0)
        if actions[0].drop in NOT_OURS:
            if found and reward:
                found[-1] = replace(found[-1], reward=found[-1].reward + reward)
            continue
        keys = [key_of(action) for action in actions]
        nothing = np.zeros(0, np.float32)
        found.append(
            ScoredCall(
                call_id=actions[0].call_id,
                reward=reward,
                actions=actions,
                value=next((evidence.values[key] for key in keys if key in evidence.values), None),
                teacher=[evidence.teacher.get(key, nothing) for key in keys] if evidence.teacher else None,
            )
        )
    return found


def _details(rollouts: Sequence[ScoredRollout], awards: Sequence[Award], algorithm: Algorithm) -> Details:
    credit: dict[ActionKey, float | FloatArray] = {}
    value: dict[ActionKey, float] = {}
    target: dict[ActionKey, float] = {}
    for rollout, award in zip(rollouts, awards, strict=True):
        for given, call in zip(award.calls or (), rollout.calls if award.calls is not None else (), strict=True):
            for number, action in enumerate(call.actions):
                one = given if isinstance(given, int | float) else given[number]
                assert isinstance(one, int | float) or len(one) == action.num_tokens, "one credit per token"
                credit[key_of(action)] = _finite(one, algorithm)
        for wanted, call in zip(award.targets or (), rollout.calls if award.targets is not None else (), strict=True):
            if call.value is not None:
                # Choices of a call share its prompt: the critic learns it once.
                key = next(key_of(a) for a in call.actions if a.drop is None and a.num_tokens)
                value[key], target[key] = call.value, wanted
    pair = {r.rollout_id: award.pair for r, award in zip(rollouts, awards, strict=True) if award.pair}
    return Details(credit=credit, value=value, target=target, pair=pair)


def _number(credit: float, algorithm: Algorithm) -> float:
    _finite(credit, algorithm)
    return credit


def _finite(credit: float | FloatArray, algorithm: Algorithm) -> float | FloatArray:
    if not bool(np.isfinite(credit).all()):
        raise ObjectiveError(f"{algorithm.name} gave the credit {credit}; credit is a finite number: mend its file")
    return credit


def apply_credit(assembly: Assembly, credit: Credit, algorithm: Algorithm) -> Assembly:
    """The assembly with actions dropped whose credit 0 means "not trained"; conserved as before."""
    reason = algorithm.zero_credit_drop
    if reason is None:
        return assembly
    actions = [
        replace(action, drop=reason, detail=f"reward {action.reward} gets no credit from {algorithm.name}")
        if action.drop is None and not np.any(credit.of(action))
        else action
        for action in assembly.actions
    ]
    return balanced(assembly.rollouts, actions, assembly.sampled, assembly.num_calls_without_choices)


def drop_flat(assembly: Assembly, credit: Credit) -> tuple[Assembly, Credit]:
    """Without the groups in which no two rewards differ: their tokens are dropped by name, their rollouts not counted.

    The groups stay in `Credit.groups`, where the step report counts them.
    """
    flat = {group.group_id for group in credit.groups if is_dull(group)}
    actions = [
        replace(action, drop=Drop.FLAT_GROUP, detail=f"all rewards of group {action.group_id} are equal")
        if action.drop is None and action.group_id in flat
        else action
        for action in assembly.actions
    ]
    gone = {scored.rollout_id for scored in assembly.rollouts if scored.group_id in flat}
    kept = {rollout_id: value for rollout_id, value in credit.by_rollout.items() if rollout_id not in gone}
    return (
        balanced(assembly.rollouts, actions, assembly.sampled, assembly.num_calls_without_choices),
        replace(credit, by_rollout=kept),
    )


def is_dull(group: GroupStats) -> bool:
    """Whether nothing can be compared in it: one reward, or equal ones."""
    return min(group.rewards) == max(group.rewards)


def drop_unpaired(assembly: Assembly, credit: Credit) -> tuple[Assembly, Credit]:
    """Without pairs of which one side has no token left to train: a loss of pairs needs both."""
    alive = {action.rollout_id for action in assembly.actions if action.drop is None and action.num_tokens}
    sides: defaultdict[str, list[str]] = defaultdict(list)
    for rollout_id, pair in credit.details.pair.items():
        sides[pair].append(rollout_id)
    broken = {i for ids in sides.values() if not alive.issuperset(ids) for i in ids}
    actions = [
        replace(action, drop=Drop.UNPAIRED, detail="the other rollout of its pair has no token to train")
        if action.drop is None and action.rollout_id in broken
        else action
        for action in assembly.actions
    ]
    left = {i: name for i, name in credit.details.pair.items() if i not in broken}
    by_rollout = {i: value for i, value in credit.by_rollout.items() if i in left}
    return (
        balanced(assembly.rollouts, actions, assembly.sampled, assembly.num_calls_without_choices),
        replace(credit, by_rollout=by_rollout, details=replace(credit.details, pair=left)),
    )

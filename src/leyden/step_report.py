"""The report of a step: what was sampled, what was compared, what was trained, what was dropped, what it cost."""

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from leyden.base import stats
from leyden.base.config import Config
from leyden.base.errors import LearningError
from leyden.base.records import Drop, Trace
from leyden.learning.backends.base import UpdateReport
from leyden.learning.batch import Batch
from leyden.learning.credit import Credit, explained_variance
from leyden.release import evaluation
from leyden.release.costs import total_of
from leyden.traces.assemble import Assembly


def step_report(
    config: Config,
    step: int,
    traces: Sequence[Trace],
    parts: Mapping[str, Mapping[str, Any]],
    seconds: Mapping[str, float],
) -> dict[str, Any]:
    """Every number of one reinforcement step, as plain JSON: what its rollouts show, and the part of each policy.

    With one policy its part stands among the others; with several the parts stand below `policies`, and what can be
    added up stands above.
    """
    whole = rollouts_report(config, step, traces, seconds)
    if len(parts) == 1:
        return {**whole, **next(iter(parts.values()))}
    return {**whole, **_together(list(parts.values())), "policies": {name: dict(part) for name, part in parts.items()}}


def rollouts_report(config: Config, step: int, traces: Sequence[Trace], seconds: Mapping[str, float]) -> dict[str, Any]:
    """What the rollouts of a step show, whoever learns from them."""
    rewards = [t.rollout.reward for t in traces if t.rollout.reward is not None]
    # As they were given, not as they were compared: shaping is no part of how well the policy does.
    clusters = [[t.rollout.reward for t in group if t.rollout.reward is not None] for group in _groups(traces)]
    interval = stats.cluster_bootstrap(clusters, level=config.eval.level, resamples=1000, seed=config.run.seed)
    success = evaluation.successes(traces, config)
    # The judge's calls are recorded with the attempt, but they are not the agent's.
    calls = [[call for call in t.calls if call.policy != (config.rewards.judge.policy or None)] for t in traces]
    sampled_tokens = [sum(call.num_sampled for call in of) for of in calls]
    return {
        "step": step,
        "reward_mean": sum(rewards) / len(rewards) if rewards else None,
        "reward_low": finite(interval.low),
        "reward_high": finite(interval.high),
        "success": sum(success) / len(success) if success else None,
        "num_rollouts": len(traces),
        "num_no_reward": len(traces) - len(rewards),
        "outcomes": dict(Counter(str(t.rollout.outcome) for t in traces)),
        "diagnoses": dict(Counter(t.attempt.diagnosis for t in traces if t.attempt.diagnosis)),
        "num_step_rewards": sum(reward.call_id is not None for t in traces for reward in t.rewards),
        "group_successes": _group_successes(config, traces),
        "tokens_per_rollout": sum(sampled_tokens) / len(sampled_tokens),
        "calls_per_rollout": sum(map(len, calls)) / len(traces),
        "cost": total_of(traces, config).to_json(),
        "seconds": dict(seconds),
    }


MINOR_CREDIT = 0.25
"""Above this share of credit between rollouts of equal success a run is told of it. With a reward of 1 for success and
0.0005 per token, algorithms that keep the size of a difference gave 0.06 to 0.09, those that divide by the spread of a
group 0.42 to 0.81."""


def policy_report(
    config: Config,
    version: int,
    policy: str,
    traces: Sequence[Trace],
    assembly: Assembly,
    credit: Credit,
    batches: Sequence[Batch],
    update: UpdateReport,
) -> dict[str, Any]:
    """What one policy, which is `version` after it, took from the rollouts of a step."""
    part = {
        "version": version,
        "conservation": {
            "sampled": assembly.sampled,
            "trained": assembly.trained,
            "dropped": {str(reason): tokens for reason, tokens in assembly.dropped.items() if tokens},
        },
        "num_windowed_tokens": assembly.num_windowed,
        "num_windowed_actions": assembly.num_windowed_actions,
        "num_groups": credit.num_groups,
        "num_zero_variance": len(credit.zero_variance_tasks),
        "zero_variance_tasks": credit.zero_variance_tasks,
        "num_singleton": credit.num_singletons,
        "num_survivors": credit.num_survivors,
        "minor_credit": minor_credit(config, traces, credit),
        "num_without_calls": num_without_calls(traces, policy, credit),
        "staleness": _staleness(traces, policy),
        "explained_variance": explained_variance(credit.details),
        **update_numbers(update),
    }
    return {**part, **off_policy(part, batches, update)}


def minor_credit(config: Config, traces: Sequence[Trace], credit: Credit) -> float | None:
    """Share of the differences of credit within groups, in magnitude, that lies in groups whose rollouts have all the
    same success: only smaller parts of the reward differ there. None where no credit differs."""
    minor = total = 0.0
    for group in _groups([trace for trace in traces if trace.rollout.id in credit.by_rollout]):
        given = [credit.by_rollout[trace.rollout.id] for trace in group]
        if len(set(given)) == 1:  # the mean of equal numbers may differ from them in the last bit
            continue
        mean = sum(given) / len(given)
        differences = sum(abs(one - mean) for one in given)
        total += differences
        if len({evaluation.score(trace, config.rewards.success) for trace in group}) == 1:
            minor += differences
    return minor / total if total else None


def num_without_calls(traces: Sequence[Trace], policy: str, credit: Credit) -> int:
    """Rollouts that were compared although the policy was not asked in them: they count, with nothing to train."""
    return sum(
        t.rollout.id in credit.by_rollout
        and not any(call.policy == policy and call.attempt_id == t.attempt.id for call in t.calls)
        for t in traces
    )


def unasked(report: Mapping[str, Any]) -> list[str]:
    """Sentences about policies that are trained together with others and were asked in no rollout of a step."""
    nothing = {str(Drop.NOT_TRAINABLE), str(Drop.SUPERSEDED)}
    return [
        f"Note: no rollout of step {report['step'] + 1} asked policy {name!r}, so it learned nothing; set "
        f"policies.{name}.trainable = false if the harness does not use it."
        for name, part in report.get("policies", {}).items()
        if not part["conservation"]["trained"] and nothing.issuperset(part["conservation"]["dropped"])
    ]


def _together(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What the parts of several policies come to: a token is trained by one of them, or has one reason."""
    books = [part["conservation"] for part in parts]
    assert len({one["sampled"] for one in books}) == 1, "the policies were given different rollouts"
    sampled, trained = books[0]["sampled"], sum(one["trained"] for one in books)
    dropped: Counter[str] = Counter()
    for one in books:
        # Calls of other policies and of earlier attempts are in the books of each: they are counted below.
        shared = (str(Drop.NOT_TRAINABLE), str(Drop.SUPERSEDED))
        dropped.update({reason: tokens for reason, tokens in one["dropped"].items() if reason not in shared})
    dropped[str(Drop.SUPERSEDED)] = books[0]["dropped"].get(str(Drop.SUPERSEDED), 0)
    dropped[str(Drop.NOT_TRAINABLE)] = sampled - trained - dropped.total()
    assert min(dropped.values()) >= 0, (sampled, trained, dict(dropped))
    return {
        "version": parts[0]["version"],
        "conservation": {"sampled": sampled, "trained": trained, "dropped": {k: n for k, n in dropped.items() if n}},
        **summed(parts),
    }


def summed(parts: Collection[Mapping[str, Any]]) -> dict[str, int]:
    """Those numbers of the updates of several policies that add up."""
    names = ("num_labels", "num_forward_tokens", "num_sequence_tokens", "num_optimizer_steps")
    return {name: sum(part[name] for part in parts) for name in names}


def _group_successes(config: Config, traces: Sequence[Trace]) -> list[tuple[str, list[float]]]:
    """(task, 1.0 or 0.0 per rollout that counts) for each group, for the diagnosis of memorised and hopeless tasks."""
    return [
        (group[0].rollout.task.id, [float(s) for s in evaluation.successes(group, config)]) for group in _groups(traces)
    ]


def _groups(traces: Sequence[Trace]) -> list[list[Trace]]:
    """Traces that are compared with each other, groups in the order of their first."""
    groups: dict[str, list[Trace]] = {}
    for trace in traces:
        groups.setdefault(trace.rollout.group_id or trace.rollout.id, []).append(trace)
    return list(groups.values())


def update_numbers(update: UpdateReport) -> dict[str, Any]:
    """The numbers of an update under the names of the metrics file."""
    return {
        "loss": update.loss,
        "grad_norm": update.grad_norm,
        "kl": update.kl,
        "entropy": update.entropy,
        "clip_fraction": update.clip_fraction,
        "clip_low_fraction": update.clip_low_fraction,
        "clip_high_fraction": update.clip_high_fraction,
        "value_loss": update.value_loss,
        "pair_accuracy": update.pair_accuracy,
        "pair_margin": update.pair_margin,
        "importance_capped": update.importance_capped,
        "gap_mean": update.gap_mean,
        "gap_max": update.gap_max,
        "num_labels": update.num_labels,
        "num_forward_tokens": update.num_forward_tokens,
        "num_sequence_tokens": update.num_sequence_tokens,
        "token_ratio": update.num_sequence_tokens / max(1, update.num_forward_tokens),
        "num_optimizer_steps": update.num_optimizer_steps,
        "layout": update.layout,
        "num_passes": update.num_passes,
        "passes_predicted_s": update.predicted_s,
        "passes_measured_s": update.measured_s,
    }


def off_policy(report: Mapping[str, Any], batches: Sequence[Batch], update: UpdateReport) -> dict[str, Any]:
    """The books of a step with what the importance mask took out: trained no more, but dropped by name.

    Passes after the first mask the same tokens again, by the same log-probs before the step; they are counted once.
    """
    firsts = (num for num, one in zip(update.num_masked, batches, strict=False) if one.report["epoch"] == 0)
    masked, books = sum(firsts), report["conservation"]
    if not masked:
        return {}
    dropped = {**books["dropped"], str(Drop.OFF_POLICY): masked}
    return {"conservation": {**books, "trained": books["trained"] - masked, "dropped": dropped}}


def _staleness(traces: Sequence[Trace], policy: str) -> int:
    """Most versions that a call of the policy is behind the newest of the step; 0 when all are of one version."""
    seen = [call.policy_version for t in traces for call in t.calls if call.policy == policy]
    return max(seen) - min(seen) if seen else 0


def finite(value: float) -> float | None:
    """`value`, or None where an interval has no end: JSON knows no infinity."""
    return value if math.isfinite(value) else None


def refuse_if_nothing_was_captured(phase: str, traces: Sequence[Trace]) -> None:
    """Raise LearningError without a call in any rollout: a set-up fault that training on would only hide."""
    if any(trace.calls for trace in traces):
        return
    causes = Counter(trace.attempt.diagnosis or trace.attempt.outcome for trace in traces)
    detail = next((t.attempt.detail for t in traces if t.attempt.detail), "")
    stderr = next((t.attempt.stderr_tail.strip()[-600:] for t in traces if t.attempt.stderr_tail.strip()), "")
    raise LearningError(
        f"{phase}: none of {len(traces)} rollouts made a model call ({dict(causes)}). {detail}"
        + (f"\nEnd of the harness's standard error:\n{stderr}" if stderr else "")
    )

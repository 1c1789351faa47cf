"""The report of a step: what was sampled, what was compared, what was trained, what was dropped, what it cost."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from leyden.base import stats
from leyden.base.config import Config
from leyden.base.records import Trace
from leyden.learning.backends.base import UpdateReport
from leyden.learning.credit import Credit
from leyden.release import evaluation
from leyden.release.costs import total_of
from leyden.traces.assemble import Assembly


def step_report(
    config: Config,
    step: int,
    version: int,
    traces: Sequence[Trace],
    assembly: Assembly,
    credit: Credit,
    update: UpdateReport,
    seconds: Mapping[str, float],
) -> dict[str, Any]:
    """Every number of one reinforcement step, as plain JSON."""
    rewards = [t.rollout.reward for t in traces if t.rollout.reward is not None]
    clusters = [list(g.rewards) for g in credit.groups if g.rewards]
    interval = stats.cluster_bootstrap(clusters, level=config.eval.level, resamples=1000, seed=config.run.seed)
    success = evaluation.successes(traces, config)
    sampled_tokens = [sum(call.num_sampled for call in t.calls) for t in traces]
    return {
        "step": step,
        "version": version,
        "reward_mean": sum(rewards) / len(rewards) if rewards else None,
        "reward_low": finite(interval.low),
        "reward_high": finite(interval.high),
        "success": sum(success) / len(success) if success else None,
        "num_rollouts": len(traces),
        "num_no_reward": len(traces) - len(rewards),
        "outcomes": dict(Counter(str(t.rollout.outcome) for t in traces)),
        "diagnoses": dict(Counter(t.attempt.diagnosis for t in traces if t.attempt.diagnosis)),
        "conservation": {
            "sampled": assembly.sampled,
            "trained": assembly.trained,
            "dropped": {str(reason): tokens for reason, tokens in assembly.dropped.items() if tokens},
        },
        "num_groups": credit.num_groups,
        "num_zero_variance": len(credit.zero_variance_tasks),
        "zero_variance_tasks": credit.zero_variance_tasks,
        "num_singleton": credit.num_singletons,
        "num_survivors": credit.num_survivors,
        "group_successes": _group_successes(config, traces),
        "tokens_per_rollout": sum(sampled_tokens) / len(sampled_tokens),
        "calls_per_rollout": sum(len(t.calls) for t in traces) / len(traces),
        "cost": total_of(traces, config.costs).to_json(),
        "seconds": {**seconds, **{f"update_{k}": v for k, v in update.seconds.items()}},
        **update_numbers(update),
    }


def _group_successes(config: Config, traces: Sequence[Trace]) -> list[tuple[str, list[float]]]:
    """(task, 1.0 or 0.0 per rollout that counts) for each group, for the diagnosis of memorised and hopeless tasks."""
    groups: dict[str, list[Trace]] = {}
    for trace in traces:
        groups.setdefault(trace.rollout.group_id or trace.rollout.id, []).append(trace)
    return [
        (group[0].rollout.task.id, [float(s) for s in evaluation.successes(group, config)]) for group in groups.values()
    ]


def update_numbers(update: UpdateReport) -> dict[str, Any]:
    """The numbers of an update under the names of the metrics file."""
    return {
        "loss": update.loss,
        "grad_norm": update.grad_norm,
        "kl": update.kl,
        "entropy": update.entropy,
        "clip_fraction": update.clip_fraction,
        "importance_capped": update.importance_capped,
        "gap_mean": update.gap_mean,
        "gap_max": update.gap_max,
        "num_labels": update.num_labels,
        "num_forward_tokens": update.num_forward_tokens,
        "num_sequence_tokens": update.num_sequence_tokens,
        "token_ratio": update.num_sequence_tokens / max(1, update.num_forward_tokens),
        "num_optimizer_steps": update.num_optimizer_steps,
    }


def finite(value: float) -> float | None:
    """`value`, or None where an interval has no end: JSON knows no infinity."""
    return value if math.isfinite(value) else None

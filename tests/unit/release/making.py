"""Evaluations made from numbers, for tests of comparisons."""

from collections.abc import Sequence
from typing import Any

from leyden.release.evaluation import Evaluation, TaskResult


def evaluation(
    successes: Sequence[Sequence[float]],
    version: int = 0,
    *,
    tokens: Sequence[float] | float = 9.0,
    usd: Sequence[float] | float | None = None,
    latency_s: float | None = 1.0,
    num_calls: float = 1.0,
    **changes: Any,
) -> Evaluation:
    """An evaluation whose rewards are its successes; task k has `successes[k]`, and costs as given."""

    def at(value: Any, number: int) -> Any:
        return value[number] if isinstance(value, Sequence) else value

    tasks = tuple(
        TaskResult(
            task_id=f"t{number:04}",
            domain="",
            rewards=tuple(values),
            successes=tuple(value > 0.5 for value in values),
            outcomes=("completed",) * len(values) if values else ("infra_error",),
            components={},
            num_unscored=0,
            num_calls=num_calls,
            completion_tokens=at(tokens, number),
            prompt_tokens=0.0,
            latency_s=latency_s,
            usd=at(usd, number),
        )
        for number, values in enumerate(successes)
    )
    made: dict[str, Any] = {"fingerprint": "f", "split": "holdout", "success": "correct", "resamples": 400}
    return Evaluation(policy_version=f"main@{version}", tasks=tasks, **{**made, **changes})

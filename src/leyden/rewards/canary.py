"""A second verifier that nothing is trained on, and an alarm when the first one drifts away from it.

On a share of the training tasks, chosen by the hash of their id, a hidden verifier also says whether the task is
really solved (one number, 1 or 0). The *gap* of a rollout is `solved by the reward - solved by the hidden one`. It is
never trained on and enters no total. A policy that learns to fool the reward makes the gap grow.

The alarm is a one-sided CUSUM (Page 1954) of the standardised mean gap of each step:

    z_t = (gap_t - normal) / (sd / sqrt(n_t)),   S_t = max(0, S_(t-1) + z_t - drift),   alarm when S_t > limit

`normal` and `sd` are those of the first `canary_baseline` steps. With drift k and limit h the mean number of steps to
an alarm at a shift of d standard errors is about (Siegmund 1985), with D = d - k and b = h + 1.166,

    (exp(-2 D b) + 2 D b - 1) / (2 D^2)

which is 931 steps for d = 0 and 10 steps for d = 1 at the defaults (k = 0.5, h = 5).
"""

import hashlib
import logging
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from leyden.base.config import RewardsConfig
from leyden.base.errors import VerifierError
from leyden.base.records import Reward, Trace
from leyden.rewards.components import SINGLE, Total

if TYPE_CHECKING:  # the loop needs the mathematics and not the libraries of verifiers
    from leyden.rewards.verifiers import Verifier

CANARY = "canary"
"""Source, and name, of the hidden verifier's number."""
SMALLEST_SD = 0.05
"""Smallest spread of the gap that is assumed: after a baseline without a gap, one odd rollout is no alarm."""

logger = logging.getLogger("leyden.rewards")


def is_canary(task_id: str, share: float) -> bool:
    """Whether the hidden verifier looks at a task. Depends on the id only, so groups stay whole."""
    number = int.from_bytes(hashlib.sha256(f"canary:{task_id}".encode()).digest()[:8], "big")
    return number < share * 2**64


async def look(verifier: "Verifier", config: RewardsConfig, trace: Trace, workspace: Path) -> list[Reward]:
    """The hidden verifier's number for a training rollout at a canary task; empty for others.

    A hidden verifier that fails is logged and gives none: it must not change what is trained.
    """
    rollout = trace.rollout
    if rollout.mode != "train" or not is_canary(rollout.task.id, config.canary_share):
        return []
    try:
        found = await verifier.verify(rollout.task, trace, workspace)
        if found is None:
            return []
        if set(found) != {SINGLE} and len(found) != 1:
            raise VerifierError(f"it gave {', '.join(sorted(found))}; the hidden verifier gives one number")
    except VerifierError as error:
        logger.warning("rewards.canary_verifier failed on rollout %s: %s", rollout.id, error)
        return []
    return [Reward(name=CANARY, value=next(iter(found.values())), source=CANARY)]


def gaps(traces: Sequence[Trace], config: RewardsConfig) -> list[float]:
    """`solved by the reward - solved by the hidden verifier` of every rollout that has both."""
    total = Total(config)
    found = []
    for trace in traces:
        hidden = next((r.value for r in trace.rewards if r.source == CANARY), None)
        if hidden is None or trace.rollout.reward is None:
            continue
        shown = {r.name: r.value for r in trace.rewards if r.call_id is None and r.source != CANARY}
        found.append(float(total.success(shown)) - hidden)
    return found


def watch(
    config: RewardsConfig, traces: Sequence[Trace], history: Sequence[Mapping[str, Any]]
) -> dict[str, Any] | None:
    """The row of this step for the step report; `history` are the rows of earlier steps of the run, in order.

    None when there is no hidden verifier or it looked at nothing.
    """
    values = gaps(traces, config) if config.canary_verifier else []
    if not values:
        return None
    row: dict[str, Any] = {
        "num": len(values),
        "gap": sum(values) / len(values),
        "sum": sum(values),
        "sum_squares": sum(value * value for value in values),
    }
    rows = [*history, row]
    score = cusum(rows, baseline=config.canary_baseline, drift=config.canary_drift)
    return {**row, "cusum": score, "alarm": score is not None and score > config.canary_limit}


def cusum(rows: Sequence[Mapping[str, Any]], *, baseline: int, drift: float) -> float | None:
    """S after the last row; None while the first `baseline` rows are collected. Rows: num, gap, sum, sum_squares."""
    if len(rows) <= baseline:
        return None
    first = rows[:baseline]
    num = sum(row["num"] for row in first)
    normal = sum(row["sum"] for row in first) / num
    variance = max(0.0, sum(row["sum_squares"] for row in first) / num - normal**2)
    sd = max(math.sqrt(variance), SMALLEST_SD)
    score = 0.0
    for row in rows[baseline:]:
        score = max(0.0, score + (row["gap"] - normal) / (sd / math.sqrt(row["num"])) - drift)
    return score


def mean_steps_to_alarm(shift: float, *, drift: float, limit: float) -> float:
    """Siegmund's approximation of the mean number of steps to an alarm, at a shift in standard errors."""
    far, bound = shift - drift, limit + 1.166
    if abs(far) < 1e-9:
        return bound * bound
    return (math.exp(-2 * far * bound) + 2 * far * bound - 1) / (2 * far * far)


def sentence(row: Mapping[str, Any], limit: float) -> str:
    """What the loop says when the alarm goes."""
    return (
        f"ALARM: the reward is drifting away from the hidden verifier: on {row['num']} canary rollouts of this step it "
        f"calls {row['gap']:+.0%} more solved (CUSUM {row['cusum']:.1f} > {limit:g}). Look at what wins now with "
        "`leyden inspect`, and run `leyden probe`."
    )

"""Sums over the labels and steps of one update, in double precision, and the report that they make.

L labels of a pass   N labels of a batch
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from leyden.learning.backends.base import UpdateReport
from leyden.learning.backends.embedded.coupling import Mask, Wide
from leyden.learning.backends.embedded.losses import Terms
from leyden.learning.backends.embedded.planner import Plan
from leyden.learning.batch import Batch


@dataclass(slots=True)
class Tally:
    """What one update has added up so far."""

    loss: float = 0.0
    grad_norm: float = 0.0
    weight: float = 0.0
    kl: float = 0.0
    entropy: float = 0.0
    num_clipped_low: int = 0
    num_clipped_high: int = 0
    num_capped: int = 0
    num_masked: dict[int, int] = field(default_factory=dict)
    value_loss: float = 0.0
    margins: list[Wide] = field(default_factory=list)
    num_computed: int = 0
    num_steps: int = 0
    num_forward_tokens: int = 0
    num_passes: int = 0
    layouts: list[str] = field(default_factory=list)
    predicted_s: float | None = None
    measured_s: float = 0.0
    gaps: list[Wide] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """Add the time of the block to its phase."""
        start = time.perf_counter()
        yield
        self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - start

    def add_plan(self, plan: Plan, seconds: float) -> None:
        """Take down which layout was chosen, what it was expected to take and what it took."""
        self.num_passes += len(plan.passes)
        self.measured_s += seconds
        if plan.layout not in self.layouts:
            self.layouts.append(plan.layout)
        if plan.predicted_s is not None:
            self.predicted_s = (self.predicted_s or 0.0) + plan.predicted_s

    def add_gap(self, logp_N: Wide, batch: Batch, active_N: Mask) -> None:
        """Take down how far trainer and sampler are apart at active labels."""
        known_N = active_N & ~np.isnan(batch.logp_sampler_N)
        self.gaps.append(np.abs(logp_N[known_N] - batch.logp_sampler_N[known_N]))

    def add_terms(self, terms: Terms, weight_L: Tensor) -> None:
        """Add what one pass gave."""
        self.loss += float(terms.loss.detach())
        self.weight += float(weight_L.sum())
        self.kl += float((weight_L * terms.kl_L).sum())
        self.entropy += float((weight_L * terms.entropy_L).sum())
        self.num_clipped_low += int(terms.clipped_low_L.sum())
        self.num_clipped_high += int(terms.clipped_high_L.sum())
        self.num_capped += int(terms.capped_L.sum())
        self.num_computed += len(weight_L)


def report(tally: Tally, batches: Sequence[Batch]) -> UpdateReport:
    """Averages over steps and labels; `batches` are all that were given, those without a step included."""
    steps = max(1, tally.num_steps)
    computed = max(1, tally.num_computed)
    weight = tally.weight or 1.0
    gaps = np.concatenate(tally.gaps) if tally.gaps else np.zeros(0)
    margins = np.concatenate(tally.margins) if tally.margins else np.zeros(0)
    return UpdateReport(
        loss=tally.loss / steps,
        grad_norm=tally.grad_norm / steps,
        kl=tally.kl / weight,
        entropy=tally.entropy / weight,
        clip_fraction=(tally.num_clipped_low + tally.num_clipped_high) / computed,
        clip_low_fraction=tally.num_clipped_low / computed,
        clip_high_fraction=tally.num_clipped_high / computed,
        num_masked=[tally.num_masked.get(id(batch), 0) for batch in batches],
        value_loss=tally.value_loss / steps,
        pair_accuracy=float((margins > 0).mean()) if len(margins) else 0.0,
        pair_margin=float(margins.mean()) if len(margins) else 0.0,
        importance_capped=tally.num_capped / computed,
        gap_mean=float(gaps.mean()) if len(gaps) else 0.0,
        gap_max=float(gaps.max()) if len(gaps) else 0.0,
        num_labels=sum(batch.num_labels for batch in batches),
        num_forward_tokens=tally.num_forward_tokens,
        num_sequence_tokens=sum(batch.num_sequence_tokens for batch in batches),
        num_optimizer_steps=tally.num_steps,
        seconds=tally.seconds,
        layout=", ".join(tally.layouts),
        num_passes=tally.num_passes,
        predicted_s=tally.predicted_s,
        measured_s=tally.measured_s,
    )

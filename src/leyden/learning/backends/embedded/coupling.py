"""What couples labels of a batch: ratios of whole calls, margins of preference pairs. numpy only.

A label's part in such a loss depends on log-probs of labels that may be computed in another pass. They are therefore
made here from log-probs of the whole batch at the weights of now, and enter the loss as constants per label: the
gradient is exact, because the derivative of the loss by each log-prob needs no more than their values. That keeps
every layout and every cut into passes free.

    A actions   N labels   P pairs
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from leyden.learning.batch import Batch

Mask = NDArray[np.bool_]
Wide = NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class Before:
    """What is known of a batch before a step of it; NaN where a label is not active."""

    logp_old_N: Wide | None = None
    """Log-probs below the ratio; None: the forward pass of the step itself gives them."""
    logp_reference_N: Wide | None = None
    """Under the reference; None when nothing is measured from it."""
    log_importance_N: Wide | None = None
    """log of trainer by sampler for whole actions; None: label by label."""
    fresh: bool = False
    """Whether `logp_old_N` is ours, so that it is also that of now until the first step is made."""


@dataclass(frozen=True, slots=True, eq=False)
class Coupled:
    """Constants per label of losses that couple labels; None where the surrogate does not."""

    log_ratio_N: Wide | None = None
    slope_N: Wide | None = None
    share_N: Wide | None = None


def whole_actions(batch: Batch, active_N: Mask) -> Mask:
    """Labels of every action that has an active label."""
    touched_A = np.zeros(len(batch.sequences), np.bool_)
    touched_A[batch.action_N[active_N]] = True
    return touched_A[batch.action_N]


def call_log_importance(batch: Batch, logp_old_N: Wide) -> Wide:
    """Sum over the labels of each action of old - sampler, given to each of its labels; shape (N,).

    Labels without a sampler log-prob or an old one add 0; an action without any has NaN.
    """
    difference_N = logp_old_N - batch.logp_sampler_N
    known_N = ~np.isnan(difference_N)
    num = len(batch.sequences)
    sum_A = np.bincount(batch.action_N, np.where(known_N, difference_N, 0.0), num)
    count_A = np.bincount(batch.action_N, known_N, num)
    return np.where(count_A > 0, sum_A, np.nan)[batch.action_N]


def call_log_ratio(batch: Batch, logp_N: Wide, logp_old_N: Wide) -> Wide:
    """Mean over the labels of each action of logp - old, given to each of its labels; unknown ones (NaN) add 0."""
    num = len(batch.sequences)
    length_A = np.maximum(np.bincount(batch.action_N, minlength=num), 1)
    return (np.bincount(batch.action_N, np.nan_to_num(logp_N - logp_old_N), num) / length_A)[batch.action_N]


def pair_margins(batch: Batch, logp_N: Wide, logp_reference_N: Wide, beta: float) -> Wide:
    """beta * sum over the labels of each pair of credit * (logp - reference), credit being 1 or -1; shape (P,)."""
    assert batch.pair_A is not None
    gain_N = batch.credit_N.astype(np.float64) * (logp_N - logp_reference_N)
    return np.bincount(batch.pair_A[batch.action_N], beta * gain_N).astype(np.float64, copy=False)


def pair_terms(batch: Batch, margin_P: Wide, beta: float) -> tuple[Wide, Wide]:
    """(slope, share) of each label, shape (N,), for the loss -log sigmoid(margin) of each pair.

    The slope is its derivative by the label's log-prob, -beta * sigmoid(-margin) * credit; the share is the loss by
    the number of labels of the pair. arXiv 2305.18290, equation 7.
    """
    assert batch.pair_A is not None
    pair_N = batch.pair_A[batch.action_N]
    loss_P = np.logaddexp(0.0, -margin_P)
    slope_N = -beta * np.exp(-np.logaddexp(0.0, margin_P))[pair_N] * batch.credit_N
    return slope_N, (loss_P / np.maximum(np.bincount(pair_N, minlength=len(margin_P)), 1))[pair_N]

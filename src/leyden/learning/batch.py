"""Samples and credit become arrays: the shape table of the project.

    letter  axis                                                   where
    A       actions of a step (one sampled choice each)            rollout_A, prompt_len_A, temperature_A
    N       labels: all trained completion tokens of all actions   action_N, token_N, credit_N, weight_N
    S       tokens of one action's sequence, prompt + completion   sequences[a]
    U       unique tokens of a forest                              Forest.tokens_U
    B, T    rows and columns of a padded or packed layout          backends only
    V       vocabulary                                             backends only

A `Batch` is one optimizer step and knows nothing of layouts: label n is the token that action `action_N[n]`
sampled at place `offset_N[n]` of its completion, and the loss of the step is
`sum_n weight_N[n] * loss(logp of label n, credit_N[n], ...)`. Every layout must give the same number.
Labels of one action are consecutive and in order.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from leyden.base.records import FloatArray, IntArray


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """One optimizer step."""

    sequences: Sequence[IntArray]
    """Prompt and completion ids of each action; shapes (S_a,)."""
    prompt_len_A: IntArray
    """Prompt tokens of each action; its labels are `sequences[a][prompt_len_A[a]:]`."""
    rollout_A: IntArray
    """Index of the action's rollout among the rollouts of this step, 0 to num_rollouts - 1."""
    temperature_A: FloatArray
    """Logits are divided by this before the softmax, as the sampler did."""
    action_N: IntArray
    """Index of the action of each label."""
    offset_N: IntArray
    """Place of the label in its action's completion."""
    token_N: IntArray
    """Token id of the label."""
    logp_sampler_N: FloatArray
    """Log-probability under the distribution it was sampled from; NaN where unknown (demonstrations)."""
    credit_N: FloatArray
    """Credit (advantage) of the label."""
    weight_N: FloatArray
    """Normalisation; under `rollout_mean` the weights of one rollout sum to 1 / num_rollouts."""
    num_rollouts: int
    """Rollouts that this optimizer step counts, those with nothing to train included."""
    rollout_ids: Sequence[str] = ()
    """Ids behind `rollout_A`."""
    report: Mapping[str, float] = field(default_factory=dict)
    """Numbers about how it was made, for the step report."""

    @property
    def num_labels(self) -> int:
        """Trained tokens."""
        return len(self.token_N)

    @property
    def num_sequence_tokens(self) -> int:
        """Tokens of all sequences without any sharing."""
        return int(sum(len(s) for s in self.sequences))


def check(batch: Batch) -> None:
    """Assert every invariant of a batch; cheap enough to run at each step."""
    lengths_A = np.asarray([len(s) for s in batch.sequences], np.int64)
    assert len(batch.prompt_len_A) == len(batch.rollout_A) == len(batch.temperature_A) == len(lengths_A)
    fields = (batch.action_N, batch.offset_N, batch.logp_sampler_N, batch.credit_N, batch.weight_N)
    assert all(len(f) == batch.num_labels for f in fields)
    assert bool(np.all(batch.prompt_len_A >= 1)), "the first label needs a token before it"
    assert bool(np.isfinite(batch.credit_N).all()) and bool(np.isfinite(batch.weight_N).all())
    place_N = batch.prompt_len_A[batch.action_N] + batch.offset_N
    assert bool(np.all(place_N < lengths_A[batch.action_N]))
    for a, sequence in enumerate(batch.sequences):
        mine = batch.action_N == a
        assert np.array_equal(sequence[place_N[mine]], batch.token_N[mine]), "a label is not what was sampled"

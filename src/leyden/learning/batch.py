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

How weights are made (docs/learning.md). For one optimizer step with R rollouts, T_p trained tokens in rollout p (all
its actions together), T_a in action a, T in all, C actions with at least one trained token:

    rollout_mean   1 / (R * T_p)              a rollout has mass 1 / R, however it was split into calls
    token_mean     1 / T                      every token weighs the same
    call_mean      1 / (C * T_a)              every call weighs the same: mean over calls of mean over tokens
    constant       1 / (R * constant_tokens)

R counts the rollouts of the step that were given credit, those with credit 0 and those that lost every token
included: the scale must not depend on how many happened to survive. T_p, T and C count zero-credit tokens
too. Preference pairs have no normalisation: a pair is one loss over all tokens of both rollouts, and each of its labels
has the weight 1 / pairs of the optimizer step.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from leyden.base.errors import RecordError
from leyden.base.records import FloatArray, IntArray
from leyden.learning.order import shuffled
from leyden.traces.assemble import Action

Normalisation = Literal["rollout_mean", "token_mean", "call_mean", "constant"]
ActionKey = tuple[str, str, int]
"""Names an action: rollout, call, index of the choice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Details:
    """What is known of single actions beyond one credit per rollout; nothing by default."""

    credit: Mapping[ActionKey, float | FloatArray] = field(default_factory=dict)
    """Credit of actions that differs from that of their rollout: a number, or one per token, shape (R,)."""
    value: Mapping[ActionKey, float] = field(default_factory=dict)
    """What the critic expected before the step."""
    target: Mapping[ActionKey, float] = field(default_factory=dict)
    """What it should have expected."""
    pair: Mapping[str, str] = field(default_factory=dict)
    """Rollout to the name of its preference pair; rollouts of a pair stay in one optimizer step."""


NO_DETAILS = Details()


def key_of(action: Action) -> ActionKey:
    """The name of an action in `Details`."""
    return action.rollout_id, action.call_id, action.choice_index


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
    keys_A: Sequence[ActionKey] = ()
    """Names of the actions; empty for demonstrations."""
    value_A: FloatArray | None = None
    """What the critic expected before the step; None without a critic, NaN where it learns nothing."""
    target_A: FloatArray | None = None
    """What it should have expected; as `value_A`."""
    pair_A: IntArray | None = None
    """Number of the preference pair of the action's rollout, from 0; None without pairs."""
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
    """Assert every invariant of a batch, in linear time: cheap enough to run at each step."""
    lengths_A = np.asarray([len(s) for s in batch.sequences], np.int64)
    num_actions = len(lengths_A)
    assert len(batch.prompt_len_A) == len(batch.rollout_A) == len(batch.temperature_A) == num_actions
    fields = (batch.action_N, batch.offset_N, batch.logp_sampler_N, batch.credit_N, batch.weight_N)
    assert all(len(f) == batch.num_labels for f in fields)
    assert all(f is None or len(f) == num_actions for f in (batch.value_A, batch.target_A, batch.pair_A))
    assert len(batch.rollout_ids) in (0, batch.num_rollouts)
    if num_actions == 0:
        assert batch.num_labels == 0, "labels without actions"
        return
    assert bool(np.all(batch.prompt_len_A >= 1)), "the first label needs a token before it"
    assert bool(np.all((batch.rollout_A >= 0) & (batch.rollout_A < batch.num_rollouts)))
    assert bool(np.all(np.isfinite(batch.temperature_A) & (batch.temperature_A > 0)))
    assert bool(np.isfinite(batch.credit_N).all()) and bool(np.isfinite(batch.weight_N).all())
    assert bool(np.all((batch.action_N >= 0) & (batch.action_N < num_actions) & (batch.offset_N >= 0)))
    step_N = np.diff(batch.action_N.astype(np.int64))
    ordered = (step_N > 0) | ((step_N == 0) & (np.diff(batch.offset_N) > 0))
    assert bool(np.all(ordered)), "labels are not in order, or one is there twice"
    place_N = batch.prompt_len_A[batch.action_N].astype(np.int64) + batch.offset_N
    assert bool(np.all(place_N < lengths_A[batch.action_N])), "a label lies beyond its sequence"
    starts_A = np.cumsum(lengths_A) - lengths_A
    flat = np.concatenate(batch.sequences)
    assert np.array_equal(flat[starts_A[batch.action_N] + place_N], batch.token_N), "a label was not sampled"


def build(
    actions: Sequence[Action],
    credit_by_rollout: Mapping[str, float],
    *,
    normalisation: Normalisation = "rollout_mean",
    constant_tokens: int = 256,
    mini_batches: int = 1,
    seed: int = 0,
    skip_zero_credit: bool = False,
    details: Details = NO_DETAILS,
) -> list[Batch]:
    """One Batch per optimizer step from the actions that are not dropped; [] if none has a token.

    The rollouts of `credit_by_rollout` are shuffled by `seed`, groups staying together, and cut into
    `mini_batches` parts that differ by at most one rollout: nothing is discarded for divisibility, all
    actions of a rollout and both rollouts of a pair stay in one part (pairs are then what is counted), and a part
    without any label is left out. The result does not depend on the order of `actions`. `skip_zero_credit` leaves out
    actions whose credit is all 0, which have no gradient if, and only if, there is neither a KL, an entropy nor a value
    term; they still count in R, T_p, T and C.
    Every batch reports `num_trained_tokens`, `num_zero_credit_tokens` (part of them) and `num_skipped_tokens`
    (not among its labels); tokens of parts that are left out are in no report (`zero_credit_tokens` counts
    them all).
    """
    kept: defaultdict[str, list[Action]] = defaultdict(list)
    group_of: dict[str, str] = {}
    for action in actions:
        group_of[action.rollout_id] = action.group_id
        if action.drop is None and action.num_tokens:
            assert action.rollout_id in credit_by_rollout, f"rollout {action.rollout_id} was given no credit"
            kept[action.rollout_id].append(action)
    blocks: defaultdict[str, list[str]] = defaultdict(list)
    for rollout_id in credit_by_rollout:
        blocks[group_of.get(rollout_id, rollout_id)].append(rollout_id)
    queue: dict[str, list[str]] = {}
    for block in shuffled(blocks, str, "group", seed):
        for rollout_id in shuffled(blocks[block], str, "rollout", seed):
            queue.setdefault(details.pair.get(rollout_id, rollout_id), []).append(rollout_id)
    units = list(queue.values())
    batches: list[Batch] = []
    for low, high in _parts(len(units), mini_batches):
        ids = [rollout_id for unit in units[low:high] for rollout_id in unit]
        mine = [a for i in ids for a in sorted(kept[i], key=lambda a: (a.order, a.call_id, a.choice_index))]
        batch = _one_step(mine, ids, credit_by_rollout, details, normalisation, constant_tokens, skip_zero_credit)
        if batch.num_labels:
            batches.append(batch)
    return batches


def zero_credit_tokens(
    actions: Sequence[Action], credit_by_rollout: Mapping[str, float], details: Details = NO_DETAILS
) -> int:
    """Tokens that count as trained although their credit is exactly 0."""
    kept = [a for a in actions if a.drop is None]
    return int(sum((_token_credit(a, credit_by_rollout, details) == 0).sum() for a in kept))


def _token_credit(action: Action, by_rollout: Mapping[str, float], details: Details) -> NDArray[np.float64]:
    """Credit of each token of an action, shape (R,)."""
    given = details.credit.get(key_of(action), by_rollout[action.rollout_id])
    return np.broadcast_to(np.asarray(given, np.float64), (action.num_tokens,))


def demo_batches(demos: Sequence[tuple[Sequence[int], int]], batch_size: int, epochs: int, seed: int) -> list[Batch]:
    """Batches of demonstrations (ids, number of ids before what is imitated), `epochs` passes in new orders.

    Each demonstration is a rollout with credit 1 under `rollout_mean`; sampler log-probs are NaN. The last
    batch of an epoch may be smaller. Raises RecordError for a demonstration without a token to imitate or to
    begin with.
    """
    sequences: list[IntArray] = []
    for d, (ids, prompt_len) in enumerate(demos):
        if not 1 <= prompt_len < len(ids):
            raise RecordError(
                f"demonstration {d} has {len(ids)} tokens, {prompt_len} of them before its last answer; "
                "it needs at least one before and one in the answer"
            )
        sequences.append(np.asarray(ids, np.int32))
    batches: list[Batch] = []
    for epoch in range(epochs):
        order = shuffled(range(len(demos)), str, "demos", seed, epoch)
        for low in range(0, len(order), batch_size):
            chosen = order[low : low + batch_size]
            prompt_len_A = np.asarray([demos[d][1] for d in chosen], np.int32)
            num_A = np.asarray([len(sequences[d]) for d in chosen], np.int64) - prompt_len_A
            num_labels = int(num_A.sum())
            batches.append(
                _arrays(
                    [sequences[d] for d in chosen],
                    prompt_len_A,
                    np.arange(len(chosen), dtype=np.int32),
                    np.ones(len(chosen), np.float32),
                    np.full(num_labels, np.nan, np.float32),
                    np.ones(num_labels),
                    1.0 / (len(chosen) * num_A),
                    [f"demo-{d}" for d in chosen],
                    {"num_trained_tokens": num_labels, "num_zero_credit_tokens": 0, "num_skipped_tokens": 0},
                )
            )
    return batches


def _parts(num: int, num_parts: int) -> list[tuple[int, int]]:
    """Borders that cut `num` things into at most `num_parts` runs, the longer ones first."""
    num_parts = min(num_parts, num)
    borders = [0]
    for part in range(num_parts):
        borders.append(borders[-1] + num // num_parts + (part < num % num_parts))
    return list(pairwise(borders))


def _one_step(
    actions: Sequence[Action],
    rollout_ids: Sequence[str],
    credit_by_rollout: Mapping[str, float],
    details: Details,
    normalisation: Normalisation,
    constant_tokens: int,
    skip_zero_credit: bool,
) -> Batch:
    """One optimizer step over `rollout_ids`, with `actions` being all their trained ones."""
    place = {rollout_id: p for p, rollout_id in enumerate(rollout_ids)}
    rollout_A = np.asarray([place[a.rollout_id] for a in actions], np.int32)
    num_A = np.asarray([a.num_tokens for a in actions], np.int64)
    given = [_token_credit(a, credit_by_rollout, details) for a in actions]
    pair_A = _pairs(actions, details)
    if pair_A is None:
        weight_A = _weights(rollout_A, num_A, len(rollout_ids), normalisation, constant_tokens)
    else:
        weight_A = np.full(len(actions), 1.0 / max(1, len(set(pair_A.tolist()))))
    idle_A = np.asarray([skip_zero_credit and not c.any() for c in given], np.bool_)
    chosen = np.flatnonzero(~idle_A)
    taken = [actions[i] for i in chosen.tolist()]

    def known(values: Mapping[ActionKey, float]) -> FloatArray | None:
        return np.asarray([values.get(key_of(a), np.nan) for a in taken], np.float32) if values else None

    return _arrays(
        [np.concatenate((a.prompt_ids, a.completion_ids)) for a in taken],
        np.asarray([len(a.prompt_ids) for a in taken], np.int32),
        rollout_A[chosen],
        np.asarray([a.temperature for a in taken], np.float32),
        np.concatenate([a.logprobs for a in taken] or [np.zeros(0, np.float32)]),
        np.concatenate([given[i] for i in chosen.tolist()] or [np.zeros(0)]),
        weight_A[chosen],
        rollout_ids,
        {
            "num_trained_tokens": int(num_A.sum()),
            "num_zero_credit_tokens": int(sum((c == 0).sum() for c in given)),
            "num_skipped_tokens": int(num_A[idle_A].sum()),
        },
        keys_A=tuple(key_of(a) for a in taken),
        value_A=known(details.value),
        target_A=known(details.target),
        pair_A=None if pair_A is None else pair_A[chosen],
    )


def _pairs(actions: Sequence[Action], details: Details) -> IntArray | None:
    """Number of the pair of each action, in the order in which pairs come first."""
    if not details.pair:
        return None
    numbers: dict[str, int] = {}
    for action in actions:
        numbers.setdefault(details.pair[action.rollout_id], len(numbers))
    return np.asarray([numbers[details.pair[a.rollout_id]] for a in actions], np.int32)


def _weights(
    rollout_A: IntArray,
    num_A: NDArray[np.int64],
    num_rollouts: int,
    normalisation: Normalisation,
    constant_tokens: int,
) -> NDArray[np.float64]:
    """Weight of each label of an action, by the formulas at the top; every action has at least one token."""
    if normalisation == "rollout_mean":
        tokens_per_rollout = np.bincount(rollout_A, weights=num_A, minlength=num_rollouts)
        return 1.0 / (num_rollouts * tokens_per_rollout[rollout_A])
    if normalisation == "token_mean":
        return np.full(len(num_A), 1.0 / max(int(num_A.sum()), 1))
    if normalisation == "call_mean":
        return 1.0 / (len(num_A) * num_A)
    assert normalisation == "constant", normalisation
    return np.full(len(num_A), 1.0 / (num_rollouts * constant_tokens))


def _arrays(
    sequences: Sequence[IntArray],
    prompt_len_A: IntArray,
    rollout_A: IntArray,
    temperature_A: FloatArray,
    logp_sampler_N: FloatArray,
    credit_N: NDArray[np.float64],
    weight_A: NDArray[np.float64],
    rollout_ids: Sequence[str],
    report: Mapping[str, float],
    **more: Any,
) -> Batch:
    """A Batch whose labels are all completion tokens; per-action weights are spread over them."""
    num_A = np.asarray([len(s) for s in sequences], np.int64) - prompt_len_A
    num_labels = int(num_A.sum())
    first_A = np.cumsum(num_A) - num_A
    completions = [s[p:] for s, p in zip(sequences, prompt_len_A.tolist(), strict=True)]
    return Batch(
        sequences=sequences,
        prompt_len_A=prompt_len_A,
        rollout_A=rollout_A,
        temperature_A=temperature_A,
        action_N=np.repeat(np.arange(len(sequences), dtype=np.int32), num_A),
        offset_N=(np.arange(num_labels) - np.repeat(first_A, num_A)).astype(np.int32),
        token_N=np.concatenate(completions or [np.zeros(0, np.int32)]).astype(np.int32, copy=False),
        logp_sampler_N=logp_sampler_N,
        credit_N=credit_N.astype(np.float32),
        weight_N=np.repeat(weight_A, num_A).astype(np.float32),
        num_rollouts=len(rollout_ids),
        rollout_ids=tuple(rollout_ids),
        report=report,
        **more,
    )

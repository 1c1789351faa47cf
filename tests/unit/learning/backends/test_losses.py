"""The mathematics of the losses, against float64 numpy written from the formulas."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from leyden.learning.backends.base import Objective
from leyden.learning.backends.embedded.losses import (
    Labels,
    cispo,
    gspo,
    importance_weight,
    k3,
    objective_loss,
    policy_gradient,
    ppo_clip,
    value_loss,
)

FLOATS = st.floats(-5, 5)


def tensor(values: object) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def leaf(values: object) -> torch.Tensor:
    return tensor(values).requires_grad_()


@given(st.lists(st.tuples(FLOATS, FLOATS, FLOATS), min_size=1, max_size=8))
def test_ppo_clip_is_the_minimum_of_the_plain_and_the_clipped_objective(
    rows: list[tuple[float, float, float]],
) -> None:
    logp, old, credit = (list(column) for column in zip(*rows, strict=True))
    loss_L, clipped_L = ppo_clip(tensor(logp), tensor(old), tensor(credit), 0.2, 0.3)
    for i in range(len(rows)):
        ratio = math.exp(logp[i] - old[i])
        plain, clipped = ratio * credit[i], min(max(ratio, 0.8), 1.3) * credit[i]
        assert loss_L[i].item() == pytest.approx(-min(plain, clipped), rel=1e-12, abs=1e-300)
        assert bool(clipped_L[i]) == (clipped < plain)


def test_ppo_clip_at_ratio_one_has_the_gradient_of_the_policy_gradient() -> None:
    logp, credit = leaf([-1.0, -2.0, -3.0]), tensor([1.5, -0.5, 2.0])
    ppo_clip(logp, logp.detach(), credit, 0.2, 0.2)[0].sum().backward()  # type: ignore[no-untyped-call]
    assert logp.grad is not None
    assert torch.equal(logp.grad, -credit)
    other = leaf([-1.0, -2.0, -3.0])
    policy_gradient(other, credit).sum().backward()  # type: ignore[no-untyped-call]
    assert other.grad is not None and torch.equal(other.grad, logp.grad)


def test_a_clipped_label_has_no_gradient_and_the_other_side_keeps_its_own() -> None:
    # Ratios 2, 2, 1/2, 1/2 with credit +, -, +, -: only (2, +) and (1/2, -) are clipped.
    logp = leaf([math.log(2), math.log(2), -math.log(2), -math.log(2)])
    loss_L, clipped_L = ppo_clip(logp, tensor([0.0] * 4), tensor([1.0, -1.0, 1.0, -1.0]), 0.2, 0.2)
    loss_L.sum().backward()  # type: ignore[no-untyped-call]
    assert clipped_L.tolist() == [True, False, False, True]
    assert logp.grad is not None
    assert logp.grad.tolist() == pytest.approx([0.0, 2.0, -0.5, 0.0])


def test_the_importance_weight_is_capped_constant_and_one_where_the_sampler_is_unknown() -> None:
    old = leaf([-1.0, -1.0, -1.0, -1.0])
    weight_L, capped_L, _ = importance_weight(old, tensor([-1.0, -1.5, -9.0, math.nan]), 2.0)
    assert weight_L.tolist() == pytest.approx([1.0, math.exp(0.5), 2.0, 1.0])
    assert capped_L.tolist() == [False, False, True, False]
    assert not weight_L.requires_grad
    off_L, none_L, _ = importance_weight(old, tensor([-9.0] * 4), 0.0)
    assert off_L.tolist() == [1.0] * 4 and not none_L.any()


@given(st.lists(st.tuples(FLOATS, FLOATS), min_size=1, max_size=8))
def test_k3_is_never_negative_and_zero_only_for_equal_log_probs(rows: list[tuple[float, float]]) -> None:
    reference, logp = (tensor(list(column)) for column in zip(*rows, strict=True))
    values = k3(reference, logp)
    d = (reference - logp).numpy()
    assert np.allclose(values.numpy(), np.exp(d) - d - 1, rtol=1e-9, atol=1e-12)
    assert (values >= 0).all()


def test_k3_is_an_unbiased_estimate_of_the_divergence() -> None:
    policy, reference = tensor([0.7, 0.2, 0.1]), tensor([0.3, 0.3, 0.4])
    estimate = (policy * k3(reference.log(), policy.log())).sum()
    exact = (policy * (policy.log() - reference.log())).sum()
    assert estimate.item() == pytest.approx(exact.item(), rel=1e-12)


@given(st.lists(st.tuples(FLOATS, FLOATS, FLOATS), min_size=1, max_size=8), st.floats(1.1, 9))
def test_the_second_bound_keeps_the_objective_above_its_multiple_of_negative_credit(
    rows: list[tuple[float, float, float]], dual: float
) -> None:
    logp, old, credit = (list(column) for column in zip(*rows, strict=True))
    loss_L, _ = ppo_clip(tensor(logp), tensor(old), tensor(credit), 0.2, 0.3, dual)
    for i in range(len(rows)):
        ratio = math.exp(logp[i] - old[i])
        single = min(ratio * credit[i], min(max(ratio, 0.8), 1.3) * credit[i])
        expected = max(single, dual * credit[i]) if credit[i] < 0 else single
        assert loss_L[i].item() == pytest.approx(-expected, rel=1e-12, abs=1e-300)


def test_beyond_the_second_bound_there_is_no_gradient() -> None:
    logp = leaf([math.log(2.0), math.log(4.0)])
    loss_L, clipped_L = ppo_clip(logp, tensor([0.0, 0.0]), tensor([-1.0, -1.0]), 0.2, 0.2, 3.0)
    loss_L.sum().backward()  # type: ignore[no-untyped-call]
    assert logp.grad is not None
    assert logp.grad.tolist() == pytest.approx([2.0, 0.0]) and clipped_L.tolist() == [False, True]


@given(st.lists(st.tuples(FLOATS, FLOATS, FLOATS), min_size=1, max_size=8))
def test_cispo_has_the_policy_gradient_times_the_bounded_ratio_also_where_it_is_clipped(
    rows: list[tuple[float, float, float]],
) -> None:
    columns = [list(column) for column in zip(*rows, strict=True)]
    logp, old, credit = leaf(columns[0]), columns[1], columns[2]
    loss_L, clipped_L = cispo(logp, tensor(old), tensor(credit), 0.5, 1.0)
    loss_L.sum().backward()  # type: ignore[no-untyped-call]
    assert logp.grad is not None
    for i in range(len(rows)):
        ratio = math.exp(columns[0][i] - old[i])
        bounded = min(max(ratio, 0.5), 2.0)
        assert logp.grad[i].item() == pytest.approx(-bounded * credit[i], rel=1e-12)
        assert loss_L[i].item() == pytest.approx(-bounded * credit[i] * columns[0][i], rel=1e-12)
        assert bool(clipped_L[i]) == (not 0.5 <= ratio <= 2.0)


@given(st.lists(st.tuples(FLOATS, FLOATS), min_size=1, max_size=6), st.floats(-3, 3))
def test_labels_of_a_call_add_up_to_the_gradient_of_the_sequence_objective(
    rows: list[tuple[float, float]], credit: float
) -> None:
    logp, old = leaf([row[0] for row in rows]), tensor([row[1] for row in rows])
    # The sequence objective itself: min(s * credit, clip(s) * credit), s the geometric mean of the ratios.
    s = torch.exp((logp - old).mean())
    (expected,) = torch.autograd.grad(-torch.minimum(s * credit, s.clamp(0.8, 1.3) * credit), logp)
    mean_L = (logp - old).mean().detach().expand(len(rows))
    loss_L, _ = gspo(logp, mean_L, tensor([credit] * len(rows)), 0.2, 0.3)
    (found,) = torch.autograd.grad(loss_L.mean(), logp)
    boundary = min(abs(s.item() - 0.8), abs(s.item() - 1.3)) < 1e-6
    assert boundary or torch.allclose(found, expected, rtol=1e-9, atol=1e-12)


def test_the_mask_takes_out_what_is_far_from_the_sampler_on_either_side() -> None:
    old = tensor([-1.0, -1.0, -1.0, -1.0])
    weight_L, capped_L, masked_L = importance_weight(old, tensor([-1.2, -3.0, 1.0, math.nan]), 2.0, 3.0)
    assert masked_L.tolist() == [False, True, True, False]
    assert capped_L.tolist() == [False, True, False, False]
    assert weight_L.tolist() == pytest.approx([math.exp(0.2), 2.0, math.exp(-2.0), 1.0])
    terms = objective_loss(
        Objective(importance_mask=3.0, kl=0.5),
        Labels(
            credit_L=tensor([1.0] * 4),
            weight_L=tensor([1.0] * 4),
            logp_old_L=old,
            logp_sampler_L=tensor([-1.2, -3.0, 1.0, math.nan]),
            logp_reference_L=tensor([-2.0] * 4),
        ),
        logp := leaf([-1.0] * 4),
    )
    terms.loss.backward()  # type: ignore[no-untyped-call]
    assert logp.grad is not None
    assert (logp.grad == 0).tolist() == [False, True, True, False], "a masked label has no KL term either"


def test_importance_of_whole_calls_replaces_that_of_labels() -> None:
    weight_L, _, masked_L = importance_weight(
        tensor([-1.0, -1.0]), tensor([-1.0, -1.0]), 5.0, 2.0, tensor([math.log(1.5), math.log(3.0)])
    )
    assert weight_L.tolist() == pytest.approx([1.5, 3.0]) and masked_L.tolist() == [False, True]


@given(st.lists(st.tuples(FLOATS, FLOATS, FLOATS), min_size=1, max_size=8), st.floats(0, 2))
def test_the_value_loss_is_the_larger_of_the_plain_and_the_bounded_square(
    rows: list[tuple[float, float, float]], clip: float
) -> None:
    value, before, target = (list(column) for column in zip(*rows, strict=True))
    found = value_loss(tensor(value), tensor(before), tensor(target), clip)
    for i, (v, b, t) in enumerate(rows):
        bounded = b + min(max(v - b, -clip), clip)
        expected = max((v - t) ** 2, (bounded - t) ** 2) if clip else (v - t) ** 2
        assert found[i].item() == pytest.approx(0.5 * expected, rel=1e-12, abs=1e-12)


@pytest.mark.parametrize("surrogate", ["policy_gradient", "ppo_clip", "cispo", "gspo", "nll", "dpo"])
def test_the_objective_is_the_weighted_sum_of_its_parts(surrogate: str) -> None:
    rng = np.random.default_rng(0)
    logp, old, sampler, reference = -np.abs(rng.normal(2, 1, (4, 20)))
    sampler[3] = np.nan
    credit, weight, entropy = rng.normal(size=20), rng.uniform(size=20), rng.uniform(size=20)
    log_ratio = rng.normal(0, 0.3, 20)
    objective = Objective(surrogate=surrogate, kl=0.3, entropy=0.1, importance_cap=1.5)  # type: ignore[arg-type]
    terms = objective_loss(
        objective,
        Labels(
            credit_L=tensor(credit),
            weight_L=tensor(weight),
            logp_old_L=tensor(old),
            logp_sampler_L=tensor(sampler),
            logp_reference_L=tensor(reference),
            log_ratio_L=tensor(log_ratio) if surrogate == "gspo" else None,
            slope_L=tensor(credit),
            share_L=tensor(old),
        ),
        leaf(logp),
        tensor(entropy),
    )
    total = 0.0
    for i in range(20):
        importance = 1.0 if np.isnan(sampler[i]) else min(math.exp(old[i] - sampler[i]), 1.5)
        ratio, s = math.exp(logp[i] - old[i]), math.exp(log_ratio[i])
        part = {
            "policy_gradient": -importance * credit[i] * logp[i],
            "ppo_clip": -importance * min(ratio * credit[i], min(max(ratio, 0.8), 1.2) * credit[i]),
            "cispo": -importance * min(max(ratio, 0.8), 1.2) * credit[i] * logp[i],
            "gspo": -importance * min(s * credit[i], min(max(s, 0.8), 1.2) * credit[i]),
            "nll": -credit[i] * logp[i],
            "dpo": old[i],
        }[surrogate]
        d = reference[i] - logp[i]
        total += weight[i] * (part + 0.3 * (math.exp(d) - d - 1) - 0.1 * entropy[i])
    assert terms.loss.item() == pytest.approx(total, rel=1e-12)
    assert terms.loss.requires_grad

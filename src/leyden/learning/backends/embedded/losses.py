"""The mathematics of an update on arrays of labels. Pure torch, any floating type, no model.

Each function returns one value per label; `objective_loss` adds them up as `Objective` says. Gradients flow
through `logp_L` and `entropy_L` only: importance weights, old and reference log-probs and credit are
constants. The sum over labels needs nothing to be in any order, so every layout and every cut into passes
gives the same loss.

    L labels   A actions
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from leyden.learning.backends.base import Objective


@dataclass(frozen=True, slots=True, kw_only=True)
class Labels:
    """What the loss needs to know of the labels of one pass; all of shape (L,) and one floating type."""

    credit_L: Tensor
    """Credit (advantage)."""
    weight_L: Tensor
    """Normalisation."""
    logp_old_L: Tensor
    """The trainer's own log-prob before the step, without gradient."""
    logp_sampler_L: Tensor
    """Log-prob under the distribution it was sampled from; NaN where unknown."""
    logp_reference_L: Tensor | None = None
    """Log-prob under the reference; None when there is no KL term."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """A loss and what it was made of; only `loss` has a gradient."""

    loss: Tensor
    """Scalar, `sum_l weight_l * (...)`."""
    clipped_L: Tensor
    """Whether the clipped branch was taken."""
    capped_L: Tensor
    """Whether the importance weight met its cap."""
    kl_L: Tensor
    """k3 estimate; 0 without a reference."""
    entropy_L: Tensor
    """Entropy in nats; 0 when it was not computed."""


def policy_gradient(logp_L: Tensor, credit_L: Tensor) -> Tensor:
    """-credit * logp. Its gradient is that of REINFORCE (Williams 1992)."""
    return -credit_L * logp_L


def nll(logp_L: Tensor, credit_L: Tensor) -> Tensor:
    """-credit * logp, the negative log-likelihood of demonstrations (credit 1) or of kept samples."""
    return -credit_L * logp_L


def ppo_clip(
    logp_L: Tensor, logp_old_L: Tensor, credit_L: Tensor, clip_low: float, clip_high: float
) -> tuple[Tensor, Tensor]:
    """(loss, whether it is clipped): -min(r * credit, clip(r, 1 - low, 1 + high) * credit), r = exp(logp -
    old).

    Schulman et al. 2017, equation 7, with separate bounds. Where it is clipped, the label has no gradient.
    """
    ratio_L = torch.exp(logp_L - logp_old_L)
    plain_L = ratio_L * credit_L
    clipped_L = ratio_L.clamp(1.0 - clip_low, 1.0 + clip_high) * credit_L
    # At equality the plain branch counts, so a first step (ratio 1) has its gradient and clips nothing.
    taken_L = (clipped_L < plain_L).detach()
    return -torch.where(taken_L, clipped_L, plain_L), taken_L


def importance_weight(logp_old_L: Tensor, logp_sampler_L: Tensor, cap: float) -> tuple[Tensor, Tensor]:
    """(min(exp(old - sampler), cap), whether the cap was met), without gradient.

    1 where the sampler's log-prob is unknown (NaN), and everywhere when `cap` is 0.
    """
    known_L = ~torch.isnan(logp_sampler_L)
    if cap == 0:
        return torch.ones_like(logp_old_L), torch.zeros_like(known_L)
    ratio_L = torch.exp((logp_old_L - logp_sampler_L).detach())
    capped_L = known_L & (ratio_L >= cap)
    return torch.where(known_L, ratio_L.clamp(max=cap), torch.ones_like(ratio_L)), capped_L


def k3(logp_reference_L: Tensor, logp_L: Tensor) -> Tensor:
    """exp(d) - d - 1 with d = reference - policy: an unbiased, never negative estimate of KL(policy ||
    reference).

    Schulman, "Approximating KL divergence" (2020), estimator k3.
    """
    difference_L = logp_reference_L - logp_L
    return torch.expm1(difference_L) - difference_L


def objective_loss(objective: Objective, labels: Labels, logp_L: Tensor, entropy_L: Tensor | None = None) -> Terms:
    """`sum_l weight_l * (importance_l * surrogate_l + kl * k3_l - entropy * H_l)`.

    `entropy_L` is needed when `objective.entropy` is not 0, `labels.logp_reference_L` when `objective.kl` is
    not 0. The importance weight multiplies the surrogate only, and never `nll`.
    """
    none_L = torch.zeros_like(logp_L)
    clipped_L = capped_L = torch.zeros_like(logp_L, dtype=torch.bool)
    match objective.surrogate:
        case "policy_gradient":
            loss_L = policy_gradient(logp_L, labels.credit_L)
        case "ppo_clip":
            loss_L, clipped_L = ppo_clip(
                logp_L, labels.logp_old_L, labels.credit_L, objective.clip_low, objective.clip_high
            )
        case "nll":
            loss_L = nll(logp_L, labels.credit_L)
    if objective.surrogate != "nll":
        importance_L, capped_L = importance_weight(labels.logp_old_L, labels.logp_sampler_L, objective.importance_cap)
        loss_L = importance_L * loss_L
    kl_L = none_L
    if objective.kl != 0:
        assert labels.logp_reference_L is not None
        kl_L = k3(labels.logp_reference_L, logp_L)
        loss_L = loss_L + objective.kl * kl_L
    if objective.entropy != 0:
        assert entropy_L is not None
        loss_L = loss_L - objective.entropy * entropy_L
    return Terms(
        loss=(labels.weight_L * loss_L).sum(),
        clipped_L=clipped_L,
        capped_L=capped_L,
        kl_L=kl_L.detach(),
        entropy_L=none_L if entropy_L is None else entropy_L.detach(),
    )

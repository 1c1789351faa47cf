"""The mathematics of an update on arrays of labels. Pure torch, any floating type, no model.

Each function returns one value per label; `objective_loss` adds them up as `Objective` says. Gradients flow
through `logp_L` and `entropy_L` only: importance weights, old and reference log-probs and credit are
constants. What couples labels (the ratio of a whole call, the margin of a pair) comes in as a constant per label too,
made by `leyden.learning.backends.embedded.coupling` from log-probs of the whole batch. So the sum over labels needs
nothing to be in any order, and every layout and every cut into passes gives the same loss.

    L labels   K values of the critic
"""

import math
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
    """Log-prob below the ratio, without gradient: the trainer's own before the step, or the sampler's."""
    logp_sampler_L: Tensor
    """Log-prob under the distribution it was sampled from; NaN where unknown."""
    logp_reference_L: Tensor | None = None
    """Log-prob under the reference; None when there is no KL term."""
    log_importance_L: Tensor | None = None
    """log of trainer by sampler before the step for the whole action, NaN where unknown; None: label by label."""
    log_ratio_L: Tensor | None = None
    """`gspo`: mean over the action of logp - logp_old."""
    slope_L: Tensor | None = None
    """`dpo`: derivative of the loss of the label's pair by the log-prob of the label."""
    share_L: Tensor | None = None
    """`dpo`: loss of the label's pair by the number of its labels."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """A loss and what it was made of; only `loss` has a gradient."""

    loss: Tensor
    """Scalar, `sum_l weight_l * (...)`."""
    clipped_low_L: Tensor
    """Whether the lower bound of the ratio was in force."""
    clipped_high_L: Tensor
    """Whether the upper bound of the ratio was in force."""
    capped_L: Tensor
    """Whether the importance weight met its cap."""
    masked_L: Tensor
    """Whether the importance mask took the label out."""
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
    logp_L: Tensor, logp_old_L: Tensor, credit_L: Tensor, clip_low: float, clip_high: float, clip_dual: float = 0.0
) -> tuple[Tensor, Tensor]:
    """(loss, whether it is clipped): -min(r * credit, clip(r, 1 - low, 1 + high) * credit), r = exp(logp -
    old).

    Schulman et al. 2017, equation 7, with separate bounds. `clip_dual` above 1 bounds the minimum from below by
    clip_dual * credit where credit is negative (Ye et al. 2020, arXiv 1912.09729, equation 5). Where it is clipped,
    the label has no gradient.
    """
    return clipped_objective(torch.exp(logp_L - logp_old_L), credit_L, clip_low, clip_high, clip_dual)


def clipped_objective(
    ratio_L: Tensor, credit_L: Tensor, clip_low: float, clip_high: float, clip_dual: float = 0.0
) -> tuple[Tensor, Tensor]:
    """`ppo_clip` of a ratio, whatever it is a ratio of."""
    plain_L = ratio_L * credit_L
    clipped_L = ratio_L.clamp(1.0 - clip_low, 1.0 + clip_high) * credit_L
    # At equality the plain branch counts, so a first step (ratio 1) has its gradient and clips nothing.
    taken_L = (clipped_L < plain_L).detach()
    objective_L = torch.where(taken_L, clipped_L, plain_L)
    if clip_dual:
        floor_L = clip_dual * credit_L
        below_L = ((credit_L < 0) & (objective_L < floor_L)).detach()
        objective_L, taken_L = torch.where(below_L, floor_L, objective_L), taken_L | below_L
    return -objective_L, taken_L


def cispo(
    logp_L: Tensor, logp_old_L: Tensor, credit_L: Tensor, clip_low: float, clip_high: float
) -> tuple[Tensor, Tensor]:
    """(loss, whether the ratio is clipped): -clip(r, 1 - low, 1 + high) * credit * logp, r a constant.

    MiniMax-M1, arXiv 2506.13585, equations 4 and 5. Unlike in `ppo_clip`, a clipped label keeps a gradient.
    """
    ratio_L = torch.exp(logp_L - logp_old_L).detach()
    bounded_L = ratio_L.clamp(1.0 - clip_low, 1.0 + clip_high)
    return -bounded_L * credit_L * logp_L, bounded_L != ratio_L


def gspo(
    logp_L: Tensor, log_ratio_L: Tensor, credit_L: Tensor, clip_low: float, clip_high: float
) -> tuple[Tensor, Tensor]:
    """(loss, whether it is clipped): `ppo_clip` with s = exp(mean over the call of logp - old) as the ratio.

    arXiv 2507.18071, equation 13: the value of the ratio is that of the call, and each label has its own share of
    the gradient, so that labels of equal weight and credit add up to the gradient of the sequence objective (5).
    """
    ratio_L = torch.exp(log_ratio_L.detach() + logp_L - logp_L.detach())
    return clipped_objective(ratio_L, credit_L, clip_low, clip_high)


def importance_weight(
    logp_old_L: Tensor, logp_sampler_L: Tensor, cap: float, mask: float = 0.0, log_importance_L: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """(min(r, cap), whether the cap was met, whether r is outside [1 / mask, mask]), r = exp(old - sampler).

    Without gradient. r is 1 where the sampler's log-prob is unknown (NaN); the weight is 1 everywhere when `cap` is 0,
    and nothing is masked when `mask` is 0. `log_importance_L` replaces old - sampler, for r of whole calls.
    """
    log_L = (logp_old_L - logp_sampler_L if log_importance_L is None else log_importance_L).detach()
    known_L = ~torch.isnan(log_L)
    log_L = torch.where(known_L, log_L, torch.zeros_like(log_L))
    none_L = torch.zeros_like(known_L)
    masked_L = log_L.abs() > math.log(mask) if mask else none_L
    if cap == 0:
        return torch.ones_like(log_L), none_L, masked_L
    ratio_L = torch.exp(log_L)
    return ratio_L.clamp(max=cap), known_L & (ratio_L >= cap), masked_L


def k3(logp_reference_L: Tensor, logp_L: Tensor) -> Tensor:
    """exp(d) - d - 1 with d = reference - policy: an unbiased, never negative estimate of KL(policy ||
    reference).

    Schulman, "Approximating KL divergence" (2020), estimator k3.
    """
    difference_L = logp_reference_L - logp_L
    return torch.expm1(difference_L) - difference_L


def value_loss(value_K: Tensor, before_K: Tensor, target_K: Tensor, clip: float) -> Tensor:
    """max((V - target)^2, (V' - target)^2) / 2 with V' = before + clamp(V - before, -clip, clip); shape (K,).

    The clipped value loss of PPO's reference implementation; `clip` 0 leaves the plain square.
    """
    plain_K = (value_K - target_K) ** 2
    if clip:
        bounded_K = before_K + (value_K - before_K).clamp(-clip, clip)
        plain_K = torch.maximum(plain_K, (bounded_K - target_K) ** 2)
    return 0.5 * plain_K


def _surrogate(objective: Objective, labels: Labels, logp_L: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(loss, clipped below, clipped above) of each label, without importance."""
    clipped_L = torch.zeros_like(logp_L, dtype=torch.bool)
    credit_L, low, high = labels.credit_L, objective.clip_low, objective.clip_high
    match objective.surrogate:
        case "policy_gradient":
            loss_L = policy_gradient(logp_L, credit_L)
        case "ppo_clip":
            loss_L, clipped_L = ppo_clip(logp_L, labels.logp_old_L, credit_L, low, high, objective.clip_dual)
        case "cispo":
            loss_L, clipped_L = cispo(logp_L, labels.logp_old_L, credit_L, low, high)
        case "gspo":
            assert labels.log_ratio_L is not None
            loss_L, clipped_L = gspo(logp_L, labels.log_ratio_L, credit_L, low, high)
        case "nll":
            loss_L = nll(logp_L, credit_L)
        case "dpo":
            assert labels.slope_L is not None and labels.share_L is not None
            loss_L = labels.share_L + labels.slope_L * (logp_L - logp_L.detach())
    log_ratio_L = logp_L.detach() - labels.logp_old_L if labels.log_ratio_L is None else labels.log_ratio_L
    below_L = clipped_L & (log_ratio_L < 0)
    return loss_L, below_L, clipped_L & ~below_L


def objective_loss(objective: Objective, labels: Labels, logp_L: Tensor, entropy_L: Tensor | None = None) -> Terms:
    """`sum_l weight_l * (importance_l * surrogate_l + kl * k3_l - entropy * H_l)` over labels that are not masked.

    `entropy_L` is needed when `objective.entropy` is not 0, `labels.logp_reference_L` when `objective.kl` is
    not 0. The importance weight multiplies the surrogate only, and never `nll` or `dpo`.
    """
    none_L = torch.zeros_like(logp_L)
    capped_L = masked_L = torch.zeros_like(logp_L, dtype=torch.bool)
    loss_L, low_L, high_L = _surrogate(objective, labels, logp_L)
    if objective.surrogate not in ("nll", "dpo") and objective.old_logprobs == "recomputed":
        importance_L, capped_L, masked_L = importance_weight(
            labels.logp_old_L,
            labels.logp_sampler_L,
            objective.importance_cap,
            objective.importance_mask,
            labels.log_importance_L,
        )
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
        loss=(torch.where(masked_L, none_L, labels.weight_L) * loss_L).sum(),
        clipped_low_L=low_L & ~masked_L,
        clipped_high_L=high_L & ~masked_L,
        capped_L=capped_L & ~masked_L,
        masked_L=masked_L,
        kl_L=kl_L.detach(),
        entropy_L=none_L if entropy_L is None else entropy_L.detach(),
    )

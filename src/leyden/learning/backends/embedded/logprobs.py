"""Log-probs and entropies of labels from hidden states, without ever holding float32 logits of all positions.

Hidden states are gathered first, so prompt tokens never meet the output head. Logits are made for a block of the
vocabulary (or, behind a head that is not a plain linear layer, for a block of positions), reduced, dropped, and
made again in the backward: memory is M x block whatever V is, plus at most KEEP_BYTES. Logits are divided by the
temperature and reduced in at least float32. The head's weight gradient is written once, block by block.

    M distinct (position, temperature) pairs   L labels, each on one of M
    E hidden size   V vocabulary   W a block of it
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from leyden.base.records import FloatArray
from leyden.learning.backends.embedded.layouts import Index
from leyden.learning.backends.embedded.precision import LowLinear, gradient_of

BLOCK_BYTES = 16 * 2**20
"""Size of one float32 block of logits; about three of this size are alive at once. Above 32 MiB the C library gives
each back to the system, and the next costs a page fault per 4 KiB."""


KEEP_BYTES = 64 * 2**20
"""Logits of one pass up to this size, in the type of the computation, are kept for the backward instead of made
again: for a few hundred labels that is a quarter of the head's work."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Positions:
    """Which hidden states are needed, and which of them each label belongs to."""

    source_M: Tensor
    """Flat index of the token in the (B, T) input, ascending."""
    temperature_M: Tensor | None
    """Of the softmax; None when it is 1 everywhere, which saves a pass over the logits."""
    row_L: Tensor
    """Index into M of each label; several labels may share one."""
    token_L: Tensor
    """Token id of each label."""


def plan_positions(
    source_L: Index, temperature_L: FloatArray, token_L: Index, device: torch.device, dtype: torch.dtype
) -> Positions:
    """Merge labels with the same source and temperature: a boundary token has one row and several labels."""
    pairs = np.stack([source_L.astype(np.float64), temperature_L.astype(np.float64)], 1)
    unique, row_L = np.unique(pairs, axis=0, return_inverse=True)
    return Positions(
        source_M=torch.from_numpy(unique[:, 0].astype(np.int64)).to(device),
        temperature_M=None if (unique[:, 1] == 1).all() else torch.from_numpy(unique[:, 1]).to(device, dtype),
        row_L=torch.from_numpy(row_L.reshape(-1).astype(np.int64)).to(device),
        token_L=torch.from_numpy(token_L.astype(np.int64)).to(device),
    )


def label_logprobs(
    hidden_BTE: Tensor,
    head: nn.Module,
    positions: Positions,
    *,
    entropy: bool,
    block_bytes: int = BLOCK_BYTES,
) -> tuple[Tensor, Tensor | None]:
    """(logp_L, entropy_L or None) in float32, or float64 if the hidden states are. Differentiable in both."""
    hidden_ME = hidden_BTE.flatten(0, 1).index_select(0, positions.source_M)
    num_logits = block_bytes // 4
    if type(head) in (nn.Linear, LowLinear) and head.bias is None:
        assert isinstance(head, nn.Linear)
        low_VE = head.low_weight() if isinstance(head, LowLinear) else head.weight
        block = max(64, num_logits // max(1, len(positions.source_M)))
        logp_L, entropy_M = _VocabularyBlocks.apply(hidden_ME, head.weight, low_VE, positions, entropy, block)
    else:
        rows = max(1, num_logits // _vocabulary(head))
        logp_L, entropy_M = _position_blocks(hidden_ME, head, positions, entropy, rows)
    return logp_L, entropy_M.index_select(0, positions.row_L) if entropy else None


def _vocabulary(head: nn.Module) -> int:
    size = getattr(head, "out_features", None)
    assert isinstance(size, int), f"output head {type(head).__name__} does not say how many logits it has"
    return size


def _wide(x: Tensor) -> Tensor:
    """At least float32: probabilities of 50 000 tokens do not add up in bfloat16."""
    return x if x.dtype == torch.float64 else x.float()


def _position_blocks(
    hidden_ME: Tensor, head: nn.Module, positions: Positions, entropy: bool, rows: int
) -> tuple[Tensor, Tensor]:
    """The same for any head, a block of positions at a time; returns (logp_L, entropy_M)."""
    # Labels in the order of their rows, so that each block of rows has a run of them.
    by_row = torch.argsort(positions.row_L, stable=True)
    row_L, token_L = positions.row_L[by_row], positions.token_L[by_row]
    starts = torch.arange(0, len(hidden_ME), rows, device=row_L.device)
    cuts = torch.searchsorted(row_L, torch.cat([starts, starts.new_tensor([len(hidden_ME)])])).tolist()
    logps, entropies = [], []
    for i, start in enumerate(starts.tolist()):
        mine = slice(cuts[i], cuts[i + 1])
        logp, entropy_M = checkpoint(
            _one_position_block,
            hidden_ME[start : start + rows],
            head,
            None if positions.temperature_M is None else positions.temperature_M[start : start + rows],
            row_L[mine] - start,
            token_L[mine],
            entropy,
            use_reentrant=False,
            preserve_rng_state=False,
        )
        logps.append(logp)
        entropies.append(entropy_M)
    logp_sorted = torch.cat(logps)
    return torch.empty_like(logp_sorted).index_copy(0, by_row, logp_sorted), torch.cat(entropies)


def _one_position_block(
    hidden_ME: Tensor,
    head: nn.Module,
    temperature_M: Tensor | None,
    row_L: Tensor,
    token_L: Tensor,
    entropy: bool,
) -> tuple[Tensor, Tensor]:
    logits_MV = _wide(head(hidden_ME))
    log_p_MV = torch.log_softmax(logits_MV if temperature_M is None else logits_MV / temperature_M[:, None], -1)
    entropy_M = -(log_p_MV.exp() * log_p_MV).sum(-1) if entropy else log_p_MV[:, 0] * 0
    return log_p_MV[row_L, token_L], entropy_M


class _VocabularyBlocks(torch.autograd.Function):
    """Linear head, temperature and log-softmax, a block of the vocabulary at a time.

    With z = logits / temperature, p = softmax(z): d logp(v) / d z = onehot(v) - p and d H / d z = -p * (log p
    + H). `low_VE` is the weight in the type of the computation, `weight_VE` its master.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden_ME: Tensor,
        weight_VE: Tensor,
        low_VE: Tensor,
        positions: Positions,
        entropy: bool,
        block: int,
    ) -> tuple[Tensor, Tensor]:
        low_ME = hidden_ME.to(low_VE.dtype)
        wide = torch.promote_types(low_VE.dtype, torch.float32)
        M = len(low_ME)
        highest_M = torch.full((M,), float("-inf"), dtype=wide, device=low_ME.device)
        mass_M = torch.zeros_like(highest_M)
        weighted_M = torch.zeros_like(highest_M)
        label_L = torch.zeros(len(positions.token_L), dtype=wide, device=low_ME.device)
        keep = M * len(low_VE) * low_VE.element_size() <= KEEP_BYTES
        kept: list[Tensor] = []
        for start in range(0, len(low_VE), block):
            logits_MW = nn.functional.linear(low_ME, low_VE[start : start + block])
            if keep:
                kept.append(logits_MW)
            z_MW = _scaled(logits_MW, positions)
            _pick(label_L, z_MW, positions, start)
            new_M = torch.maximum(highest_M, z_MW.amax(1))
            keep_M = torch.exp(highest_M - new_M)
            e_MW = (z_MW - new_M[:, None]).exp_()
            mass_M = mass_M * keep_M + e_MW.sum(1)
            if entropy:
                weighted_M = weighted_M * keep_M + e_MW.mul_(z_MW).sum(1)
            highest_M = new_M
        log_z_M = highest_M + mass_M.log()
        entropy_M = log_z_M - weighted_M / mass_M if entropy else torch.zeros_like(log_z_M)
        ctx.save_for_backward(low_ME, low_VE, log_z_M, entropy_M, *kept)
        ctx.positions, ctx.entropy, ctx.block = positions, entropy, block
        ctx.hidden_dtype, ctx.weight_VE = hidden_ME.dtype, weight_VE
        return label_L - log_z_M[positions.row_L], entropy_M

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        low_ME, low_VE, log_z_M, entropy_M, *kept = ctx.saved_tensors
        positions: Positions = ctx.positions
        grad_logp_L, grad_entropy_M = grads
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        total_M = torch.zeros_like(log_z_M).index_add_(0, positions.row_L, grad_logp_L)
        weight_VE: Tensor = ctx.weight_VE
        grad_VE, is_begun = gradient_of(weight_VE) if needs_weight else (weight_VE, False)
        grad_ME = torch.zeros(low_ME.shape, dtype=log_z_M.dtype, device=low_ME.device)
        for start in range(0, len(low_VE), ctx.block):
            low_WE = low_VE[start : start + ctx.block]
            logits_MW = kept[start // ctx.block] if kept else nn.functional.linear(low_ME, low_WE)
            log_p_MW = _scaled(logits_MW, positions).sub_(log_z_M[:, None])
            p_MW = log_p_MW.exp()
            if ctx.entropy:
                # -p * (total + grad_H * (log p + H))
                factor_MW = log_p_MW.add_(entropy_M[:, None]).mul_(grad_entropy_M[:, None]).add_(total_M[:, None])
                d_z_MW = p_MW.mul_(factor_MW).neg_()
            else:
                d_z_MW = p_MW.mul_(-total_M[:, None])
            mine = _in_block(positions, start, len(low_WE))
            d_z_MW.index_put_(
                (positions.row_L[mine], positions.token_L[mine] - start), grad_logp_L[mine], accumulate=True
            )
            if positions.temperature_M is not None:
                d_z_MW.div_(positions.temperature_M[:, None])
            d_logits_MW = d_z_MW.to(low_VE.dtype)
            if needs_hidden:
                grad_ME += d_logits_MW @ low_WE
            if needs_weight:
                d_weight_WE = d_logits_MW.T @ low_ME
                grad_WE = grad_VE[start : start + len(low_WE)]
                grad_WE.add_(d_weight_WE) if is_begun else grad_WE.copy_(d_weight_WE)
        returned_VE = grad_VE if needs_weight and weight_VE.grad is not grad_VE else None
        return grad_ME.to(ctx.hidden_dtype) if needs_hidden else None, returned_VE, None, None, None, None


def _scaled(logits_MW: Tensor, positions: Positions) -> Tensor:
    """Logits by temperature in a wide type, always a new tensor."""
    temperature_M = positions.temperature_M
    if temperature_M is not None:
        return _wide(logits_MW) / temperature_M[:, None]
    return logits_MW.to(torch.promote_types(logits_MW.dtype, torch.float32), copy=True)


def _in_block(positions: Positions, start: int, size: int) -> Tensor:
    return torch.nonzero((positions.token_L >= start) & (positions.token_L < start + size)).squeeze(1)


def _pick(label_L: Tensor, z_MW: Tensor, positions: Positions, start: int) -> None:
    """Put the logits of the labels whose token lies in this block into `label_L`."""
    mine = _in_block(positions, start, z_MW.shape[1])
    label_L[mine] = z_MW[positions.row_L[mine], positions.token_L[mine] - start]

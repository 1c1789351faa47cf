"""One token per row from a row of logits, and the log-probability it was drawn with.

A row's token depends on its own logits, parameters and uniform number only: not on who else is in the batch.
The log-probability is that of the distribution drawn from: after temperature, top_k and top_p, in float32. A
greedy row (temperature 0) takes the arg max and reports the log-probability under temperature 1 without any
cut.

    B rows   V vocabulary   N blocks of W tokens
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

_BLOCK = 128


@dataclass(frozen=True, slots=True)
class Draw:
    """How one row is drawn."""

    temperature: float
    """0 is greedy."""
    top_p: float
    """The smallest set of most probable tokens that reaches this; 1 keeps all."""
    top_k: int
    """This many most probable tokens; 0 keeps all."""


def draw(logits_BV: Tensor, rows: Sequence[Draw], uniforms: Sequence[float]) -> tuple[list[int], list[float]]:
    """(token, log-probability) of each row by inversion of the cumulative distribution at `uniforms` in [0,
    1)."""
    logits_BV = logits_BV.float()
    temperatures = [row.temperature or 1.0 for row in rows]
    if any(t != 1.0 for t in temperatures):
        logits_BV = logits_BV / torch.tensor(temperatures, device=logits_BV.device)[:, None]
    cut = [b for b, row in enumerate(rows) if row.temperature > 0 and (row.top_p < 1 or row.top_k > 0)]
    if cut:
        logits_BV = logits_BV.clone()
        for b in cut:
            logits_BV[b] = _cut(logits_BV[b], rows[b])
    p_BV = logits_BV.softmax(-1)
    greedy = [row.temperature == 0 for row in rows]
    if all(greedy):
        token_B = logits_BV.argmax(-1)
    else:
        token_B = _invert(p_BV, uniforms)
        if any(greedy):
            token_B = torch.where(torch.tensor(greedy, device=token_B.device), logits_BV.argmax(-1), token_B)
    # A token that was drawn has a probability far above the smallest float32, so its logarithm is as exact as that of
    # a log-softmax, which would be one more pass over the vocabulary.
    logp_B = p_BV.gather(-1, token_B[:, None])[:, 0].log()
    return token_B.tolist(), logp_B.tolist()


def _invert(p_BV: Tensor, uniforms: Sequence[float]) -> Tensor:
    """The first token whose cumulative probability exceeds the uniform number times the total."""
    # In two levels, because a running sum over a whole vocabulary is serial: it took 5 % of a decode step of
    # 32 rows of 49152. Float64 in both: in float32 the tail would fall below the spacing of numbers near 1. The sum of
    # a block may stay float32, for it moves its borders by 1e-7 of itself only; in float64 it took 8 ms of 64 rows.
    B, V = p_BV.shape
    p_BNW = (nn.functional.pad(p_BV, (0, -V % _BLOCK)) if V % _BLOCK else p_BV).view(B, -1, _BLOCK)
    cumulative_BN = p_BNW.sum(-1).cumsum(-1, dtype=torch.float64)
    total_B1 = cumulative_BN[:, -1:]
    target_B1 = torch.tensor(uniforms, dtype=torch.float64, device=p_BV.device)[:, None] * total_B1
    block_B1 = torch.searchsorted(cumulative_BN, _below(target_B1, total_B1), right=True)
    inside_BW = p_BNW.gather(1, block_B1[:, :, None].expand(-1, -1, _BLOCK))[:, 0].cumsum(-1, dtype=torch.float64)
    before_B1 = nn.functional.pad(cumulative_BN, (1, 0)).gather(-1, block_B1)
    rest_B1 = _below(target_B1 - before_B1, inside_BW[:, -1:])
    return (block_B1 * _BLOCK + torch.searchsorted(inside_BW, rest_B1, right=True))[:, 0]


def _below(target_B1: Tensor, total_B1: Tensor) -> Tensor:
    """`target`, but strictly below the total, so that what is found has a probability above 0."""
    return torch.minimum(target_B1, torch.nextafter(total_B1, torch.zeros_like(total_B1)))


def _cut(logits_V: Tensor, row: Draw) -> Tensor:
    """Minus infinity wherever top_k, then top_p drop a token."""
    ordered_V, order_V = logits_V.sort(descending=True, stable=True)
    keep_V = torch.ones_like(ordered_V, dtype=torch.bool)
    if row.top_k > 0:
        keep_V[row.top_k :] = False
        ordered_V = ordered_V.masked_fill(~keep_V, float("-inf"))
    if row.top_p < 1:
        p_V = ordered_V.softmax(-1)
        # A token stays while the mass before it is below top_p, so the first always stays.
        keep_V &= (p_V.cumsum(-1) - p_V) < row.top_p
    out_V = torch.full_like(logits_V, float("-inf"))
    kept_V = order_V[keep_V]
    out_V[kept_V] = logits_V[kept_V]
    return out_V

"""Attention over a forest: whatever computes the fewest pairs of a query and a key.

Below a size a dense mask, above it blocks of queries with the keys that they see, on CUDA FlexAttention: no table grows
with the square of a large tree. The tokens of a pass may stand below a path whose keys and values come first among the
keys (layout `depth_first`), and a layer may have a window: a query sees an ancestor iff it is fewer than `window`
positions away. Positions are depths.

    B rows (of the same shape)   H query heads   K key-value heads, H = K * groups   D head size
    U tokens of the tree   P tokens of the path above it   Q a block of query rows   J the keys that it can see
"""

import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from leyden.learning.backends.embedded.attention import AttentionKernel
from leyden.learning.backends.embedded.layouts import Index, Tree

DENSE_LIMIT = 2048
"""Largest tree with a dense mask: 8 MiB in bfloat16, shared by all layers. Above it no table grows with the square
of U."""

BLOCK_ROWS = 384
"""Most query rows of a block. Without a branch it has two thirds of them: with three heads together that fills
`FULL_ROWS`, and a chain wastes at most half a block per key."""

FULL_ROWS = 768
"""From so many query rows on, the CPU's kernel multiplies blocks of 256 rows, below that of 64 or 32: its backward then
takes half the time. Heads that share keys are therefore taken together as rows until they are enough."""


def tree_kernel(
    tree: Tree, window: int | None, device: torch.device, dense_limit: int = DENSE_LIMIT
) -> AttentionKernel:
    """The kernel of a tree for layers with this window."""
    U = len(tree.end_U)
    if dense_limit < U + tree.num_above and has_flex(device):
        return _flex_kernel(tree, window, device)
    blocks = plan_blocks(tree, device, BLOCK_ROWS, window)
    if _uses_blocks(tree, sum(block.num_pairs for block in blocks), dense_limit):
        return _blocked_kernel(blocks)
    return _dense_kernel(tree, window, device)


def num_pairs(tree: Tree, dense_limit: int = DENSE_LIMIT) -> int:
    """Pairs of a query and a key that a CPU computes without a window."""
    num = sum(block.num_pairs for block in plan_blocks(tree, torch.device("cpu"), BLOCK_ROWS))
    return num if _uses_blocks(tree, num, dense_limit) else len(tree.end_U) * (len(tree.end_U) + tree.num_above)


def _uses_blocks(tree: Tree, num_block_pairs: int, dense_limit: int) -> bool:
    """Blocks must save a fifth to pay for their calls; a large dense mask is never made."""
    U, P = len(tree.end_U), tree.num_above
    return dense_limit**2 < U * (U + P) or num_block_pairs * 5 < U * (U + P) * 4


def has_flex(device: torch.device) -> bool:
    """Whether FlexAttention can be compiled for `device`: CUDA of capability 8.0 or later, with Triton."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < (8, 0):
        return False
    return all(importlib.util.find_spec(name) for name in ("triton", "torch.nn.attention.flex_attention"))


def depths(tree: Tree) -> Index:
    """Position of each key, those of the path above first; shape (P + U,)."""
    end = _ends(tree)
    size = len(end)
    starts = np.bincount(np.arange(size), minlength=size + 1) - np.bincount(end, minlength=size + 1)
    found: Index = np.cumsum(starts)[:size] - 1  # intervals open at a token, without its own
    return found


def _ends(tree: Tree) -> Index:
    """end of each key among keys, those of the path above first; they are seen by every query."""
    P = tree.num_above
    return np.concatenate([np.full(P, P + len(tree.end_U), np.int64), tree.end_U + P])


def tree_mask(tree: Tree, window: int | None = None) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Who sees whom, (U, P + U): row q, column k."""
    end, P = _ends(tree), tree.num_above
    at = np.arange(len(end))
    seen: np.ndarray[Any, np.dtype[np.bool_]] = (at[None] <= at[P:, None]) & (at[P:, None] < end[None])
    if window is not None:
        depth = depths(tree)
        seen &= depth[P:, None] - depth[None] < window
    return seen


def folds_of(q: Tensor, k: Tensor) -> int:
    """Heads that are taken together as rows: as few that share keys as fill `FULL_ROWS`; 1 on other devices."""
    groups = q.shape[1] // k.shape[1]
    if q.device.type != "cpu":
        return 1
    return next(n for n in range(1, groups + 1) if groups % n == 0 and (n * q.shape[2] >= FULL_ROWS or n == groups))


def _fold(x: Tensor, folds: int) -> Tensor:
    """(B, H, Q, D) -> (B, H / folds, folds * Q, D): heads one after another."""
    B, H, Q, D = x.shape
    return x.reshape(B, H // folds, folds * Q, D) if folds > 1 else x


def _dense_kernel(tree: Tree, window: int | None, device: torch.device) -> AttentionKernel:
    allowed = torch.from_numpy(tree_mask(tree, window)).to(device)

    @lru_cache(maxsize=1)
    def additive(dtype: torch.dtype, folds: int) -> Tensor:
        # A boolean mask is turned into this by the CPU kernel in each layer, forward and backward.
        zeros = torch.zeros(allowed.shape, dtype=dtype, device=device)
        return zeros.masked_fill_(~allowed, float("-inf")).repeat(folds, 1)

    def kernel(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, scaling: float, window: int | None = None) -> Tensor:
        folds = folds_of(q, k)
        out = scaled_dot_product_attention(
            _fold(q, folds), k, v, attn_mask=additive(q.dtype, folds), scale=scaling, enable_gqa=True
        )
        return out.reshape(q.shape)

    return kernel


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """Query rows [start, stop) of a tree and every key that one of them sees."""

    start: int
    stop: int
    key_J: Tensor
    """Indices of the keys, ascending."""
    end_J: Tensor
    """One past the last key index of the subtree of each."""
    num_above: int
    """P: query row 0 is key P."""
    far_Q: Tensor | None = None
    """Largest depth that is out of the window of each row; None without a window."""
    depth_J: Tensor | None = None
    """Depth of each key; None without a window."""

    @property
    def num_pairs(self) -> int:
        """Pairs of a query and a key that are computed."""
        return (self.stop - self.start) * len(self.key_J)

    def bias(self, dtype: torch.dtype, folds: int) -> Tensor:
        """Additive mask (folds * Q, J)."""
        P = self.num_above
        row_Q = torch.arange(self.start + P, self.stop + P, device=self.key_J.device)[:, None]
        hidden_QJ = (self.key_J > row_Q) | (row_Q >= self.end_J)
        if self.far_Q is not None and self.depth_J is not None:
            hidden_QJ |= self.depth_J <= self.far_Q[:, None]
        zeros = torch.zeros(hidden_QJ.shape, dtype=dtype, device=row_Q.device)
        return zeros.masked_fill_(hidden_QJ, float("-inf")).repeat(folds, 1)


def plan_blocks(tree: Tree, device: torch.device, rows: int = BLOCK_ROWS, window: int | None = None) -> list[Block]:
    """Blocks of at most `rows` query rows, each with the keys in whose subtrees it reaches.

    From two thirds of that size on a block ends where the tree branches nearest to a root, so that it rarely reaches
    into two groups, or at once.
    """
    P, U = tree.num_above, len(tree.end_U)
    end, depth = _ends(tree), depths(tree)
    at = np.arange(P + U)
    branches_U = np.diff(depth, prepend=-1)[P:] <= 0
    blocks = []
    start = 0
    while start < U:
        least, stop = start + max(1, rows * 2 // 3), min(start + rows, U)
        cuts = np.arange(least, stop + 1)
        cuts = cuts[branches_U[cuts]] if stop < U else cuts[:0]
        if stop < U:
            stop = least
        if len(cuts):
            stop = int(cuts[::-1][np.argmin(depth[P + cuts[::-1]])])
        mine = slice(P + start, P + stop)
        seen = end[: P + stop] > P + start
        if window is not None:
            seen &= depth[: P + stop] > depth[mine].min() - window
        key_J = at[: P + stop][seen]
        blocks.append(
            Block(
                start,
                stop,
                torch.from_numpy(key_J).to(device),
                torch.from_numpy(end[key_J]).to(device),
                P,
                None if window is None else torch.from_numpy(depth[mine] - window).to(device),
                None if window is None else torch.from_numpy(depth[key_J]).to(device),
            )
        )
        start = stop
    return blocks


def _blocked_kernel(blocks: list[Block]) -> AttentionKernel:
    small = sum(block.num_pairs for block in blocks) <= DENSE_LIMIT**2
    kept: dict[tuple[torch.dtype, tuple[int, ...]], list[Tensor]] = {}

    def biases(dtype: torch.dtype, folds: tuple[int, ...]) -> Iterator[Tensor]:
        """Masks of the blocks: kept while they are no larger than a dense one may be, else made for each layer."""
        pairs = zip(blocks, folds, strict=True)
        if not small:
            return (block.bias(dtype, num) for block, num in pairs)
        if (dtype, folds) not in kept:
            kept[dtype, folds] = [block.bias(dtype, num) for block, num in pairs]
        return iter(kept[dtype, folds])

    def kernel(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, scaling: float, window: int | None = None) -> Tensor:
        out: Tensor = _BlockedAttention.apply(q, k, v, blocks, biases, scaling)  # type: ignore[no-untyped-call]
        return out

    return kernel


class _BlockedAttention(torch.autograd.Function):
    """Attention block by block; gathered keys live for one block only, in the forward and in the backward."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        blocks: list[Block],
        biases: Callable[[torch.dtype, tuple[int, ...]], Iterator[Tensor]],
        scaling: float,
    ) -> Tensor:
        outs, log_sums = [], []
        folds = tuple(folds_of(q[:, :, block.start : block.stop], k) for block in blocks)
        for block, bias, num in zip(blocks, biases(q.dtype, folds), folds, strict=True):
            out, log_sum = _forward_block(*_gather(block, num, q, k, v), bias, scaling)
            outs.append(out)
            log_sums.append(log_sum)
        ctx.save_for_backward(q, k, v, *outs, *log_sums)
        ctx.blocks, ctx.biases, ctx.scaling, ctx.folds = blocks, biases, scaling, folds
        shape = (*q.shape[:2], -1, q.shape[3])
        return torch.cat([out.reshape(shape) for out in outs], 2)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, *rest = ctx.saved_tensors
        num = len(ctx.blocks)
        grad_q = torch.empty_like(q)
        grad_k, grad_v = torch.zeros_like(k), torch.zeros_like(v)
        parts = zip(ctx.blocks, ctx.folds, ctx.biases(q.dtype, ctx.folds), rest[:num], rest[num:], strict=True)
        for block, folds, bias, out, log_sum in parts:
            rows = slice(block.start, block.stop)
            grad = _fold(grads[0][:, :, rows], folds)
            gathered = _gather(block, folds, q, k, v)
            d_q, d_k, d_v = _backward_block(grad, *gathered, bias, ctx.scaling, out, log_sum)
            grad_q[:, :, rows] = d_q.reshape(grad_q[:, :, rows].shape)
            grad_k.index_add_(2, block.key_J, d_k)
            grad_v.index_add_(2, block.key_J, d_v)
        return grad_q, grad_k, grad_v, None, None, None


def _gather(block: Block, folds: int, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    keys, values = k.index_select(2, block.key_J), v.index_select(2, block.key_J)
    return _fold(q[:, :, block.start : block.stop], folds), keys, values


# What scaled_dot_product_attention runs on a CPU. Called by name because only so the backward can use what the
# forward kept; where a torch does not have it, the public function is used and the forward is run again.
_flash = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu", None)
_flash_backward = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu_backward", None)


def _has_flash(q: Tensor) -> bool:
    return q.device.type == "cpu" and _flash is not None and _flash_backward is not None


def _forward_block(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, scaling: float) -> tuple[Tensor, Tensor]:
    """(out_BHQD, what the backward needs besides it)."""
    if _has_flash(q):
        out, log_sum = _flash(q, k, v, 0.0, False, attn_mask=bias[None, None], scale=scaling)  # type: ignore[misc]
        return out, log_sum
    out = scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=scaling, enable_gqa=True)
    return out, out.new_empty(0)


def _backward_block(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor, scaling: float, out: Tensor, log_sum: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v."""
    if _has_flash(q):
        flash = _flash_backward(  # type: ignore[misc]
            grad, q, k, v, out, log_sum, 0.0, False, attn_mask=bias[None, None], scale=scaling
        )
        return flash[0], flash[1], flash[2]
    with torch.enable_grad():
        parts = [x.detach().requires_grad_() for x in (q, k, v)]
        again = scaled_dot_product_attention(
            parts[0], parts[1], parts[2], attn_mask=bias, scale=scaling, enable_gqa=True
        )
        d_q, d_k, d_v = torch.autograd.grad(again, parts, grad)
    return d_q, d_k, d_v


def _flex_kernel(tree: Tree, window: int | None, device: torch.device) -> AttentionKernel:
    """FlexAttention, which skips the tiles that no query sees. It is compiled at the first use (some
    seconds)."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    P, U = tree.num_above, len(tree.end_U)
    end = torch.from_numpy(_ends(tree)).to(device)
    depth = torch.from_numpy(depths(tree)).to(device)

    def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        row = query + P
        seen = (key <= row) & (row < end[key])
        return seen if window is None else seen & (depth[row] - depth[key] < window)

    block_mask = create_block_mask(sees, None, None, U, P + U, device=str(device))
    compiled = _compiled(flex_attention)

    def kernel(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, scaling: float, window: int | None = None) -> Tensor:
        out: Tensor = compiled(q, k, v, block_mask=block_mask, scale=scaling, enable_gqa=True)
        return out

    return kernel


@lru_cache(maxsize=1)
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, dynamic=True)

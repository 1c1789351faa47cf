"""The one attention function of the embedded backend, and the kernels of the training layouts.

`attention_scope(kernel)` says how attention is computed inside the `with` block; the model's own masks are
never built. A kernel gets (module, q_BHTD, k_BKTD, v_BKTD, scaling) after the rotary embedding and returns
out_BHTD. The sampler brings a kernel of its own that reads its cache. No kernel set is an assertion: there is
no default.

    B rows   H query heads   K key-value heads, H = K * groups   T columns   D head size
    U tokens of a tree   Q a block of query rows   J the keys that a block can see
"""

import importlib.util
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from leyden.base.errors import ModelUnusable
from leyden.learning.backends.embedded.layouts import Causal, Index, Rule, Segments, Tree

ATTENTION_NAME = "leyden"
"""Name under which transformers finds the function; models are loaded with `attn_implementation` of this
name."""

AttentionKernel = Callable[[nn.Module, Tensor, Tensor, Tensor, float], Tensor]
"""(module, q_BHTD, k_BKTD, v_BKTD, scaling) -> out_BHTD, all of one dtype."""

DENSE_LIMIT = 2048
"""Largest tree with a dense mask: 8 MiB in bfloat16, shared by all layers. Above it no table grows with the square
of U."""

BLOCK_ROWS = 256
"""Query rows of a block: enough for full matrix tiles, and a chain wastes at most half a block per key."""

_kernel: ContextVar[AttentionKernel | None] = ContextVar("leyden_attention_kernel", default=None)

# Extra arguments by which some architectures change what attention computes. Ignoring one would train another
# model than the one that was loaded. A sliding window is not here: `load_model` compares it with max_context.
_CHANGES_ATTENTION = ("softcap", "s_aux", "position_bias", "head_mask")


@contextmanager
def attention_scope(kernel: AttentionKernel) -> Iterator[None]:
    """Attention inside the block, in this thread, is computed by `kernel`."""
    token = _kernel.set(kernel)
    try:
        yield
    finally:
        _kernel.reset(token)


def current_kernel() -> AttentionKernel:
    """The kernel of the scope around the caller; there must be one."""
    kernel = _kernel.get()
    assert kernel is not None, "outside attention_scope"
    return kernel


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """What transformers calls in every attention layer: out_BTHD and no attention weights."""
    kernel = _kernel.get()
    assert kernel is not None, "the model was called outside attention_scope"
    assert attention_mask is None, "a mask was given although the kernel decides who sees whom"
    changed = [name for name in _CHANGES_ATTENTION if kwargs.get(name) is not None]
    if changed:
        raise ModelUnusable(
            f"attention of {type(module).__name__} uses {', '.join(changed)}, which is not supported; "
            "choose a model with plain softmax attention"
        )
    if scaling is None:
        scaling = query.shape[-1] ** -0.5
    # The rotary embedding is float32 under mixed precision and lifts q and k; v keeps the type of the
    # computation.
    out_BHTD = kernel(module, query.to(value.dtype), key.to(value.dtype), value, scaling)
    return out_BHTD.transpose(1, 2), None


AttentionInterface.register(ATTENTION_NAME, _attend)


def kernel_for(rule: Rule, device: torch.device, dense_limit: int = DENSE_LIMIT) -> AttentionKernel:
    """The kernel of a layout; what it prepares is shared by all layers of the pass."""
    match rule:
        case Causal():
            return causal_kernel
        case Segments(bounds):
            return _segments_kernel(bounds)
        case Tree(end_U):
            return _tree_kernel(end_U, device, dense_limit)


def computed_pairs(rule: Rule, shape: tuple[int, ...], dense_limit: int = DENSE_LIMIT) -> int:
    """Pairs of a query and a key that the CPU kernel of a layout computes for ids of shape (B, T)."""
    match rule:
        case Causal():
            rows, columns = shape
            return rows * columns * (columns + 1) // 2
        case Segments(bounds):
            return sum(n * (n + 1) // 2 for n in (end - start for start, end in itertools.pairwise(bounds)))
        case Tree(end_U):
            num_pairs = sum(block.num_pairs for block in plan_blocks(end_U, torch.device("cpu"), BLOCK_ROWS))
            return num_pairs if _uses_blocks(len(end_U), num_pairs, dense_limit) else len(end_U) ** 2


def _tree_kernel(end_U: Index, device: torch.device, dense_limit: int) -> AttentionKernel:
    """Whatever computes fewest pairs of a query and a key."""
    U = len(end_U)
    if dense_limit < U and has_flex(device):
        return _flex_tree_kernel(end_U, device)
    blocks = plan_blocks(end_U, device, BLOCK_ROWS)
    if _uses_blocks(U, sum(block.num_pairs for block in blocks), dense_limit):
        return _blocked_tree_kernel(blocks)
    return _dense_tree_kernel(end_U, device)


def _uses_blocks(num_tokens: int, num_pairs: int, dense_limit: int) -> bool:
    """Blocks must save a third to pay for their calls; a large dense mask is never made."""
    return dense_limit < num_tokens or num_pairs * 3 < num_tokens * num_tokens * 2


def has_flex(device: torch.device) -> bool:
    """Whether FlexAttention can be compiled for `device`: CUDA of capability 8.0 or later, with Triton."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < (8, 0):
        return False
    return all(importlib.util.find_spec(name) for name in ("triton", "torch.nn.attention.flex_attention"))


def causal_kernel(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, scaling: float) -> Tensor:
    """Plain causal attention of rows that start at position 0; a right-padded tail is never seen by real
    tokens."""
    return scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, enable_gqa=True)


def _segments_kernel(bounds: tuple[int, ...]) -> AttentionKernel:
    lengths = [end - start for start, end in itertools.pairwise(bounds)]

    def kernel(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, scaling: float) -> Tensor:
        parts = zip(*(torch.split(x, lengths, 2) for x in (q, k, v)), strict=True)
        return torch.cat([causal_kernel(module, q, k, v, scaling) for q, k, v in parts], 2)

    return kernel


def tree_mask(end_U: Index) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Who sees whom, (U, U): row q, column k."""
    at_U = np.arange(len(end_U))
    mask: np.ndarray[Any, np.dtype[np.bool_]] = (at_U[None] <= at_U[:, None]) & (at_U[:, None] < end_U[None])
    return mask


def _dense_tree_kernel(end_U: Index, device: torch.device) -> AttentionKernel:
    allowed_UU = torch.from_numpy(tree_mask(end_U)).to(device)

    @lru_cache(maxsize=1)
    def additive(dtype: torch.dtype) -> Tensor:
        # A boolean mask is turned into this by the CPU kernel in each layer, forward and backward.
        zeros = torch.zeros(allowed_UU.shape, dtype=dtype, device=device)
        return zeros.masked_fill_(~allowed_UU, float("-inf"))

    def kernel(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, scaling: float) -> Tensor:
        return scaled_dot_product_attention(q, k, v, attn_mask=additive(q.dtype), scale=scaling, enable_gqa=True)

    return kernel


@dataclass(frozen=True, slots=True, eq=False)
class _Block:
    """Query rows [start, stop) of a tree and every key that one of them sees."""

    start: int
    stop: int
    key_J: Tensor
    """Indices of the keys, ascending."""
    end_J: Tensor
    """end_U of those keys."""

    @property
    def num_pairs(self) -> int:
        """Pairs of a query and a key that are computed."""
        return (self.stop - self.start) * len(self.key_J)

    def bias(self, dtype: torch.dtype) -> Tensor:
        """Additive mask (Q, J)."""
        row_Q = torch.arange(self.start, self.stop, device=self.key_J.device)[:, None]
        hidden_QJ = (self.key_J > row_Q) | (row_Q >= self.end_J)
        zeros = torch.zeros(hidden_QJ.shape, dtype=dtype, device=row_Q.device)
        return zeros.masked_fill_(hidden_QJ, float("-inf"))


def plan_blocks(end_U: Index, device: torch.device, rows: int = BLOCK_ROWS) -> list[_Block]:
    """Blocks of at most `rows` query rows, each with the keys in whose subtrees it reaches.

    A block of at least half that size ends where the tree branches nearest to a root, so that it rarely reaches
    into two groups.
    """
    U = len(end_U)
    at_U = np.arange(U)
    changes = np.bincount(at_U, minlength=U + 1) - np.bincount(end_U, minlength=U + 1)
    seen_U = np.cumsum(changes)[:U]  # keys that each token sees, itself included
    branches_U = np.diff(seen_U, prepend=0) <= 0
    blocks = []
    start = 0
    while start < U:
        stop = min(start + rows, U)
        window = at_U[start + max(1, rows // 2) : stop + 1]
        cuts = window[branches_U[window]] if stop < U else window[:0]
        if len(cuts):
            stop = int(cuts[::-1][np.argmin(seen_U[cuts[::-1]])])
        key_J = at_U[:stop][end_U[:stop] > start]
        keys, ends = torch.from_numpy(key_J).to(device), torch.from_numpy(end_U[key_J]).to(device)
        blocks.append(_Block(start, stop, keys, ends))
        start = stop
    return blocks


def _blocked_tree_kernel(blocks: list[_Block]) -> AttentionKernel:
    small = sum(block.num_pairs for block in blocks) <= DENSE_LIMIT**2
    kept: dict[torch.dtype, list[Tensor]] = {}

    def biases(dtype: torch.dtype) -> Iterator[Tensor]:
        """Masks of the blocks: kept while they are no larger than a dense one may be, else made for each layer."""
        if not small:
            return (block.bias(dtype) for block in blocks)
        if dtype not in kept:
            kept[dtype] = [block.bias(dtype) for block in blocks]
        return iter(kept[dtype])

    def kernel(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, scaling: float) -> Tensor:
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
        blocks: list[_Block],
        biases: Callable[[torch.dtype], Iterator[Tensor]],
        scaling: float,
    ) -> Tensor:
        outs, log_sums = [], []
        for block, bias in zip(blocks, biases(q.dtype), strict=True):
            out, log_sum = _forward_block(*_gather(block, q, k, v), bias, scaling)
            outs.append(out)
            log_sums.append(log_sum)
        ctx.save_for_backward(q, k, v, *outs, *log_sums)
        ctx.blocks, ctx.biases, ctx.scaling = blocks, biases, scaling
        return torch.cat(outs, 2)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, *rest = ctx.saved_tensors
        num = len(ctx.blocks)
        grad_q = torch.empty_like(q)
        grad_k, grad_v = torch.zeros_like(k), torch.zeros_like(v)
        parts = zip(ctx.blocks, ctx.biases(q.dtype), rest[:num], rest[num:], strict=True)
        for block, bias, out, log_sum in parts:
            grad = grads[0][:, :, block.start : block.stop]
            gathered = _gather(block, q, k, v)
            d_q, d_k, d_v = _backward_block(grad, *gathered, bias, ctx.scaling, out, log_sum)
            grad_q[:, :, block.start : block.stop] = d_q
            grad_k.index_add_(2, block.key_J, d_k)
            grad_v.index_add_(2, block.key_J, d_v)
        return grad_q, grad_k, grad_v, None, None, None


def _gather(block: _Block, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    keys, values = k.index_select(2, block.key_J), v.index_select(2, block.key_J)
    return q[:, :, block.start : block.stop], keys, values


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


def _flex_tree_kernel(end_U: Index, device: torch.device) -> AttentionKernel:
    """FlexAttention, which skips the tiles that no query sees. It is compiled at the first use (some
    seconds)."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    end = torch.from_numpy(end_U).to(device)

    def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (query < end[key])

    size = len(end_U)
    block_mask = create_block_mask(sees, None, None, size, size, device=str(device))
    compiled = _compiled(flex_attention)

    def kernel(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, scaling: float) -> Tensor:
        out: Tensor = compiled(q, k, v, block_mask=block_mask, scale=scaling, enable_gqa=True)
        return out

    return kernel


@lru_cache(maxsize=1)
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, dynamic=True)

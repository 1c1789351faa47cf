"""The one attention function of the embedded backend, and the kernels of the training layouts.

`attention_scope(kernel)` says how attention is computed inside the `with` block; the model's own masks are
never built. A kernel gets (module, q_BHTD, k_BKTD, v_BKTD, scaling) after the rotary embedding and returns
out_BHTD. The sampler brings a kernel of its own that reads its cache. No kernel set is an assertion: there is
no default.

    B rows   H query heads   K key-value heads, H = K * groups   T columns   D head size
    U tokens of a tree   Q a block of query rows   J the keys that a block can see
"""

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
"""Largest tree with a dense mask: 8 MiB in bfloat16, shared by all layers. Above it, blocks of query rows
save more time than their calls cost, and no table grows with the square of U."""

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
            if len(end_U) <= dense_limit:
                return _dense_tree_kernel(end_U, device)
            if device.type == "cuda":
                return _flex_tree_kernel(end_U, device)
            return _blocked_tree_kernel(end_U, device)


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

    def bias(self, dtype: torch.dtype) -> Tensor:
        """Additive mask (Q, J), made anew for each layer so that no U x U table is ever held."""
        row_Q = torch.arange(self.start, self.stop, device=self.key_J.device)[:, None]
        allowed_QJ = (self.key_J <= row_Q) & (row_Q < self.end_J)
        return torch.zeros(allowed_QJ.shape, dtype=dtype, device=row_Q.device).masked_fill_(~allowed_QJ, float("-inf"))


def plan_blocks(end_U: Index, device: torch.device, rows: int = BLOCK_ROWS) -> list[_Block]:
    """Blocks of `rows` query rows, each with the keys in whose subtrees it reaches."""
    at_U = np.arange(len(end_U))
    blocks = []
    for start in range(0, len(end_U), rows):
        stop = min(start + rows, len(end_U))
        key_J = at_U[:stop][end_U[:stop] > start]
        blocks.append(
            _Block(start, stop, torch.from_numpy(key_J).to(device), torch.from_numpy(end_U[key_J]).to(device))
        )
    return blocks


def _blocked_tree_kernel(end_U: Index, device: torch.device) -> AttentionKernel:
    blocks = plan_blocks(end_U, device, BLOCK_ROWS)

    def kernel(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, scaling: float) -> Tensor:
        out: Tensor = _BlockedAttention.apply(q, k, v, blocks, scaling)  # type: ignore[no-untyped-call]
        return out

    return kernel


class _BlockedAttention(torch.autograd.Function):
    """Attention block by block. The backward recomputes each block: autograd would keep its gathered keys
    alive."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, blocks: list[_Block], scaling: float) -> Tensor:
        ctx.save_for_backward(q, k, v)
        ctx.blocks, ctx.scaling = blocks, scaling
        return torch.cat([_one_block(block, *_gather(block, q, k, v), scaling) for block in blocks], 2)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v = ctx.saved_tensors
        grad_q = torch.empty_like(q)
        grad_k, grad_v = torch.zeros_like(k), torch.zeros_like(v)
        for block in ctx.blocks:
            with torch.enable_grad():
                parts = [x.detach().requires_grad_() for x in _gather(block, q, k, v)]
                out = _one_block(block, parts[0], parts[1], parts[2], ctx.scaling)
                d_q, d_k, d_v = torch.autograd.grad(out, parts, grads[0][:, :, block.start : block.stop])
            grad_q[:, :, block.start : block.stop] = d_q
            grad_k.index_add_(2, block.key_J, d_k)
            grad_v.index_add_(2, block.key_J, d_v)
        return grad_q, grad_k, grad_v, None, None


def _gather(block: _Block, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    keys, values = k.index_select(2, block.key_J), v.index_select(2, block.key_J)
    return q[:, :, block.start : block.stop], keys, values


def _one_block(block: _Block, q: Tensor, k: Tensor, v: Tensor, scaling: float) -> Tensor:
    return scaled_dot_product_attention(q, k, v, attn_mask=block.bias(q.dtype), scale=scaling, enable_gqa=True)


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

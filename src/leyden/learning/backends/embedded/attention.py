"""The one attention function of the embedded backend.

`attention_scope(kernel)` says how attention is computed inside the `with` block; the model's own masks are
never built. A kernel gets (module, q_BHTD, k_BKTD, v_BKTD, scaling, window) after the rotary embedding and returns
out_BHTD; `window` is what the layer itself asks for, None where it sees everything before it. Training layouts have
theirs in `kernels`, the sampler brings one of its own that reads its cache. No kernel set is an assertion: there is
no default.

    B rows   H query heads   K key-value heads, H = K * groups   T columns   D head size
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from leyden.base.errors import ModelUnusable
from leyden.learning.backends.embedded.scope import held

ATTENTION_NAME = "leyden"
"""Name under which transformers finds the function; models are loaded with `attn_implementation` of this
name."""

AttentionKernel = Callable[[nn.Module, Tensor, Tensor, Tensor, float, int | None], Tensor]
"""(module, q_BHTD, k_BKTD, v_BKTD, scaling, window) -> out_BHTD, all of one dtype. A query at position p sees position
k <= p iff p - k < window."""

_kernel: ContextVar[AttentionKernel | None] = ContextVar("leyden_attention_kernel", default=None)

# Extra arguments by which some architectures change what attention computes. Ignoring one would train another
# model than the one that was loaded.
_CHANGES_ATTENTION = ("softcap", "s_aux", "position_bias", "head_mask")


def attention_scope(kernel: AttentionKernel) -> AbstractContextManager[None]:
    """Attention inside the block, in this thread, is computed by `kernel`."""
    return held(_kernel, kernel)


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
    sliding_window: int | None = None,
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
    out_BHTD = kernel(module, query.to(value.dtype), key.to(value.dtype), value, scaling, sliding_window)
    return out_BHTD.transpose(1, 2), None


AttentionInterface.register(ATTENTION_NAME, _attend)


def causal_kernel(
    module: nn.Module, q: Tensor, k: Tensor, v: Tensor, scaling: float, window: int | None = None
) -> Tensor:
    """Plain causal attention of rows that start at position 0; a right-padded tail is never seen by real
    tokens. Where a window is met, a mask of T x T is made for the call: layouts have `kernels` for that."""
    T = q.shape[2]
    if window is None or window >= T:
        return scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, enable_gqa=True)
    seen_TT = torch.ones(T, T, dtype=torch.bool, device=q.device).tril().triu(1 - window)
    return scaled_dot_product_attention(q, k, v, attn_mask=seen_TT, scale=scaling, enable_gqa=True)

"""Decoder layers of the usual shape, computed with `rowwise` while a pass of the trainer runs on a CPU.

Promises: `install` recognises layers by `anatomy`, then compares the hidden states of the whole model. Layers that
differ in any of it stay as they are. The products are made by the layer's own modules, so low-rank updates and biases
are as they were; outside `fused_scope` (the sampler) nothing changes.

Does not: know experts, parallel blocks, partial rotation, norms other than root mean square.

    B rows   T columns   E hidden size   H heads   D head size
"""

from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from leyden.learning.backends.embedded import rowwise
from leyden.learning.backends.embedded.anatomy import Anatomy, anatomy_of
from leyden.learning.backends.embedded.attention import attention_scope, causal_kernel, current_kernel
from leyden.learning.backends.embedded.precision import LOW
from leyden.learning.backends.embedded.scope import held

if TYPE_CHECKING:
    from leyden.learning.backends.embedded.model import LoadedModel

TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-5, LOW: 2e-2}
"""Largest relative difference of hidden states. What is multiplied is the same; sums are made in another order, and in
bfloat16 the norms of heads are rounded once instead of twice. Norms of transformers are float32 inside."""

_active: ContextVar[bool] = ContextVar("leyden_fused", default=False)


def fused_scope() -> AbstractContextManager[None]:
    """Layers prepared by `install` compute as described above inside, in this thread."""
    return held(_active, True)


def is_active() -> bool:
    """Whether the caller is inside `fused_scope`."""
    return _active.get()


class _Fused:
    """Mixed in before the class of a layer."""

    anatomy: Anatomy | None
    """None: it computes as its class does."""
    self_attn: nn.Module
    mlp: nn.Module

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """hidden_states (B, T, E) -> (B, T, E)."""
        turns, about = kwargs.get("position_embeddings"), self.anatomy
        if not _active.get() or turns is None or about is None:
            return super().forward(hidden_states, *args, **kwargs)  # type: ignore[misc]
        dtype = LOW if about.is_low else hidden_states.dtype
        x, low = about.before[0](hidden_states, dtype)
        branch = _attend(self.self_attn, about, low, *turns)
        if about.after:
            branch = about.after[0](branch, dtype)[1]
        x = rowwise.add(x, branch)
        x, low = about.before[1](x, dtype)
        mlp: Any = self.mlp
        branch = mlp.down_proj(rowwise.gated(mlp.gate_proj(low), mlp.up_proj(low), about.gate))
        if about.after:
            branch = about.after[1](branch, dtype)[1]
        return rowwise.add(x, branch)


def _attend(module: Any, about: Anatomy, x: Tensor, cos_BTD: Tensor, sin_BTD: Tensor) -> Tensor:
    shape = (*x.shape[:-1], -1, module.head_dim)
    q, k, v = (part(x).view(shape) for part in (module.q_proj, module.k_proj, module.v_proj))
    if about.heads:
        wide = cos_BTD.dtype
        q, k = about.heads[0](q, wide)[1], about.heads[1](k, wide)[1]
    q, k = (rowwise.rotary(part, cos_BTD, sin_BTD, x.dtype) for part in (q, k))
    q, k, v = (part.transpose(1, 2) for part in (q, k, v))
    out = current_kernel()(module, q, k, v, about.scaling, about.window)
    mixed: Tensor = module.o_proj(out.transpose(1, 2).reshape(*x.shape[:-1], -1))
    return mixed


def install(loaded: "LoadedModel") -> int:
    """Prepare the layers of a model on a CPU; how many could be, which is all of them or none."""
    layers = [m for m in loaded.causal.modules() if isinstance(m, GradientCheckpointingLayer)]
    if loaded.device.type != "cpu" or not layers:
        return 0
    with torch.no_grad():
        plain, seen = _probe(loaded)
        found = [_seen_as(layer, seen, loaded) for layer in layers]
        agrees = all(anatomy is not None for anatomy in found)
        for layer, anatomy in zip(layers, found, strict=True):
            _set(layer, anatomy if agrees else None)
        if agrees:
            try:
                with fused_scope():
                    ours, _ = _probe(loaded)
                agrees = bool((ours - plain).norm() <= TOLERANCE[_dtype(loaded)] * plain.norm())
            except (AttributeError, RuntimeError, TypeError):  # a part that looks like ours and takes other arguments
                agrees = False
    if not agrees:
        for layer in layers:
            _set(layer, None)
    return len(layers) if agrees else 0


def _seen_as(layer: nn.Module, seen: "Seen", loaded: "LoadedModel") -> Anatomy | None:
    asked = seen.get(id(getattr(layer, "self_attn", None)))
    return None if asked is None else anatomy_of(layer, *asked, is_low=loaded.dtype == "bfloat16")


def _set(layer: nn.Module, anatomy: Anatomy | None) -> None:
    # A class once changed stays: `recompute` may hold its bound method.
    if anatomy is not None and not isinstance(layer, _Fused):
        layer.__class__ = type(f"Fused{type(layer).__name__}", (_Fused, type(layer)), {})
    if isinstance(layer, _Fused):
        layer.anatomy = anatomy


def _dtype(loaded: "LoadedModel") -> torch.dtype:
    return LOW if loaded.dtype == "bfloat16" else next(loaded.causal.parameters()).dtype


Seen = dict[int, tuple[float, int | None]]


def _probe(loaded: "LoadedModel") -> tuple[Tensor, Seen]:
    """Hidden states of a few tokens, and (scaling, window) of each attention layer by its id."""
    seen: Seen = {}

    def kernel(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, scaling: float, window: int | None = None) -> Tensor:
        seen[id(module)] = (scaling, window)
        return causal_kernel(module, q, k, v, scaling, window)

    num = 7
    ids_BT = (torch.arange(num)[None] * 5 + 1) % loaded.vocab_size
    with attention_scope(kernel):
        hidden_BTE = loaded.hidden(ids_BT, torch.arange(num)[None] * 3)
    return hidden_BTE.double(), seen

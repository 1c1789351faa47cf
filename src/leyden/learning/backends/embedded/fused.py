"""Decoder layers of the usual shape, computed with `rowwise` while a pass of the trainer runs on a CPU.

Promises: `install` recognises layers by their parts and by what these compute, never by name: norms, activation and
rotation are compared with ours on random numbers, then the hidden states of the whole model. Layers that differ in
any of it stay as they are. The products are made by the layer's own modules, so low-rank updates and biases are as
they were; outside `fused_scope` (the sampler) nothing changes.

Does not: know experts, parallel blocks, partial rotation, norms other than root mean square.

    B rows   T columns   E hidden size   H heads   D head size
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from leyden.learning.backends.embedded import rowwise
from leyden.learning.backends.embedded.attention import attention_scope, causal_kernel, current_kernel
from leyden.learning.backends.embedded.precision import LOW

if TYPE_CHECKING:
    from leyden.learning.backends.embedded.model import LoadedModel

TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-5, LOW: 2e-2}
"""Largest relative difference of hidden states. What is multiplied is the same; sums are made in another order, and in
bfloat16 the norms of heads are rounded once instead of twice. Norms of transformers are float32 inside."""

_active: ContextVar[bool] = ContextVar("leyden_fused", default=False)


@contextmanager
def fused_scope() -> Iterator[None]:
    """Layers prepared by `install` compute as described above inside, in this thread."""
    token = _active.set(True)
    try:
        yield
    finally:
        _active.reset(token)


def is_active() -> bool:
    """Whether the caller is inside `fused_scope`."""
    return _active.get()


@dataclass(frozen=True, slots=True, eq=False)
class Norm:
    """What a root mean square norm multiplies with."""

    module: nn.Module
    offset: float
    """Added to the weight: 1 in Gemma."""
    eps: float

    def __call__(self, x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """(x, its norm)."""
        weight = self.module.weight
        assert isinstance(weight, Tensor)
        return rowwise.norm(x, weight, self.offset, self.eps, dtype)


@dataclass(frozen=True, slots=True, eq=False)
class Anatomy:
    """What was found out about one layer."""

    before: tuple[Norm, Norm]
    """Before attention and before the gated layer."""
    after: tuple[Norm, Norm] | None
    """On what these two give, in Gemma 2 and 3."""
    heads: tuple[Norm, Norm] | None
    """On queries and keys, in Qwen 3 and Gemma 3."""
    gate: str
    """Activation, of `rowwise.GATES`."""
    scaling: float
    window: int | None
    is_low: bool
    """Whether products read bfloat16, and not the type of the residual stream."""


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
        found = [_anatomy(layer, seen, loaded) for layer in layers]
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


def _anatomy(layer: nn.Module, seen: Seen, loaded: "LoadedModel") -> Anatomy | None:
    attention: Any = getattr(layer, "self_attn", None)
    mlp: Any = getattr(layer, "mlp", None)
    if id(attention) not in seen or not _has(attention, "q_proj", "k_proj", "v_proj", "o_proj", "head_dim"):
        return None
    if not _has(mlp, "gate_proj", "up_proj", "down_proj", "act_fn"):
        return None
    names = ["input_layernorm", "post_attention_layernorm"]
    if _has(layer, "pre_feedforward_layernorm", "post_feedforward_layernorm"):
        names = [names[0], "pre_feedforward_layernorm", names[1], "post_feedforward_layernorm"]
    norms = _norms(layer, names)
    heads = _norms(attention, ["q_norm", "k_norm"]) if _has(attention, "q_norm", "k_norm") else ()
    gate = _gate(mlp)
    if norms is None or heads is None or gate is None or any(_width(norm) != attention.head_dim for norm in heads):
        return None
    scaling, window = seen[id(attention)]
    return Anatomy(
        before=(norms[0], norms[1]),
        after=(norms[2], norms[3]) if len(norms) == 4 else None,
        heads=(heads[0], heads[1]) if heads else None,
        gate=gate,
        scaling=scaling,
        window=window,
        is_low=loaded.dtype == "bfloat16",
    )


def _norms(module: nn.Module, names: list[str]) -> tuple[Norm, ...] | None:
    """The norms of these names; None if one of them is not there or is no such norm."""
    found = [_norm(getattr(module, name, None)) for name in names]
    known = tuple(norm for norm in found if norm is not None)
    return known if len(known) == len(names) else None


def _has(module: object, *names: str) -> bool:
    return all(getattr(module, name, None) is not None for name in names)


def _width(norm: Norm) -> int:
    weight = norm.module.weight
    assert isinstance(weight, Tensor)
    return weight.numel()


def _norm(module: nn.Module | None) -> Norm | None:
    """The norm that `module` is, if it computes what one does."""
    weight = getattr(module, "weight", None)
    eps = getattr(module, "variance_epsilon", None) or getattr(module, "eps", None)
    if module is None or not isinstance(weight, nn.Parameter) or weight.ndim != 1 or not isinstance(eps, float):
        return None
    x = torch.linspace(-2.0, 3.0, 4 * len(weight), dtype=weight.dtype).view(4, -1) * 0.1
    theirs = module(x)
    for offset in (0.0, 1.0):
        ours = rowwise.norm(x, weight, offset, eps, x.dtype)[1]
        if ours.shape == theirs.shape and torch.allclose(ours, theirs.to(ours.dtype), rtol=1e-4, atol=1e-5):
            return Norm(module, offset, eps)
    return None


def _gate(mlp: nn.Module) -> str | None:
    """The activation of a gated layer, of those that we know."""
    x = torch.linspace(-4.0, 4.0, 101)
    theirs = mlp.act_fn(x)  # type: ignore[operator]
    for name, (function, _) in rowwise.GATES.items():
        if torch.allclose(function(x), theirs, rtol=1e-5, atol=1e-6):
            return name
    return None

"""The parts of a decoder layer of the usual shape: norm, attention, sum, norm, gated layer, sum.

Promises: parts are recognised by what they compute, never by name: norms and activation are compared with ours on
numbers. What a whole layer computes is not known from that; who uses an anatomy compares hidden states.

Does not: know experts, parallel blocks, norms other than root mean square.

    E features
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from leyden.learning.backends.embedded import rowwise


@dataclass(frozen=True, slots=True, eq=False)
class Norm:
    """What a root mean square norm multiplies with."""

    module: nn.Module
    offset: float
    """Added to the weight: 1 in Gemma."""
    eps: float

    def __call__(self, x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """(x, its norm), for both of which gradients come."""
        weight = self.module.weight
        assert isinstance(weight, Tensor)
        return rowwise.norm(x, weight, self.offset, self.eps, dtype)

    @property
    def scale(self) -> Tensor:
        """What is multiplied with."""
        weight = self.module.weight
        assert isinstance(weight, Tensor)
        return weight + self.offset if self.offset else weight

    def of(self, x: Tensor) -> Tensor:
        """The norm over the last axis in float32, without gradients."""
        out: Tensor = (x * rowwise.reciprocal_rms(x, self.eps)).mul_(self.scale)
        return out


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


def anatomy_of(layer: nn.Module, scaling: float, window: int | None, *, is_low: bool) -> Anatomy | None:
    """What `layer` is made of, if that is all known; `scaling` and `window` are what its attention asked for."""
    attention: Any = getattr(layer, "self_attn", None)
    mlp: Any = getattr(layer, "mlp", None)
    if not _has(attention, "q_proj", "k_proj", "v_proj", "o_proj", "head_dim"):
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
    return Anatomy(
        before=(norms[0], norms[1]),
        after=(norms[2], norms[3]) if len(norms) == 4 else None,
        heads=(heads[0], heads[1]) if heads else None,
        gate=gate,
        scaling=scaling,
        window=window,
        is_low=is_low,
    )


def _norms(module: Any, names: list[str]) -> tuple[Norm, ...] | None:
    """The norms of these names; None if one of them is not there or is no such norm."""
    found = [norm_of(getattr(module, name, None)) for name in names]
    known = tuple(norm for norm in found if norm is not None)
    return known if len(known) == len(names) else None


def _has(module: object, *names: str) -> bool:
    return all(getattr(module, name, None) is not None for name in names)


def _width(norm: Norm) -> int:
    weight = norm.module.weight
    assert isinstance(weight, Tensor)
    return weight.numel()


def norm_of(module: nn.Module | None) -> Norm | None:
    """The norm that `module` is, if it computes what one does."""
    weight = getattr(module, "weight", None)
    eps = getattr(module, "variance_epsilon", None) or getattr(module, "eps", None)
    if module is None or not isinstance(weight, nn.Parameter) or weight.ndim != 1 or not isinstance(eps, float):
        return None
    x = torch.linspace(-2.0, 3.0, 4 * len(weight), dtype=weight.dtype, device=weight.device).view(4, -1) * 0.1
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

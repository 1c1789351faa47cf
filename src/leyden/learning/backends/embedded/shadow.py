"""What the sampler computes with: the modules of the trained model, with linear layers made for decoding.

The parameters stay those of the trained model: the clone shares every parameter object. In float32 nothing
else is needed. In bfloat16 the sampler reads a bfloat16 shadow of the shared parameters: the copies that
`precision` keeps for the trainer, packed once in the order that the CPU's kernels want. `refresh` renews it
after every change of the weights. Norms, embeddings and the residual stream stay float32, as for the trainer,
so that both compute the same numbers. It does not train: no gradient passes.
"""

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from leyden.learning.backends.embedded.precision import LOW, LowLinear, stamp

# oneDNN keeps the weights of AMX and AVX-512 kernels in a blocked order and reorders a plain tensor at every
# call. Packing once takes the layers of a 135M model from 69 to 52 ms at 64 rows (two cores, nothing at 32); the
# results are equal.
_PACKED_BATCH = 32


class _Casts:
    """The last input that was cast: several layers (q, k, v) read the same tensor. One per clone."""

    def __init__(self) -> None:
        self._source: Tensor | None = None
        self._low: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        if self._source is not x or self._low is None:
            # Holding the source keeps its identity from being given to another tensor.
            self._source, self._low = x, x.to(LOW)
        return self._low


class ShadowLinear(nn.Module):
    """A linear layer that computes in bfloat16 with a copy of its source's weight. Input of any float
    type."""

    bias_shadow: Tensor | None

    def __init__(self, source: LowLinear, casts: _Casts) -> None:
        super().__init__()
        self._casts = casts
        # Outside nn.Module's registry: the clone must not own the trained model's modules.
        self.__dict__["source"] = source
        self.in_features = source.in_features
        self.out_features = source.out_features
        self.refresh()

    @property
    def weight(self) -> Tensor:
        """The trained parameter; peft asks for its type."""
        weight: Tensor = self.__dict__["source"].weight
        return weight

    @property
    def bias(self) -> Tensor | None:
        """The trained bias."""
        bias: Tensor | None = self.__dict__["source"].bias
        return bias

    def refresh(self) -> None:
        """Take the weights that the source has now."""
        self.plain: Tensor = self.low_weight()
        self._taken = stamp(self.weight)
        self.bias_shadow = None if self.bias is None else self.bias.detach().to(LOW)
        self._packed: Tensor | None = None

    def low_weight(self) -> Tensor:
        """The bfloat16 copy that the source has now."""
        weight: Tensor = self.__dict__["source"].low_weight()
        return weight

    @property
    def packed(self) -> Tensor | None:
        """The weights in the order that the CPU's kernels want; made when they are first used, because those of a
        joined layer are not."""
        if self._packed is None and packing_works() and self.plain.device.type == "cpu":
            self._packed = _packed(self.plain)
        return self._packed

    def is_stale(self) -> bool:
        """Whether the source has changed since `refresh`."""
        return self._taken != stamp(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        """x (..., in_features) -> (..., out_features) in bfloat16."""
        return _product(self._casts(x), self.packed, self.plain, self.bias_shadow)


class JoinedLinear:
    """Several `ShadowLinear` of one input as one product, which reads the input once; their own packed weights are not
    made for it. (..., in_features) of bfloat16 -> (..., sum of out_features)."""

    def __init__(self, parts: Sequence[ShadowLinear], order: Tensor) -> None:
        """`order`: which output of the parts, one behind the other, comes first, second and so on; the same for all
        that are joined from one base."""
        self._parts, self._order = parts, order
        self.refresh()

    def refresh(self) -> None:
        """Take the weights that the sources have now."""
        lows = [part.low_weight() for part in self._parts]
        self._taken = self._now()
        self._plain, self._packed = _joined(lows, self._order)
        biases = [part.bias for part in self._parts]
        self._bias = None
        if any(bias is not None for bias in biases):
            self._bias = torch.cat(
                [
                    torch.zeros(part.out_features, dtype=LOW, device=lows[0].device)
                    if bias is None
                    else bias.detach().to(LOW)
                    for part, bias in zip(self._parts, biases, strict=True)
                ]
            )[self._order.to(lows[0].device)]

    def is_stale(self) -> bool:
        """Whether a source has changed since `refresh`."""
        return self._taken != self._now()

    def _now(self) -> list[tuple[int, int]]:
        return [stamp(part.weight) for part in self._parts]

    def __call__(self, x: Tensor) -> Tensor:
        return _product(x, self._packed, self._plain, self._bias)


def _product(x: Tensor, packed: Tensor | None, plain: Tensor | None, bias: Tensor | None) -> Tensor:
    if packed is not None:
        # The overload by name: to look it up takes a tenth of a product of one row.
        out: Tensor = torch.ops.mkldnn._linear_pointwise.default(x, packed, bias, "none", [], "")
        return out
    assert plain is not None
    return nn.functional.linear(x, plain, bias)


_all_joined = WeakTensorKeyDictionary()
"""(plain, packed) of joined copies by the first of them, one of the two None: policies with one base share them."""


def _joined(lows: Sequence[Tensor], order: Tensor) -> tuple[Tensor | None, Tensor | None]:
    if lows[0] not in _all_joined:
        whole = torch.cat(list(lows))[order.to(lows[0].device)]
        if packing_works() and whole.device.type == "cpu":
            _all_joined[lows[0]] = (None, torch.ops.mkldnn._reorder_linear_weight(whole, _PACKED_BATCH))
        else:
            _all_joined[lows[0]] = (whole, None)
    found: tuple[Tensor | None, Tensor | None] = _all_joined[lows[0]]
    return found


_all_packed = WeakTensorKeyDictionary()
"""Packed copy of a bfloat16 copy, while both are there: samplers of policies with one base share it."""


def _packed(weight: Tensor) -> Tensor:
    if weight not in _all_packed:
        _all_packed[weight] = torch.ops.mkldnn._reorder_linear_weight(weight, _PACKED_BATCH)
    found: Tensor = _all_packed[weight]
    return found


_packing: bool | None = None


def packing_works() -> bool:
    """Whether this build of torch packs bfloat16 weights and gets the same numbers; tried once."""
    global _packing
    if _packing is None:
        try:
            x, w = torch.randn(3, 32).bfloat16(), torch.randn(48, 32).bfloat16()
            packed = torch.ops.mkldnn._reorder_linear_weight(w, _PACKED_BATCH)
            out = torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "")
            _packing = bool(torch.allclose(out.float(), nn.functional.linear(x, w).float(), atol=0.1, rtol=0.02))
        except (AttributeError, RuntimeError, NotImplementedError):
            # The operators are not part of torch's public interface: without them plain weights are used.
            _packing = False
    return _packing


def shadow_of(model: nn.Module) -> nn.Module:
    """A clone of the module tree that shares all parameters; every `LowLinear` is a `ShadowLinear` in it."""
    return _clone(model, {}, {}, _Casts())


def refresh(shadow: nn.Module) -> None:
    """Renew every bfloat16 copy; call it after each change of the weights, while nothing samples."""
    with torch.no_grad():
        for module in shadow.modules():
            if isinstance(module, ShadowLinear):
                module.refresh()


def stale(shadow: nn.Module) -> int:
    """Layers whose copy was made before the last change of their source."""
    return sum(m.is_stale() for m in shadow.modules() if isinstance(m, ShadowLinear))


def _clone(module: nn.Module, seen: dict[int, nn.Module], configs: dict[int, Any], casts: _Casts) -> nn.Module:
    if id(module) in seen:
        return seen[id(module)]
    twin: nn.Module
    if isinstance(module, LowLinear):
        twin = ShadowLinear(module, casts)
    else:
        twin = copy.copy(module)
        state: dict[str, Any] = twin.__dict__
        # _parameters and _buffers stay the very same dictionaries: an update, or a parameter put in anew, is
        # seen.
        state["_modules"] = {
            name: None if child is None else _clone(child, seen, configs, casts)
            for name, child in module._modules.items()
        }
        config = state.get("config")
        if config is not None:
            # One copy for the whole clone: saving a checkpoint changes the original's attention name for a
            # moment.
            state["config"] = configs.setdefault(id(config), copy.copy(config))
    seen[id(module)] = twin
    twin.training = False
    return twin


def needs_autocast(model: nn.Module) -> bool:
    """Whether products happen outside linear layers (experts stored as one tensor), which autocast has to
    lower."""
    covered = {
        id(p)
        for module in model.modules()
        if isinstance(module, nn.Linear | nn.Embedding)
        for p in module.parameters(recurse=False)
    }
    return any(p.dim() > 1 and id(p) not in covered for p in model.parameters())

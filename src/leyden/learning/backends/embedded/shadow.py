"""What the sampler computes with: the modules of the trained model, with linear layers made for decoding.

The parameters stay those of the trained model: the clone shares every parameter object. In float32 nothing
else is needed. In bfloat16 the sampler reads a bfloat16 shadow of the shared parameters: the copies that
`precision` keeps for the trainer, packed once in the order that the CPU's kernels want. `refresh` renews it
after every change of the weights. Norms, embeddings and the residual stream stay float32, as for the trainer,
so that both compute the same numbers. It does not train: no gradient passes.
"""

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from leyden.learning.backends.embedded.precision import LOW, LowLinear

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

    packed: Tensor | None
    plain: Tensor | None
    bias_shadow: Tensor | None

    def __init__(self, source: LowLinear, casts: _Casts) -> None:
        super().__init__()
        self._casts = casts
        # Outside nn.Module's registry: the clone must not own the trained model's modules.
        self.__dict__["source"] = source
        self.in_features = source.in_features
        self.out_features = source.out_features
        self.packed = self.plain = self.bias_shadow = None
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
        weight = self.__dict__["source"].low_weight()
        self._taken = (self.weight.data_ptr(), self.weight._version)
        self.bias_shadow = None if self.bias is None else self.bias.detach().to(LOW)
        if packing_works() and weight.device.type == "cpu":
            self.packed, self.plain = _packed(weight), None
        else:
            self.packed, self.plain = None, weight

    def is_stale(self) -> bool:
        """Whether the source has changed since `refresh`."""
        return self._taken != (self.weight.data_ptr(), self.weight._version)

    def forward(self, x: Tensor) -> Tensor:
        """x (..., in_features) -> (..., out_features) in bfloat16."""
        x = self._casts(x)
        if self.packed is not None:
            out: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias_shadow, "none", [], "")
            return out
        assert self.plain is not None
        return nn.functional.linear(x, self.plain, self.bias_shadow)


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

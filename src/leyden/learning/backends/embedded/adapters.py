"""Low-rank updates of the layers that `flat_layers` computes.

Promises: what an update adds to a product equals what peft's layers add, up to rounding. Queries, keys and values,
which are one product, have one update. Copies are made by `refresh`, after every change of the weights.

    T tokens of a pass   I inputs   O outputs   r rank
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from leyden.learning.backends.embedded.precision import stamp

FEW_ROWS = 32
"""Up to so many rows an update is computed in float32, above in the type of the layers: two bfloat16 products of a few
rows and a low rank take 60 us, of which hardly anything is arithmetic, in float32 25; from 64 rows on it is the other
way round (a layer of SmolLM2-135M, two cores)."""


def base_of(linear: Any) -> Any:
    """The linear layer below any adapter."""
    return getattr(linear, "base_layer", linear)


def is_known(linear: Any) -> bool:
    """Whether a layer has no adapter, or one plain low-rank update."""
    if not hasattr(linear, "base_layer"):
        return True
    name = _name(linear)
    return (
        list(linear.active_adapters) == [name]
        and not linear.merged
        and not linear.lora_variant
        and type(linear.lora_dropout[name]) is nn.Identity
        and linear.lora_B[name].bias is None
    )


class LowRank:
    """scaling * B A x of a product; several layers of one input stand one below the other."""

    def __init__(self, layers: Sequence[Any], order: Tensor | None, dtype: torch.dtype) -> None:
        """`order`: which output of the layers comes first, second and so on, if not as they are."""
        self._layers, self._order, self._dtype = layers, order, dtype
        self.refresh()

    def refresh(self) -> None:
        """Take the weights that the sources have now."""
        self._taken = self._now()
        downs, ups = [], []
        for layer in self._layers:
            if hasattr(layer, "base_layer"):
                name = _name(layer)
                downs.append(layer.lora_A[name].weight.detach())
                ups.append(layer.lora_B[name].weight.detach() * layer.scaling[name])
            else:
                ups.append(layer.weight.new_zeros(layer.out_features, 0))  # of rank 0, between others
        a_Ir = torch.cat(downs).float().T
        b_Or: Tensor = torch.block_diag(*ups)  # type: ignore[no-untyped-call]
        if self._order is not None:
            b_Or = b_Or[self._order.to(b_Or.device)]
        self._few = (a_Ir, b_Or.float().T)
        self._many = (a_Ir.to(self._dtype).contiguous(), b_Or.T.to(self._dtype).contiguous())

    def is_stale(self) -> bool:
        """Whether a source has changed since `refresh`."""
        return self._taken != self._now()

    def _now(self) -> list[tuple[int, int]]:
        adapted = [layer for layer in self._layers if hasattr(layer, "base_layer")]
        return [stamp(part[_name(layer)].weight) for layer in adapted for part in (layer.lora_A, layer.lora_B)]

    def add_to(self, out_TO: Tensor, x_TI: Tensor) -> None:
        """Add the update of these tokens in place."""
        if len(x_TI) <= FEW_ROWS:
            a_Ir, b_rO = self._few
            out_TO.add_(x_TI.float() @ a_Ir @ b_rO)
        else:
            a_Ir, b_rO = self._many
            out_TO.addmm_(x_TI @ a_Ir, b_rO)


def low_rank(layers: Sequence[Any], order: Tensor | None, dtype: torch.dtype) -> LowRank | None:
    """The update of these layers, if any has one."""
    return LowRank(layers, order, dtype) if any(hasattr(layer, "base_layer") for layer in layers) else None


def _name(linear: Any) -> str:
    """Of the only adapter."""
    (name,) = linear.lora_A
    return str(name)

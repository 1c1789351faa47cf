"""The path of a depth-first walk: keys and values that later passes read, and the gradients that they send back.

Promises: a trunk is computed once, forward and backward. Passes below it see its keys and values as constants; what
their backward finds for them is added up here, in at least float32, and goes through the trunk's own graph once, when
the walk leaves it. Alive are the graphs of the trunks on the path, and of the pass in hand; the output layer of a trunk
is differentiated at once and not kept. Passes of other layouts go through as if there were no path.

Does not: choose passes (`descent`) or losses. One walk at a time; a model on one device.

    B = 1   K key-value heads   P tokens of the path   T tokens of the pass   D head size   E hidden size
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from leyden.learning.backends.embedded.attention import AttentionKernel, attention_scope
from leyden.learning.backends.embedded.kernels import kernel_for
from leyden.learning.backends.embedded.layouts import Pass


@dataclass(slots=True, eq=False)
class _Trunk:
    """A pass that others read; by layer: (keys, values) with their graph, and the sums of their gradients."""

    num_tokens: int
    states: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    grads: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    hidden_BTE: Tensor | None = None
    """What the pass gave, with its graph."""
    leaf_BTE: Tensor | None = None
    """The same without: the loss leaves its gradient here."""

    def receive(self, layer: int, parts: Sequence[Tensor]) -> None:
        """Add the gradients of keys and values that one pass found."""
        if layer not in self.grads:
            # Each of many passes adds a little: sums in bfloat16 would lose it.
            wide = torch.promote_types(parts[0].dtype, torch.float32)
            self.grads[layer] = (parts[0].to(wide, copy=True), parts[1].to(wide, copy=True))
            return
        for total, part in zip(self.grads[layer], parts, strict=True):
            total.add_(part)

    def backward(self) -> None:
        """Send everything that was received through the trunk's own graph."""
        roots: list[Tensor] = []
        grads: list[Tensor] = []
        if self.hidden_BTE is not None and self.leaf_BTE is not None and self.leaf_BTE.grad is not None:
            roots.append(self.hidden_BTE)
            grads.append(self.leaf_BTE.grad)
        for layer, received in self.grads.items():
            for state, grad in zip(self.states[layer], received, strict=True):
                if state.requires_grad:
                    roots.append(state)
                    grads.append(grad.to(state.dtype))
        if roots:
            torch.autograd.backward(roots, grads)


class Path:
    """What the passes of one walk share."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._trunks: list[_Trunk] = []

    @contextmanager
    def scope(self, one: Pass) -> Iterator[None]:
        """The model inside computes the pass; trunks that it is not below are done with before."""
        self.climb(one.level)
        kernel = kernel_for(one.rule, one.ids_BT.shape, self.device)
        trunk = _Trunk(one.num_tokens) if one.is_trunk else None
        if one.level or trunk is not None:
            kernel = _on_path(kernel, list(self._trunks), trunk)
        with attention_scope(kernel):
            yield
        if trunk is not None:
            self._trunks.append(trunk)

    def cut(self, one: Pass, hidden_BTE: Tensor) -> Tensor:
        """What the loss of the pass is made from: of a trunk a leaf, so that its backward can wait."""
        if not one.is_trunk or not hidden_BTE.requires_grad:
            return hidden_BTE
        trunk = self._trunks[-1]
        trunk.hidden_BTE = hidden_BTE
        trunk.leaf_BTE = hidden_BTE.detach().requires_grad_()
        return trunk.leaf_BTE

    def climb(self, level: int) -> None:
        """Leave every trunk from `level` on, the lowest first; their backward runs now."""
        while len(self._trunks) > level:
            self._trunks.pop().backward()
        assert len(self._trunks) == level, "a pass came before the trunk above it"


def _on_path(inner: AttentionKernel, above: Sequence[_Trunk], trunk: _Trunk | None) -> AttentionKernel:
    """`inner` with the keys and values of the path before those of the pass, which `trunk` keeps."""

    def kernel(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, scaling: float, window: int | None = None) -> Tensor:
        layer = module.layer_idx
        assert isinstance(layer, int)
        # Activation checkpointing comes here a second time; the graph is that of the first.
        if trunk is not None and layer not in trunk.states:
            trunk.states[layer] = (k, v)
        if above:
            k, v = _Below.apply(k, v, above, layer)  # type: ignore[no-untyped-call]
        return inner(module, q, k, v, scaling, window)

    return kernel


class _Below(torch.autograd.Function):
    """Keys and values of the path in front of those of a pass; their gradients go to the trunks."""

    @staticmethod
    def forward(ctx: Any, k: Tensor, v: Tensor, above: Sequence[_Trunk], layer: int) -> tuple[Tensor, Tensor]:
        ctx.above, ctx.layer, ctx.num_tokens = above, layer, k.shape[2]
        states = [trunk.states[layer] for trunk in above]
        return torch.cat([*(keys for keys, _ in states), k], 2), torch.cat([*(values for _, values in states), v], 2)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        sizes = [*(trunk.num_tokens for trunk in ctx.above), ctx.num_tokens]
        *keys, grad_k = torch.split(grads[0], sizes, 2)
        *values, grad_v = torch.split(grads[1], sizes, 2)
        for trunk, *parts in zip(ctx.above, keys, values, strict=True):
            trunk.receive(ctx.layer, parts)
        return grad_k, grad_v, None, None

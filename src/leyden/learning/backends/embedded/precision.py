"""Layers that compute in bfloat16 and learn in float32.

`lower(model)` gives every `nn.Linear` a bfloat16 copy of its weight. The float32 parameter stays the master:
gradients arrive there and optimizers and checkpoints see nothing else. Whoever writes to trained parameters
calls `refresh(model)`. Writes that the version counter of the master shows, or an exchange of its storage, are
noticed without it; a fused optimizer and a write through `.data` leave no such trace.

Gradients go straight into the master's `.grad` where that exists: `backward()` then makes no float32 copy of a
gradient, which for a short batch costs as much as the matrix products. For the same reason such a parameter must
not be asked for by `torch.autograd.grad` while it has a `.grad`.

`torch.autocast` would cast every weight anew in each forward pass, and its cache of casts is shared by all
threads of a process: a sampler without gradients could hand its copies to a trainer that needs them.

    I inputs   O outputs   V rows of an embedding   E hidden size
"""

from collections.abc import Iterable
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from leyden.learning.backends.embedded.scope import held

LOW = torch.bfloat16

_exact: ContextVar[bool] = ContextVar("leyden_exact", default=False)


def exact_scope() -> AbstractContextManager[None]:
    """Inside, in this thread, linear layers compute in float32 with the masters: what bfloat16 is measured against.
    No gradient passes."""
    return held(_exact, True)


def is_exact() -> bool:
    """Whether the caller is inside `exact_scope`."""
    return _exact.get()


_spare = WeakTensorKeyDictionary()
"""Memory of the last gradient of a master whose `.grad` is None: the next is written there, not added to zeros."""


def stamp(weight: Tensor) -> tuple[int, int]:
    """Another one after each write to a weight that leaves a trace, see above."""
    return weight.data_ptr(), weight._version


def gradient_of(master: Tensor) -> tuple[Tensor, bool]:
    """(memory for its gradient, whether there is something in it to add to); that of a spare becomes `.grad`."""
    if master.grad is not None:
        return master.grad, True
    if master not in _spare:
        return torch.empty_like(master), False
    spare: Tensor = _spare[master]
    del _spare[master]
    master.grad = spare
    return spare, False


def into_grad(master: Tensor, grad: Tensor) -> Tensor | None:
    """Put a low-precision gradient into `master.grad` in place and return None; where there is no memory for it,
    return it."""
    if master.grad is None and master not in _spare:
        return grad.to(master.dtype)
    memory, is_begun = gradient_of(master)
    if is_begun:
        memory.add_(grad)
    else:
        memory.copy_(grad)
    return None


def clear_gradients(model: nn.Module, parameters: Iterable[Tensor]) -> None:
    """No gradient for any of `parameters`, and memory for all: zeros, or a spare for weights of layers made here.

    To zero and to add costs 2.5 times what it costs to write; to allocate anew costs more than either.
    """
    kinds = (LowLinear, MasterEmbedding)
    written = {id(m.weight) for m in model.modules() if isinstance(m, kinds)}
    for parameter in parameters:
        if id(parameter) in written:
            if parameter.grad is not None or parameter not in _spare:
                _spare[parameter] = torch.empty_like(parameter) if parameter.grad is None else parameter.grad
            parameter.grad = None
        elif parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        else:
            parameter.grad.zero_()


def complete_gradients(parameters: Iterable[Tensor]) -> None:
    """Zeros for those of `parameters` that no backward has reached since `clear_gradients`."""
    for parameter in parameters:
        if parameter.grad is None:
            gradient_of(parameter)[0].zero_()


class _LowMatmul(torch.autograd.Function):
    """`F.linear` on low-precision operands whose weight gradient goes to the float32 master."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, master_OI: Tensor, low_OI: Tensor, bias_O: Tensor | None) -> Tensor:
        x_low = x.to(LOW)
        ctx.save_for_backward(x_low, low_OI)
        ctx.master, ctx.bias, ctx.input_dtype = master_OI, bias_O, x.dtype
        return nn.functional.linear(x_low, low_OI, None if bias_O is None else bias_O.to(LOW))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x_low, low_OI = ctx.saved_tensors
        grad = grads[0].to(LOW)
        needs_x, needs_weight, _, needs_bias = ctx.needs_input_grad
        flat_grad = grad.reshape(-1, grad.shape[-1])
        grad_x = (grad @ low_OI).to(ctx.input_dtype) if needs_x else None
        grad_weight = grad_bias = None
        if needs_weight:
            grad_weight = into_grad(ctx.master, flat_grad.T @ x_low.reshape(-1, x_low.shape[-1]))
        if needs_bias:
            grad_bias = into_grad(ctx.bias, flat_grad.float().sum(0))
        return grad_x, grad_weight, None, grad_bias


class LowLinear(nn.Linear):
    """An `nn.Linear` after `lower`; its output is bfloat16."""

    weight_low: Tensor
    _seen: tuple[int, int]

    def low_weight(self) -> Tensor:
        """The bfloat16 copy, made anew if the master is seen to have changed since."""
        if stamp(self.weight) != self._seen:
            self.refresh()
        return self.weight_low

    def refresh(self) -> None:
        """Copy the master now."""
        with torch.no_grad():
            # A new tensor, never in place: a graph that is still alive keeps the weights it was made with.
            self.weight_low = self.weight.detach().to(LOW)
        self._seen = stamp(self.weight)

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        """(..., in_features) -> (..., out_features) in bfloat16."""
        if _exact.get():
            return nn.functional.linear(input.float(), self.weight, self.bias)
        low_OI = self.low_weight()
        if not torch.is_grad_enabled():
            bias = None if self.bias is None else self.bias.to(LOW)
            return nn.functional.linear(input.to(LOW), low_OI, bias)
        out: Tensor = _LowMatmul.apply(input, self.weight, low_OI, self.bias)  # type: ignore[no-untyped-call]
        return out


class _Lookup(torch.autograd.Function):
    """Rows of a table; the gradient touches those rows only, not a second table of its size."""

    @staticmethod
    def forward(ctx: Any, ids: Tensor, master_VE: Tensor) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.master = master_VE
        return nn.functional.embedding(ids, master_VE)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor | None]:
        (ids,) = ctx.saved_tensors
        master_VE: Tensor = ctx.master
        table, is_begun = gradient_of(master_VE)
        if not is_begun:
            table.zero_()
        table.index_add_(0, ids.flatten(), grads[0].flatten(0, -2).to(table.dtype))
        return None, None if master_VE.grad is table else table


class MasterEmbedding(nn.Embedding):
    """An `nn.Embedding` after `lower`; it stays float32."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        """Ids (...) -> (..., E)."""
        if not torch.is_grad_enabled() or not self.weight.requires_grad:
            return nn.functional.embedding(input, self.weight)
        out: Tensor = _Lookup.apply(input, self.weight)  # type: ignore[no-untyped-call]
        return out


def lower(model: nn.Module) -> None:
    """Turn the float32 linear and embedding layers of `model`, in place, into those of this module.

    Parameters stay the same objects.
    """
    for module in model.modules():
        if type(module) is nn.Linear and module.weight.dtype == torch.float32:
            module.__class__ = LowLinear
            assert isinstance(module, LowLinear)
            module.register_buffer("weight_low", None, persistent=False)
            module.refresh()
        elif type(module) is nn.Embedding and module.weight.dtype == torch.float32:
            module.__class__ = MasterEmbedding


def refresh(model: nn.Module) -> None:
    """Bring the bfloat16 copy of every trained weight up to date."""
    for module in model.modules():
        if isinstance(module, LowLinear) and module.weight.requires_grad:
            module.refresh()


__all__ = [
    "LOW",
    "LowLinear",
    "MasterEmbedding",
    "clear_gradients",
    "complete_gradients",
    "exact_scope",
    "gradient_of",
    "into_grad",
    "is_exact",
    "lower",
    "refresh",
    "stamp",
]

"""Linear layers that compute in bfloat16 and learn in float32.

`lower_linears(model)` gives every `nn.Linear` a bfloat16 copy of its weight. The float32 parameter stays the
master: gradients arrive there and optimizers and checkpoints see nothing else. Whoever writes to trained
parameters calls `refresh(model)`. Writes that the version counter of the master shows, or an exchange of its
storage, are noticed without it; a fused optimizer and a write through `.data` leave no such trace.

`torch.autocast` would cast every weight anew in each forward pass, and its cache of casts is shared by all
threads of a process: a sampler without gradients could hand its copies to a trainer that needs them.
"""

from typing import Any

import torch
from torch import Tensor, nn

LOW = torch.bfloat16


class _LowMatmul(torch.autograd.Function):
    """`F.linear` on low-precision operands whose weight gradient goes to the float32 master."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, master_OI: Tensor, low_OI: Tensor, bias_O: Tensor | None) -> Tensor:
        x_low = x.to(LOW)
        ctx.save_for_backward(x_low, low_OI)
        ctx.input_dtype = x.dtype
        ctx.bias_dtype = None if bias_O is None else bias_O.dtype
        return nn.functional.linear(x_low, low_OI, None if bias_O is None else bias_O.to(LOW))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x_low, low_OI = ctx.saved_tensors
        grad = grads[0].to(LOW)
        needs_x, needs_weight, _, needs_bias = ctx.needs_input_grad
        flat_grad = grad.reshape(-1, grad.shape[-1])
        grad_x = (grad @ low_OI).to(ctx.input_dtype) if needs_x else None
        grad_weight = None
        if needs_weight:
            grad_weight = (flat_grad.T @ x_low.reshape(-1, x_low.shape[-1])).float()
        grad_bias = flat_grad.sum(0).to(ctx.bias_dtype) if needs_bias else None
        return grad_x, grad_weight, None, grad_bias


class LowLinear(nn.Linear):
    """An `nn.Linear` after `lower_linears`; its output is bfloat16."""

    weight_low: Tensor
    _seen: tuple[int, int]

    def low_weight(self) -> Tensor:
        """The bfloat16 copy, made anew if the master has changed since."""
        now = (self.weight.data_ptr(), self.weight._version)
        if now != self._seen:
            self.refresh()
        return self.weight_low

    def refresh(self) -> None:
        """Copy the master now."""
        with torch.no_grad():
            # A new tensor, never in place: a graph that is still alive keeps the weights it was made with.
            self.weight_low = self.weight.detach().to(LOW)
        self._seen = (self.weight.data_ptr(), self.weight._version)

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        """(..., in_features) -> (..., out_features) in bfloat16."""
        low_OI = self.low_weight()
        if not torch.is_grad_enabled():
            bias = None if self.bias is None else self.bias.to(LOW)
            return nn.functional.linear(input.to(LOW), low_OI, bias)
        out: Tensor = _LowMatmul.apply(input, self.weight, low_OI, self.bias)  # type: ignore[no-untyped-call]
        return out


def lower_linears(model: nn.Module) -> None:
    """Turn every float32 `nn.Linear` of `model`, in place, into a `LowLinear`. Parameters stay the same
    objects."""
    for module in model.modules():
        if type(module) is nn.Linear and module.weight.dtype == torch.float32:
            module.__class__ = LowLinear
            assert isinstance(module, LowLinear)
            module.register_buffer("weight_low", None, persistent=False)
            module.refresh()


def refresh(model: nn.Module) -> None:
    """Bring the bfloat16 copy of every trained weight up to date."""
    for module in model.modules():
        if isinstance(module, LowLinear) and module.weight.requires_grad:
            module.refresh()


__all__ = ["LOW", "LowLinear", "lower_linears", "refresh"]

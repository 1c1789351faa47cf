"""What a decoder layer does between its products, in few passes over memory: norm, rotation, gate, residual sum.

Promises: the values and gradients of the plain operations (tests compare with autograd in float64). Sums and products
are made in at least float32, results rounded once to the type that the next product reads. For the backward only
inputs are kept that somebody else keeps anyway: to get fresh memory costs more than the arithmetic here, up to 3
microseconds per page of 4 KiB.

    R rows (tokens)   E features   H heads   D head size, h its half
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

RUN_ELEMENTS = 2**20
"""Elements of a run: what is made for it in float32 takes 4 MiB, which the C library gives from memory that it has.
Arrays above 32 MiB it takes from the system each time. The speed of runs of 2^18 to 2^22 was the same."""


def runs(x_RE: Tensor) -> Iterator[slice]:
    """Slices of rows; all of them at once where there is no cache to stay in."""
    size = len(x_RE) if x_RE.device.type != "cpu" else max(1, RUN_ELEMENTS // x_RE.shape[-1])
    return (slice(start, min(start + size, len(x_RE))) for start in range(0, len(x_RE), size))


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def reciprocal_rms(x: Tensor, eps: float) -> Tensor:
    """1 / sqrt(mean(x^2) + eps) over the last axis, which stays with size 1; at least float32."""
    # The norm reads x once and keeps nothing of its size; the square and the mean of the modules write one more, which
    # took five times as long over 2048 tokens.
    length: Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=_wide(x.dtype))
    return length.square_().div_(x.shape[-1]).add_(eps).rsqrt_()


class _Norm(torch.autograd.Function):
    """x / sqrt(mean(x^2) + eps) * w, and x itself, so that the gradients of both uses meet here in one pass.

    With n = x * r, r = 1 / sqrt(mean(x^2) + eps), g the gradient of n * w: dx = r * (g * w) - x * r^3 *
    mean(g * w * x) and dw = sum over rows of g * n. Zhang and Sennrich, "Root Mean Square Layer Normalization" (2019).
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight_E: Tensor, offset: float, eps: float, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        x_RE = x.reshape(-1, x.shape[-1])
        wide = _wide(x.dtype)
        scale_E = weight_E.to(wide) + offset
        rstd_R1 = reciprocal_rms(x_RE, eps)
        out_RE = torch.empty(x_RE.shape, dtype=dtype, device=x.device)
        for run in runs(x_RE):
            torch.mul(x_RE[run] * rstd_R1[run], scale_E, out=out_RE[run])
        ctx.save_for_backward(x_RE, rstd_R1, scale_E)
        ctx.weight_dtype = weight_E.dtype
        ctx.set_materialize_grads(False)
        return x, out_RE.view(x.shape)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        residual, grad = grads
        if grad is None:
            return residual, None, None, None, None
        x_RE, rstd_R1, scale_E = ctx.saved_tensors
        grad_RE = grad.reshape(x_RE.shape)
        d_x_RE = torch.empty_like(x_RE)
        d_scale_E = torch.zeros_like(scale_E)
        for run in runs(x_RE):
            x, rstd, g = x_RE[run], rstd_R1[run], grad_RE[run]
            product = x * g.to(scale_E.dtype)
            d_scale_E.addmv_(product.T, rstd[:, 0])
            mean = (product @ scale_E)[:, None] / x_RE.shape[-1]
            torch.mul(g, scale_E, out=product).mul_(rstd).addcmul_(x, mean * rstd**3, value=-1)
            if residual is None:
                d_x_RE[run] = product
            else:
                torch.add(residual.reshape(x_RE.shape)[run], product, out=d_x_RE[run])
        needs_weight = ctx.needs_input_grad[1]
        return d_x_RE.view(grad.shape), d_scale_E.to(ctx.weight_dtype) if needs_weight else None, None, None, None


def norm(x: Tensor, weight_E: Tensor, offset: float, eps: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(x, its root mean square norm times `weight + offset` in `dtype`); go on with the x that is returned."""
    out: tuple[Tensor, Tensor] = _Norm.apply(x, weight_E, offset, eps, dtype)  # type: ignore[no-untyped-call]
    return out


def _rotate(x_BTHD: Tensor, cos_BTD: Tensor, sin_BTD: Tensor, dtype: torch.dtype, *, back: bool) -> Tensor:
    """(a cos - b sin, b cos + a sin) of the halves a and b; `back` is the transpose of that map."""
    h = x_BTHD.shape[-1] // 2
    first, second = (-sin_BTD[..., :h], sin_BTD[..., h:])
    signed_BTD = torch.cat((second, first) if back else (first, second), -1)
    wide_BTHD = x_BTHD.to(cos_BTD.dtype, copy=True)
    swapped_BTHD = torch.cat((wide_BTHD[..., h:], wide_BTHD[..., :h]), -1)
    wide_BTHD.mul_(cos_BTD[:, :, None]).addcmul_(swapped_BTHD, signed_BTD[:, :, None])
    return wide_BTHD.to(dtype)


class _Rotary(torch.autograd.Function):
    """The rotary embedding of RoFormer (Su et al., 2021) in the half-split order of Llama; linear, so it keeps
    nothing of x."""

    @staticmethod
    def forward(ctx: Any, x_BTHD: Tensor, cos_BTD: Tensor, sin_BTD: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.save_for_backward(cos_BTD, sin_BTD)
        ctx.dtype = x_BTHD.dtype
        return _rotate(x_BTHD, cos_BTD, sin_BTD, dtype, back=False)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        cos_BTD, sin_BTD = ctx.saved_tensors
        grad_BTHD = _rotate(grads[0], cos_BTD, sin_BTD, ctx.dtype, back=True)
        return grad_BTHD, None, None, None


def rotary(x_BTHD: Tensor, cos_BTD: Tensor, sin_BTD: Tensor, dtype: torch.dtype) -> Tensor:
    """x turned by its position, in `dtype`."""
    out: Tensor = _Rotary.apply(x_BTHD, cos_BTD, sin_BTD, dtype)  # type: ignore[no-untyped-call]
    return out


Gate = tuple[Callable[[Tensor], Tensor], Callable[[Tensor, Tensor], Tensor]]
"""(function, (gradient of its value, argument) -> gradient of its argument)."""

_aten = torch.ops.aten
GATES: dict[str, Gate] = {
    "silu": (torch.nn.functional.silu, _aten.silu_backward),
    "gelu_tanh": (
        lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
        lambda grad, x: _aten.gelu_backward(grad, x, approximate="tanh"),
    ),
    "gelu": (torch.nn.functional.gelu, _aten.gelu_backward),
}
"""Activations of gated layers, each with its derivative as torch has it."""


class _Gated(torch.autograd.Function):
    """f(gate) * up; f(gate) is made again in the backward."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, name: str) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.name = name
        gate_RE, up_RE = gate.reshape(-1, gate.shape[-1]), up.reshape(-1, up.shape[-1])
        out_RE = torch.empty_like(gate_RE)
        for run in runs(gate_RE):
            torch.mul(GATES[name][0](gate_RE[run]), up_RE[run], out=out_RE[run])
        return out_RE.view(gate.shape)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        gate, up = ctx.saved_tensors
        function, derivative = GATES[ctx.name]
        d_gate, d_up = torch.empty_like(gate), torch.empty_like(up)
        width = gate.shape[-1]
        flat = [x.reshape(-1, width) for x in (grads[0], gate, up)]
        for run in runs(flat[0]):
            grad, gate_RE, up_RE = (x[run] for x in flat)
            torch.mul(grad, function(gate_RE), out=d_up.view(-1, width)[run])
            d_gate.view(-1, width)[run] = derivative(grad * up_RE, gate_RE)
        return d_gate, d_up, None


def gated(gate: Tensor, up: Tensor, name: str) -> Tensor:
    """GATES[name](gate) * up, in their type."""
    out: Tensor = _Gated.apply(gate, up, name)  # type: ignore[no-untyped-call]
    return out


class _Sum(torch.autograd.Function):
    """residual + branch; torch would first make a whole copy of the branch in the residual's type."""

    @staticmethod
    def forward(ctx: Any, residual: Tensor, branch: Tensor) -> Tensor:
        ctx.dtype = branch.dtype
        out = torch.empty_like(residual)
        flat = [x.reshape(-1, x.shape[-1]) for x in (residual, branch, out)]
        for run in runs(flat[0]):
            torch.add(flat[0][run], flat[1][run], out=flat[2][run])
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        return grads[0], grads[0].to(ctx.dtype)


def add(residual: Tensor, branch: Tensor) -> Tensor:
    """Their sum in the type of the residual, which is at least as wide."""
    out: Tensor = _Sum.apply(residual, branch)  # type: ignore[no-untyped-call]
    return out

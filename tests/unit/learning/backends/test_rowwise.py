"""What stands between the products of a layer: values and gradients of the plain operations."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from leyden.learning.backends.embedded import rowwise

D = torch.float64


def random(*shape: int, dtype: torch.dtype = D, seed: int = 0) -> Tensor:
    made = torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=D)
    return made.to(dtype).requires_grad_()


def plain_norm(x: Tensor, weight: Tensor, offset: float) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * (weight + offset)


def plain_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    h = x.shape[-1] // 2
    return x * cos[:, :, None] + torch.cat((-x[..., h:], x[..., :h]), -1) * sin[:, :, None]


def plain_gate(x: Tensor, name: str) -> Tensor:
    if name == "silu":
        return x * torch.sigmoid(x)
    return torch.nn.functional.gelu(x, approximate="tanh" if name == "gelu_tanh" else "none")


def same(ours: Callable[..., Tensor], plain: Callable[..., Tensor], *inputs: Tensor) -> None:
    """Values, gradients, and the derivative by differences."""
    assert torch.allclose(ours(*inputs), plain(*inputs), rtol=1e-12, atol=1e-12)
    weight = torch.linspace(-1, 2, plain(*inputs).numel(), dtype=D).view_as(plain(*inputs))
    found = [torch.autograd.grad((f(*inputs) * weight).sum(), inputs) for f in (ours, plain)]
    assert all(torch.allclose(a, b, rtol=1e-10, atol=1e-12) for a, b in zip(*found, strict=True))
    assert torch.autograd.gradcheck(ours, inputs)


@pytest.fixture(params=[2**20, 16], ids=["one run", "many runs"], autouse=True)
def run_elements(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rowwise, "RUN_ELEMENTS", request.param)


@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_the_norm_and_its_gradient_are_those_of_autograd(offset: float) -> None:
    same(
        lambda x, w: rowwise.norm(x, w, offset, 1e-5, D)[1],
        lambda x, w: plain_norm(x, w, offset),
        random(2, 5, 8),
        random(8, seed=1),
    )


def test_the_norm_adds_the_gradient_of_what_goes_past_it() -> None:
    def ours(x: Tensor, w: Tensor) -> Tensor:
        past, normed = rowwise.norm(x, w, 0.0, 1e-5, D)
        return past * 3 + normed.square()

    same(ours, lambda x, w: x * 3 + plain_norm(x, w, 0.0).square(), random(2, 5, 8), random(8, seed=1))
    x, w = random(2, 5, 8), random(8, seed=1)
    past, _ = rowwise.norm(x, w, 0.0, 1e-5, D)
    (grad,) = torch.autograd.grad(past.sum(), x)
    assert torch.equal(grad, torch.ones_like(x))


def test_a_rotation_by_any_angles_is_that_of_autograd() -> None:
    cos, sin = random(2, 5, 8, seed=1).detach(), random(2, 5, 8, seed=2).detach()
    same(
        lambda x: rowwise.rotary(x, cos, sin, D),
        lambda x: plain_rotary(x, cos, sin),
        random(2, 5, 3, 8),
    )


@pytest.mark.parametrize("name", rowwise.GATES)
def test_gates_are_those_of_autograd(name: str) -> None:
    same(
        lambda gate, up: rowwise.gated(gate, up, name),
        lambda gate, up: plain_gate(gate, name) * up,
        random(2, 5, 6),
        random(2, 5, 6, seed=1),
    )


def test_sums_are_those_of_autograd() -> None:
    same(rowwise.add, lambda a, b: a + b, random(2, 5, 6), random(2, 5, 6, seed=1))


def test_in_bfloat16_results_are_rounded_once() -> None:
    x, low = random(3, 40, 64, dtype=torch.float32), random(3, 40, 64, dtype=torch.bfloat16, seed=1)
    weight = random(64, dtype=torch.float32, seed=2)
    normed = rowwise.norm(x, weight, 0.0, 1e-5, torch.bfloat16)[1]
    assert (normed.double() - plain_norm(x.double(), weight.double(), 0.0)).abs().max() < 0.02
    assert torch.equal(rowwise.add(x, low), x + low)
    heads = low.view(3, 40, 4, 16)
    cos, sin = (random(3, 40, 16, dtype=torch.float32, seed=seed).detach() for seed in (3, 4))
    turned = rowwise.rotary(heads, cos, sin, torch.bfloat16)
    assert torch.equal(turned, plain_rotary(heads.float(), cos, sin).bfloat16())
    (turned.float().sum() + normed.float().sum()).backward()  # type: ignore[no-untyped-call]
    assert low.grad is not None and low.grad.dtype == torch.bfloat16
    assert x.grad is not None and x.grad.dtype == torch.float32

"""Low-precision layers: gradients go to the master, in place or not, and are those of autograd."""

import torch
from torch import nn

from leyden.learning.backends.embedded.precision import LowLinear, MasterEmbedding, lower


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(11, 8), nn.Linear(8, 6), nn.Linear(6, 11, bias=False))


def low() -> nn.Sequential:
    made = model()
    lower(made)
    assert [type(m) for m in made] == [MasterEmbedding, LowLinear, LowLinear]
    return made


IDS = torch.tensor([[1, 2, 2], [3, 10, 1]])


def test_gradients_are_nearly_those_of_float32_and_arrive_in_float32() -> None:
    plain, lowered = model(), low()
    for one in (plain, lowered):
        one(IDS).float().square().sum().backward()
    for a, b in zip(lowered.parameters(), plain.parameters(), strict=True):
        assert a.grad is not None and b.grad is not None
        assert a.grad.dtype == torch.float32
        assert (a.grad - b.grad).norm() < 0.02 * b.grad.norm()


def test_gradients_add_up_in_place_as_autograd_adds_them() -> None:
    fresh, kept = low(), low()
    for parameter in kept.parameters():
        parameter.grad = torch.zeros_like(parameter)
    buffers = [p.grad for p in kept.parameters()]
    total = [torch.zeros_like(p) for p in fresh.parameters()]
    for scale in (1.0, 2.0):
        for one in (fresh, kept):
            (scale * one(IDS)).float().square().sum().backward()
        for sum_, parameter in zip(total, fresh.parameters(), strict=True):
            assert parameter.grad is not None
            sum_ += parameter.grad
            parameter.grad = None
    for parameter, buffer, expected in zip(kept.parameters(), buffers, total, strict=True):
        assert buffer is not None and parameter.grad is buffer
        assert torch.allclose(buffer, expected, rtol=1e-5, atol=1e-6)


def test_a_tied_table_gets_the_gradient_of_both_its_uses() -> None:
    torch.manual_seed(0)
    table, head = nn.Embedding(11, 8), nn.Linear(8, 11, bias=False)
    head.weight = table.weight
    tied = nn.Sequential(table, head)
    tied(IDS).square().sum().backward()
    assert table.weight.grad is not None
    expected = table.weight.grad.clone()
    lower(tied)
    for start in (None, torch.zeros_like(expected)):
        table.weight.grad = start
        tied(IDS).float().square().sum().backward()
        assert table.weight.grad is not None
        assert (table.weight.grad - expected).norm() < 0.02 * expected.norm()


def test_frozen_weights_get_no_gradient() -> None:
    made = low().requires_grad_(False)
    made[1].weight.requires_grad_(True)
    made(IDS).float().sum().backward()
    assert [p.grad is not None for p in made.parameters()] == [False, True, False, False]

"""Low-precision layers: gradients go to the master, in place or not, and are those of autograd."""

import torch
from tests.unit.learning.backends.tiny import make_loaded
from torch import nn

from leyden.learning.backends.embedded.attention import attention_scope, causal_kernel
from leyden.learning.backends.embedded.precision import (
    LowLinear,
    MasterEmbedding,
    clear_gradients,
    complete_gradients,
    exact_scope,
    lower,
)


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


def test_a_first_gradient_is_written_over_the_last_and_a_second_is_added() -> None:
    made, fresh = low(), low()
    made(IDS).float().sum().backward()
    buffers = {name: p.grad for name, p in made.named_parameters()}
    for _ in range(2):  # as in two steps
        clear_gradients(made, made.parameters())
        for scale in (1.0, 2.0):
            (scale * made(IDS)).float().square().sum().backward()
    complete_gradients(made.parameters())
    for scale in (1.0, 2.0):
        (scale * fresh(IDS)).float().square().sum().backward()
    for (name, a), b in zip(made.named_parameters(), fresh.parameters(), strict=True):
        assert a.grad is not None and b.grad is not None
        assert a.grad is buffers[name], name
        assert torch.allclose(a.grad, b.grad, rtol=1e-5, atol=1e-6), name


def test_what_no_backward_reaches_has_a_gradient_of_zero_in_the_same_memory() -> None:
    made = low()
    made(IDS).float().sum().backward()
    kept = made[2].weight.grad
    for _ in range(2):  # a second time nothing is taken anew
        clear_gradients(made, made.parameters())
    assert made[2].weight.grad is None
    made[:2](IDS).float().sum().backward()
    complete_gradients(made.parameters())
    assert made[2].weight.grad is kept and kept is not None and not kept.any()
    assert all(p.grad is not None for p in made.parameters())


def test_inside_the_exact_scope_the_masters_compute_in_float32() -> None:
    plain, lowered = model(), low()
    with torch.no_grad():
        expected = plain(IDS)
        assert not torch.equal(lowered(IDS).float(), expected)
        with exact_scope():
            assert torch.equal(lowered(IDS), expected)


def test_a_bfloat16_model_in_the_exact_scope_is_the_float32_model() -> None:
    ids_BT, places_BT = torch.arange(12)[None], torch.arange(12)[None]
    full, lowered = make_loaded("qwen2"), make_loaded("qwen2", dtype="bfloat16")
    with torch.no_grad(), attention_scope(causal_kernel):
        expected = full.hidden(ids_BT, places_BT)
        assert not torch.allclose(lowered.hidden(ids_BT, places_BT).float(), expected, atol=1e-4)
        with exact_scope():
            assert torch.equal(lowered.hidden(ids_BT, places_BT), expected)

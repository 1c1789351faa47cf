"""Log-probs block by block equal those of full logits, gradients included."""

import numpy as np
import pytest
import torch
from torch import nn

from leyden.learning.backends.embedded import logprobs
from leyden.learning.backends.embedded.precision import LowLinear, lower, refresh

M, V, E, L = 11, 97, 16, 40


def case(
    dtype: torch.dtype = torch.float64,
) -> tuple[torch.Tensor, nn.Linear, np.ndarray, np.ndarray, np.ndarray]:
    torch.manual_seed(0)
    rng = np.random.default_rng(0)
    hidden_BTE = torch.randn(2, M, E, dtype=dtype, requires_grad=True)
    head = nn.Linear(E, V, bias=False, dtype=dtype)
    source_L = rng.integers(0, 2 * M, L)
    temperature_L = rng.choice(np.asarray([1.0, 0.5], np.float32), L)
    return hidden_BTE, head, source_L, temperature_L, rng.integers(0, V, L)


def full(
    hidden_BTE: torch.Tensor,
    head: nn.Module,
    source_L: np.ndarray,
    temperature_L: np.ndarray,
    token_L: np.ndarray,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One label at a time, from the definition."""
    logps, entropies = [], []
    for source, temperature, token in zip(source_L, temperature_L, token_L, strict=True):
        log_p_V = torch.log_softmax(head(hidden_BTE.flatten(0, 1)[source]) / float(temperature), -1)
        logps.append(log_p_V[token])
        entropies.append(-(log_p_V.exp() * log_p_V).sum())
    return torch.stack(logps), torch.stack(entropies)


@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("block_bytes", [1, 4 * 64 * M, 2**20])
@pytest.mark.parametrize("way", ["kept", "made again", "any head"])
def test_blocks_equal_the_full_softmax_and_its_gradient(
    entropy: bool, block_bytes: int, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logprobs, "KEEP_BYTES", 2**26 if way == "kept" else 0)
    hidden_BTE, head, source_L, temperature_L, token_L = case()
    used: nn.Module = head
    if way == "any head":
        used = nn.Linear(E, V, dtype=torch.float64)
        used.weight = head.weight
        nn.init.zeros_(used.bias)
    positions = logprobs.plan_positions(source_L, temperature_L, token_L, torch.device("cpu"), torch.float64)
    logp_L, entropy_L = logprobs.label_logprobs(hidden_BTE, used, positions, entropy=entropy, block_bytes=block_bytes)
    expected_logp_L, expected_entropy_L = full(hidden_BTE, head, source_L, temperature_L, token_L)
    assert torch.allclose(logp_L, expected_logp_L, rtol=1e-12)
    weights_L = torch.randn(2, L, dtype=torch.float64)
    value, expected = (logp_L * weights_L[0]).sum(), (expected_logp_L * weights_L[0]).sum()
    if entropy:
        assert entropy_L is not None
        assert torch.allclose(entropy_L, expected_entropy_L, rtol=1e-12)
        value = value + (entropy_L * weights_L[1]).sum()
        expected = expected + (expected_entropy_L * weights_L[1]).sum()
    wanted = torch.autograd.grad(expected, (hidden_BTE, head.weight))
    found = torch.autograd.grad(value, (hidden_BTE, head.weight))
    for a, b in zip(found, wanted, strict=True):
        assert torch.allclose(a, b, rtol=1e-9, atol=1e-12)


def test_labels_at_one_position_share_a_row_and_temperatures_do_not() -> None:
    positions = logprobs.plan_positions(
        np.asarray([5, 5, 5, 2]),
        np.asarray([1.0, 1.0, 0.5, 1.0], np.float32),
        np.asarray([7, 8, 7, 9]),
        torch.device("cpu"),
        torch.float32,
    )
    assert positions.source_M.tolist() == [2, 5, 5]
    assert positions.row_L.tolist() == [2, 2, 1, 0]


def test_bfloat16_logits_are_reduced_in_float32_and_the_master_weight_gets_the_gradient() -> None:
    hidden_BTE, head, source_L, temperature_L, token_L = case(torch.float32)
    wrapper = nn.Sequential(head)
    lower(wrapper)
    assert isinstance(head, LowLinear)
    positions = logprobs.plan_positions(source_L, temperature_L, token_L, torch.device("cpu"), torch.float32)
    logp_L, _ = logprobs.label_logprobs(hidden_BTE, head, positions, entropy=False)
    expected_L, _ = full(hidden_BTE, lambda x: head(x).float(), source_L, temperature_L, token_L)  # type: ignore[arg-type]
    assert logp_L.dtype == torch.float32
    assert torch.allclose(logp_L, expected_L, atol=1e-2)
    logp_L.sum().backward()  # type: ignore[no-untyped-call]
    assert head.weight.grad is not None and head.weight.grad.dtype == torch.float32


def test_the_copy_follows_its_master() -> None:
    layer = nn.Linear(4, 4, bias=False)
    model = nn.Sequential(layer)
    lower(model)
    assert isinstance(layer, LowLinear)
    x = torch.ones(1, 4)
    with torch.no_grad():
        layer.weight.mul_(2)
    assert torch.equal(layer(x), nn.functional.linear(x.bfloat16(), layer.weight.bfloat16()))
    layer.weight.data = torch.zeros(4, 4)
    assert not layer(x).any()
    # A fused optimizer leaves no trace in the version counter.
    optimizer = torch.optim.AdamW(layer.parameters(), lr=0.5, fused=True)
    layer(x).sum().backward()
    optimizer.step()
    refresh(model)
    assert layer(x).any()
    assert torch.equal(layer(x), nn.functional.linear(x.bfloat16(), layer.weight.bfloat16()))

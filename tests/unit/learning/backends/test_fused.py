"""Layers of the usual shape in fewer passes: the same numbers; any other layer as it was."""

from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from tests.unit.learning.backends import tiny
from tests.unit.learning.backends.tiny import gradients, make_batch, make_loaded, random_sequences, relative_difference
from torch import Tensor, nn
from transformers import Gemma3TextConfig

from leyden.base.config import LearnConfig, LoraConfig
from leyden.learning.backends.base import Objective
from leyden.learning.backends.embedded import fused
from leyden.learning.backends.embedded.attention import attention_scope, causal_kernel
from leyden.learning.backends.embedded.model import LoadedModel
from leyden.learning.backends.embedded.path import Path
from leyden.learning.backends.embedded.trainer import Trainer
from leyden.learning.batch import Batch

KINDS = (*tiny.CONFIGS, "gemma3")


@pytest.fixture(autouse=True)
def with_gemma3(monkeypatch: pytest.MonkeyPatch) -> None:
    """A family with norms on heads and after each branch, rotations and windows that differ by layer."""

    def config(**settings: Any) -> Gemma3TextConfig:
        return Gemma3TextConfig(
            **settings, layer_types=["sliding_attention", "full_attention"], sliding_window=6, query_pre_attn_scalar=8
        )

    monkeypatch.setitem(tiny.CONFIGS, "gemma3", config)


def batch_of(seed: int = 0) -> Batch:
    rng = np.random.default_rng(seed)
    return make_batch(random_sequences(rng, 8), rng)


def accumulate(loaded: LoadedModel, *, plain: bool = False, **learn: Any) -> dict[str, Tensor]:
    trainer = Trainer(loaded, LearnConfig(layout="tree", **learn))
    with pytest.MonkeyPatch.context() as patch:
        if plain:
            patch.setattr(fused, "fused_scope", nullcontext)
        trainer.accumulate(batch_of(), Objective(entropy=0.1))
    return gradients(loaded)


def layers_of(loaded: LoadedModel) -> list[Any]:
    return list(loaded.causal.base_model.layers)  # type: ignore[arg-type]


@pytest.mark.parametrize("low_rank", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_those_of_the_layers_own_forward_in_float64(kind: str, low_rank: bool) -> None:
    loaded = make_loaded(kind, lora=LoraConfig(rank=2) if low_rank else None)
    loaded.model.to(torch.float64)
    ours = accumulate(loaded)
    assert all(isinstance(layer, fused._Fused) for layer in layers_of(loaded))
    # Rotations are float32 in transformers, whatever the model is.
    assert relative_difference(ours, accumulate(loaded, plain=True)) < 1e-9


@pytest.mark.parametrize("kind", KINDS)
def test_in_bfloat16_they_are_as_near_to_float32(kind: str) -> None:
    exact = accumulate(make_loaded(kind), plain=True)
    loaded = make_loaded(kind, dtype="bfloat16")
    found = {plain: accumulate(loaded, plain=plain) for plain in (False, True)}

    def error(gradient: dict[str, Tensor]) -> float:
        both = [torch.cat([g[name].flatten() for name in exact]) for g in (gradient, exact)]
        return float((both[0] - both[1]).norm() / both[1].norm())

    assert error(found[False]) < 1.5 * error(found[True]) + 1e-3


def hidden_of(loaded: LoadedModel) -> Tensor:
    ids_BT = torch.arange(9)[None] + 3
    with torch.no_grad(), attention_scope(causal_kernel):
        return loaded.hidden(ids_BT, torch.arange(9)[None])


def test_outside_the_scope_layers_are_what_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = make_loaded()
    before = hidden_of(loaded)
    assert fused.install(loaded) == 2
    with monkeypatch.context() as patch:
        patch.setattr(fused, "_attend", None)
        assert torch.equal(hidden_of(loaded), before)
    with fused.fused_scope():
        assert torch.allclose(hidden_of(loaded), before, rtol=1e-4, atol=1e-5)
        assert fused.is_active()
    assert not fused.is_active()


def test_a_layer_with_another_activation_norm_or_sum_is_left_alone() -> None:
    def relu(layers: list[Any]) -> None:
        layers[1].mlp.act_fn = nn.ReLU()

    def layer_norm(layers: list[Any]) -> None:
        layers[0].input_layernorm = nn.LayerNorm(32)

    def scaled(layers: list[Any]) -> None:
        for layer in layers:
            layer.__class__ = type("Scaled", (type(layer),), {"forward": _scaled(type(layer))})

    for change in (relu, layer_norm, scaled):
        loaded = make_loaded()
        change(layers_of(loaded))
        assert fused.install(loaded) == 0
        assert all(getattr(layer, "anatomy", None) is None for layer in layers_of(loaded))
        accumulate(loaded)  # and is trained all the same


def test_a_layer_that_changes_later_is_seen_by_the_next_trainer() -> None:
    loaded = make_loaded()
    Trainer(loaded, LearnConfig(activation_checkpointing=True))
    layers_of(loaded)[1].mlp.act_fn = nn.ReLU()
    trainer = Trainer(loaded, LearnConfig(layout="tree", activation_checkpointing=True))
    trainer.accumulate(batch_of(), Objective(entropy=0.1))
    assert relative_difference(gradients(loaded), accumulate(loaded, plain=True)) < 1e-6


def _scaled(of: type) -> Any:
    def forward(self: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        out: Tensor = of.forward(self, hidden_states, *args, **kwargs)  # type: ignore[attr-defined]
        return hidden_states + 0.9 * (out - hidden_states)

    return forward


def test_less_is_kept_for_the_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded, batch = make_loaded(dtype="bfloat16"), batch_of()
    trainer = Trainer(loaded, LearnConfig(layout="tree"))
    (one,) = trainer.planner.plan(batch).passes

    def kept_bytes() -> int:
        kept: dict[int, int] = {}

        def pack(tensor: Tensor) -> Tensor:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            out = trainer._hidden(one, Path(loaded.device))
        assert out.requires_grad
        return sum(kept.values())

    ours = kept_bytes()
    monkeypatch.setattr(fused, "fused_scope", nullcontext)
    assert ours < 0.8 * kept_bytes()

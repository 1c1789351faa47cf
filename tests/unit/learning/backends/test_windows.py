"""Sliding windows: every layout, the sampler and the model's own attention agree; other layers are refused by name."""

from typing import Any

import numpy as np
import pytest
import torch
from tests.unit.learning.backends import tiny
from tests.unit.learning.backends.tiny import gradients, make_batch, make_loaded, random_sequences, relative_difference
from torch import nn
from transformers import FalconH1Config, Gemma3TextConfig, MambaConfig, MistralConfig, Qwen2Config, Qwen3NextConfig

from leyden.base.config import LearnConfig, LoraConfig
from leyden.base.errors import ModelUnusable
from leyden.learning.backends.base import Objective
from leyden.learning.backends.embedded import descent
from leyden.learning.backends.embedded.attention import ATTENTION_NAME, attention_scope
from leyden.learning.backends.embedded.cache import SlotCache, SlotKernel
from leyden.learning.backends.embedded.model import LoadedModel
from leyden.learning.backends.embedded.source import check_config, check_windows
from leyden.learning.backends.embedded.trainer import Trainer
from leyden.learning.batch import Batch

WINDOW = 6
LAYOUTS = ("single", "padded", "packed", "tree", "depth_first")


def gemma3(**values: Any) -> Gemma3TextConfig:
    kinds = ["sliding_attention", "full_attention"]
    return Gemma3TextConfig(**values, sliding_window=WINDOW, layer_types=kinds, query_pre_attn_scalar=8)


def mistral(**values: Any) -> MistralConfig:
    return MistralConfig(**values, sliding_window=WINDOW)


def qwen2(**values: Any) -> Qwen2Config:
    kinds = ["full_attention", "sliding_attention"]
    return Qwen2Config(**values, use_sliding_window=True, sliding_window=WINDOW, layer_types=kinds)


WINDOWED = {"gemma3": gemma3, "mistral": mistral, "qwen2": qwen2}


@pytest.fixture(params=WINDOWED)
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a tiny model with a window that sequences outgrow."""
    monkeypatch.setitem(tiny.CONFIGS, "windowed", WINDOWED[request.param])
    monkeypatch.setattr(descent, "PASS_TOKENS", 0)
    return "windowed"


def batch_of(seed: int = 0) -> Batch:
    rng = np.random.default_rng(seed)
    batch = make_batch(random_sequences(rng, 10, longest=20), rng)
    assert max(len(s) for s in batch.sequences) > 3 * WINDOW
    return batch


def own_logprobs(loaded: LoadedModel, batch: Batch) -> torch.Tensor:
    """By the masks and the attention of transformers, one action at a time; shape (N,)."""
    config = loaded.causal.config
    config._attn_implementation = "eager"
    parts = []
    try:
        for a, sequence in enumerate(batch.sequences):
            ids_BT = torch.from_numpy(sequence.astype(np.int64))[None]
            logits_TV = loaded.causal(input_ids=ids_BT, use_cache=False).logits[0]
            log_p_TV = torch.log_softmax(logits_TV / float(batch.temperature_A[a]), -1)
            places = np.arange(int(batch.prompt_len_A[a]), len(sequence))
            parts.append(log_p_TV[torch.from_numpy(places - 1), torch.from_numpy(sequence[places].astype(np.int64))])
    finally:
        config._attn_implementation = ATTENTION_NAME
    return torch.cat(parts)


def widened(loaded: LoadedModel) -> LoadedModel:
    """In float64, the softmax of transformers' plain attention too, which rounds to float32 otherwise."""
    loaded.model.to(torch.float64)
    return loaded


@pytest.mark.parametrize("layout", LAYOUTS)
def test_logprobs_and_gradients_are_those_of_the_models_own_attention(
    kind: str, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded, batch = widened(make_loaded(kind)), batch_of()
    softmax = nn.functional.softmax
    monkeypatch.setattr(nn.functional, "softmax", lambda x, dim=-1, dtype=None: softmax(x, dim=dim))
    logp_N = own_logprobs(loaded, batch)
    trainer = Trainer(loaded, LearnConfig(layout=layout, token_budget=30))
    assert np.allclose(trainer.logprobs(batch), logp_N.detach().numpy(), rtol=1e-6)
    scale_N = torch.from_numpy(batch.weight_N * batch.credit_N.astype(np.float64))
    (-(scale_N * logp_N)).sum().backward()  # type: ignore[no-untyped-call]
    expected = gradients(loaded)
    trainer.accumulate(batch, Objective(importance_cap=0.0))
    assert relative_difference(gradients(loaded), expected) < 1e-7
    full = LearnConfig(layout=layout, token_budget=30)
    for module in loaded.model.modules():
        if hasattr(module, "sliding_window"):
            module.sliding_window = None  # type: ignore[assignment]
    loaded.config.sliding_window = None
    Trainer(loaded, full).accumulate(batch, Objective(importance_cap=0.0))
    assert relative_difference(gradients(loaded), expected) > 1e-3, "the window was never met"


def test_layouts_agree_with_a_low_rank_update_and_activation_checkpointing(kind: str) -> None:
    loaded, batch = widened(make_loaded(kind, lora=LoraConfig(rank=2))), batch_of(1)
    found = {}
    for layout in LAYOUTS:
        learn = LearnConfig(layout=layout, token_budget=30, activation_checkpointing=True)
        Trainer(loaded, learn).accumulate(batch, Objective())
        found[layout] = gradients(loaded)
    assert all(relative_difference(found[layout], found["single"]) < 1e-9 for layout in LAYOUTS)


def test_the_sampler_reads_the_window_as_the_trainer_does(kind: str) -> None:
    loaded = make_loaded(kind)
    ids_BT = torch.randint(0, tiny.VOCAB, (2, 20), generator=torch.Generator().manual_seed(0))
    positions_BT = torch.arange(20)[None].expand(2, 20)
    config = loaded.config
    config._attn_implementation = "eager"
    expected = loaded.causal(input_ids=ids_BT, use_cache=False).logits
    config._attn_implementation = ATTENTION_NAME
    cache = SlotCache(2, 2, 8, torch.float32, torch.device("cpu"))
    cache.reserve(2, 21)
    parts = []
    for columns in (slice(0, 9), *(slice(i, i + 1) for i in range(9, 14)), slice(14, 20)):
        here = positions_BT[:, columns]
        with torch.no_grad(), attention_scope(SlotKernel(cache, 0, here, here)):
            parts.append(loaded.head(loaded.hidden(ids_BT[:, columns], here)))
    assert torch.allclose(torch.cat(parts, 1), expected, atol=1e-4)


@pytest.mark.parametrize("of", [Gemma3TextConfig, MistralConfig])
def test_windows_that_layers_do_not_ask_for_are_refused_by_name(of: type[Any]) -> None:
    config = of(sliding_window=128, num_hidden_layers=2)
    right = [128 if kind == "sliding_attention" else None for kind in getattr(config, "layer_types", None) or []]
    check_windows(config, right or [128, 128], "mine", 4096)
    check_windows(config, [None, None], "mine", 128)  # never met
    with pytest.raises(ModelUnusable, match=r"mine \(\w+\).*sliding_attention over 128 tokens in 2 of 2 layers, but 1"):
        check_windows(config, [128, None], "mine", 129)


def test_layers_that_share_a_state_are_refused_with_what_to_choose() -> None:
    with pytest.raises(ModelUnusable, match=r"mine \(qwen3_next\) has layers of kind linear_attention.*Choose a model"):
        check_config(Qwen3NextConfig(), "mine")


def test_a_state_beside_the_attention_of_a_layer_is_found_and_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def small(**values: Any) -> FalconH1Config:
        return FalconH1Config(
            **values, mamba_d_ssm=32, mamba_n_heads=4, mamba_d_head=8, mamba_d_state=8, mamba_n_groups=1, mamba_d_conv=2
        )

    monkeypatch.setitem(tiny.CONFIGS, "hybrid", small)
    with pytest.raises(ModelUnusable, match=r"a tiny hybrid \(falcon_h1\) passes something from token to token"):
        make_loaded("hybrid")


def test_a_state_space_model_is_refused_when_it_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    def small(**values: Any) -> MambaConfig:
        return MambaConfig(vocab_size=64, hidden_size=16, num_hidden_layers=2, state_size=4, eos_token_id=2)

    monkeypatch.setitem(tiny.CONFIGS, "mamba", small)
    with pytest.raises(ModelUnusable, match=r"a tiny mamba \(mamba\).*Choose a model whose layers are all full"):
        make_loaded("mamba")


def test_a_model_whose_tokens_see_later_ones_is_refused_by_name() -> None:
    with pytest.raises(ModelUnusable, match=r"mine \(gemma3_text\) lets tokens see later ones"):
        check_config(Gemma3TextConfig(use_bidirectional_attention=True), "mine")

"""Sliding windows and linear attention: exact where the window is not met, refused by name where it would be."""

from typing import Any

import numpy as np
import pytest
import torch
from tests.unit.learning.backends import tiny
from tests.unit.learning.backends.tiny import gradients, make_batch, make_loaded, random_sequences, relative_difference
from transformers import Gemma3TextConfig, MistralConfig, Qwen3NextConfig

from leyden.base.config import LearnConfig
from leyden.base.errors import ModelUnusable
from leyden.learning.backends.base import Objective
from leyden.learning.backends.embedded.source import check_config
from leyden.learning.backends.embedded.trainer import Trainer


@pytest.mark.parametrize("kind", [Gemma3TextConfig, MistralConfig])
def test_a_model_with_a_window_has_one_gradient_in_all_layouts(
    kind: type[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(tiny.CONFIGS, "windowed", kind)
    loaded = make_loaded("windowed")
    assert loaded.config.sliding_window >= loaded.max_context
    loaded.model.to(torch.float64)
    rng = np.random.default_rng(0)
    batch = make_batch(random_sequences(rng, 8), rng)
    found = {}
    for layout in ("single", "padded", "packed", "tree"):
        Trainer(loaded, LearnConfig(layout=layout)).accumulate(batch, Objective())
        found[layout] = gradients(loaded)
    assert all(relative_difference(found[layout], found["single"]) < 1e-9 for layout in found)


@pytest.mark.parametrize("kind", [Gemma3TextConfig, MistralConfig])
def test_a_window_that_a_context_can_outgrow_is_refused_by_name(kind: type[Any]) -> None:
    config = kind(sliding_window=128)
    check_config(config, "mine", 128)
    with pytest.raises(ModelUnusable, match=r"mine \(\w+\) uses sliding_attention over 128 tokens.*max_context is 129"):
        check_config(config, "mine", 129)


def test_layers_of_linear_attention_are_refused_by_name() -> None:
    with pytest.raises(ModelUnusable, match=r"mine \(qwen3_next\) has layers of kind linear_attention"):
        check_config(Qwen3NextConfig(), "mine", 64)

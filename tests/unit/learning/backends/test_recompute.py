"""Layers that run again in the backward: the same gradient, less that is kept."""

from typing import Any

import numpy as np
import pytest
import torch
from tests.unit.learning.backends.tiny import CONFIGS, gradients, make_batch, make_loaded, random_sequences
from torch import nn

from leyden.base.config import LearnConfig, LoraConfig
from leyden.base.errors import ModelUnusable
from leyden.learning.backends.base import Objective
from leyden.learning.backends.embedded import recompute
from leyden.learning.backends.embedded.model import LoadedModel
from leyden.learning.backends.embedded.path import Path
from leyden.learning.backends.embedded.trainer import Trainer
from leyden.learning.batch import Batch


def batch_of(seed: int = 0) -> Batch:
    rng = np.random.default_rng(seed)
    return make_batch(random_sequences(rng, 8), rng)


def accumulate(loaded: LoadedModel, batch: Batch, **learn: Any) -> dict[str, torch.Tensor]:
    Trainer(loaded, LearnConfig(**learn)).accumulate(batch, Objective(entropy=0.1))
    return gradients(loaded)


@pytest.mark.parametrize("layout", ["tree", "depth_first", "packed", "padded"])
@pytest.mark.parametrize("kind", CONFIGS)
def test_gradients_are_bit_identical_with_and_without(kind: str, layout: str) -> None:
    loaded = make_loaded(kind)
    plain = accumulate(loaded, batch_of(), layout=layout)
    again = accumulate(loaded, batch_of(), layout=layout, activation_checkpointing=True)
    assert all(torch.equal(plain[name], again[name]) for name in plain)


def test_they_are_in_bfloat16_and_with_a_low_rank_update_too() -> None:
    for loaded in (make_loaded(dtype="bfloat16"), make_loaded(lora=LoraConfig(rank=2))):
        plain = accumulate(loaded, batch_of(), layout="tree")
        again = accumulate(loaded, batch_of(), layout="tree", activation_checkpointing=True)
        assert all(torch.equal(plain[name], again[name]) for name in plain)


def test_less_is_kept_between_forward_and_backward() -> None:
    loaded = make_loaded()

    def kept_bytes(**learn: Any) -> int:
        trainer = Trainer(loaded, LearnConfig(layout="tree", **learn))
        (one,) = trainer.planner.plan(batch_of()).passes
        total = 0

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            nonlocal total
            total += tensor.nbytes
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            trainer._labels_of(trainer._hidden(one, Path(loaded.device)), batch_of(), one, entropy=False)
        return total

    assert kept_bytes(activation_checkpointing=True) < kept_bytes() / 2


def test_a_pass_outside_the_scope_is_not_touched() -> None:
    loaded = make_loaded()
    recompute.install(loaded.causal, loaded.source)
    plain = accumulate(loaded, batch_of(), layout="tree")
    assert any(float(g.norm()) for g in plain.values())
    recompute.install(loaded.causal, loaded.source)  # a second time changes nothing
    layers = [m for m in loaded.causal.modules() if getattr(m.forward, "is_recomputed", False)]
    assert len(layers) == loaded.config.num_hidden_layers


def test_a_model_without_layers_that_can_run_again_is_refused_by_name() -> None:
    with pytest.raises(ModelUnusable, match="mine has no layers"):
        recompute.install(nn.Linear(2, 2), "mine")

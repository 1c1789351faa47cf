"""Checkpoints: whole or absent, verified, and a resumed run is bit-identical to one that never stopped."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.unit.learning.backends.tiny import make_batch, random_sequences
from transformers import AutoModelForCausalLM, AutoTokenizer

from leyden.base.config import LearnConfig, LoraConfig
from leyden.base.errors import CheckpointError, ModelUnusable
from leyden.learning.backends.base import Objective
from leyden.learning.backends.embedded import checkpoint
from leyden.learning.backends.embedded.atomic import atomic_folder
from leyden.learning.backends.embedded.attention import attention_scope, causal_kernel
from leyden.learning.backends.embedded.model import LoadedModel, load_model, parameter_fingerprint
from leyden.learning.backends.embedded.trainer import Trainer
from leyden.learning.batch import Batch

Load = Callable[..., LoadedModel]
OBJECTIVE = Objective(learning_rate=1e-2, kl=0.1)


def batches(num: int) -> list[Batch]:
    rng = np.random.default_rng(3)
    return [make_batch(random_sequences(rng, 6), rng) for _ in range(num)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("lora", [None, LoraConfig(rank=4)])
def test_a_resumed_run_has_bit_identical_losses(
    load_tiny: Load, tmp_path: Path, lora: LoraConfig | None, dtype: str
) -> None:
    steps = batches(4)
    straight = load_tiny(lora=lora, dtype=dtype)
    trainer = Trainer(straight, LearnConfig())
    losses = []
    for i, batch in enumerate(steps):
        if i == 2:
            checkpoint.save(tmp_path / "c", straight, trainer)
            drawn = torch.rand(3)
        losses.append(trainer.update([batch], OBJECTIVE).loss)
    resumed = load_tiny(lora=lora, dtype=dtype)
    again = Trainer(resumed, LearnConfig())
    checkpoint.load(tmp_path / "c", resumed, again)
    assert torch.equal(torch.rand(3), drawn)
    assert again.num_steps == 2
    assert [again.update([batch], OBJECTIVE).loss for batch in steps[2:]] == losses[2:]
    assert parameter_fingerprint(resumed.model) == parameter_fingerprint(straight.model)


def test_saved_weights_are_a_plain_folder_that_any_tool_loads(load_tiny: Load, tmp_path: Path) -> None:
    loaded = load_tiny()
    Trainer(loaded, LearnConfig()).update(batches(1), OBJECTIVE)
    checkpoint.save(tmp_path / "c", loaded)
    assert not (tmp_path / "c" / checkpoint.STATE).exists()
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "c")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "c")
    assert tokenizer.chat_template == loaded.chat_template
    ids = torch.tensor([loaded.encode("hello")])
    with torch.no_grad(), attention_scope(causal_kernel):
        ours = loaded.head(loaded.hidden(ids, torch.arange(ids.shape[1])[None]))
        assert torch.allclose(ours, plain(ids).logits, atol=1e-5)


def test_a_checkpoint_of_an_update_is_a_model_with_the_update_in_its_weights(load_tiny: Load, tmp_path: Path) -> None:
    loaded = load_tiny(lora=LoraConfig(rank=4))
    Trainer(loaded, LearnConfig()).update(batches(2), OBJECTIVE)
    checkpoint.save(tmp_path / "c", loaded)
    whole = load_model(tmp_path / "c", dtype=loaded.dtype, max_context=loaded.max_context)
    assert whole.lora is None and whole.chat_template == loaded.chat_template
    ids = torch.tensor([loaded.encode("hello")])
    places = torch.arange(ids.shape[1])[None]
    with torch.no_grad(), attention_scope(causal_kernel):
        ours, theirs = (model.head(model.hidden(ids, places)) for model in (loaded, whole))
        base = load_tiny()
        assert torch.allclose(ours, theirs, atol=1e-4)
        assert not torch.allclose(ours, base.head(base.hidden(ids, places)), atol=1e-4)


def test_an_update_without_its_model_says_which_model_is_missing(load_tiny: Load, tmp_path: Path) -> None:
    checkpoint.save(tmp_path / "c", load_tiny(lora=LoraConfig(rank=4)))
    manifest = json.loads((tmp_path / "c" / checkpoint.MANIFEST).read_text())
    (tmp_path / "c" / checkpoint.MANIFEST).write_text(json.dumps({**manifest, "base": str(tmp_path / "moved")}))
    with pytest.raises(ModelUnusable, match=r"there is no model folder .*moved"):
        load_model(tmp_path / "c")
    (tmp_path / "c" / checkpoint.MANIFEST).unlink()
    adapter = tmp_path / "c" / "adapter_config.json"
    adapter.write_text(json.dumps({**json.loads(adapter.read_text()), "base_model_name_or_path": None}))
    with pytest.raises(ModelUnusable, match="does not say of which model"):
        load_model(tmp_path / "c")


@pytest.mark.parametrize("name", ["model.safetensors", "trainer.safetensors", "config.json", "tokenizer.json"])
def test_a_truncated_file_is_refused_and_nothing_changes(load_tiny: Load, tmp_path: Path, name: str) -> None:
    loaded = load_tiny()
    trainer = Trainer(loaded, LearnConfig())
    trainer.update(batches(1), OBJECTIVE)
    checkpoint.save(tmp_path / "c", loaded, trainer)
    path = tmp_path / "c" / name
    os.truncate(path, path.stat().st_size // 2)
    other = load_tiny()
    before = parameter_fingerprint(other.model)
    with pytest.raises(CheckpointError, match=name):
        checkpoint.load(tmp_path / "c", other, Trainer(other, LearnConfig()))
    path.unlink()
    with pytest.raises(CheckpointError, match=f"lacks {name}"):
        checkpoint.load(tmp_path / "c", other)
    assert parameter_fingerprint(other.model) == before


def test_what_is_no_checkpoint_is_refused(load_tiny: Load, tiny_folder: Path, tmp_path: Path) -> None:
    loaded = load_tiny()
    with pytest.raises(CheckpointError, match="no checkpoint of Leyden"):
        checkpoint.load(tiny_folder, loaded)
    with pytest.raises(CheckpointError, match="no checkpoint of Leyden"):
        checkpoint.load(tmp_path / "absent", loaded)
    checkpoint.save(tmp_path / "weights", loaded)
    with pytest.raises(CheckpointError, match="weights only"):
        checkpoint.load(tmp_path / "weights", loaded, Trainer(loaded, LearnConfig()))
    with pytest.raises(CheckpointError, match="full weights, but this run trains a LoRA update"):
        checkpoint.load(tmp_path / "weights", load_tiny(lora=LoraConfig(rank=4)))
    manifest = tmp_path / "weights" / checkpoint.MANIFEST
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "format": 99}))
    with pytest.raises(CheckpointError, match="format 99"):
        checkpoint.load(tmp_path / "weights", loaded)


def test_a_checkpoint_of_another_model_is_refused(load_tiny: Load, tmp_path: Path) -> None:
    from tests.tiny_model import build_tiny_model

    from leyden.learning.backends.embedded.model import load_model

    wide = load_model(build_tiny_model(tmp_path / "wide", hidden_size=96), dtype="float32")
    checkpoint.save(tmp_path / "c", wide)
    with pytest.raises(CheckpointError, match="of another model"):
        checkpoint.load(tmp_path / "c", load_tiny())


def test_a_save_that_fails_leaves_the_old_checkpoint_and_no_debris(load_tiny: Load, tmp_path: Path) -> None:
    loaded = load_tiny()
    checkpoint.save(tmp_path / "c", loaded)
    with pytest.raises(KeyboardInterrupt), atomic_folder(tmp_path / "c") as folder:
        (folder / "half").write_text("half")
        raise KeyboardInterrupt
    assert [p.name for p in tmp_path.iterdir()] == ["c"]
    checkpoint.load(tmp_path / "c", loaded)
    with pytest.raises(CheckpointError, match="cannot be written"), atomic_folder(tmp_path / "c"):
        raise OSError(28, "No space left on device")
    checkpoint.save(tmp_path / "c", loaded)
    assert [p.name for p in tmp_path.iterdir()] == ["c"]

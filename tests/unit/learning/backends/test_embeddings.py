"""Vectors of texts by a small BERT made here: the mean over a text's own tokens, whatever stands beside it."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import BertConfig, BertModel, BertTokenizerFast  # type: ignore[attr-defined]

from leyden.base.errors import ModelUnusable
from leyden.learning.backends.embeddings import embedder

WORDS = ["red", "fox", "hen", "lake", "tall", "##s", "river", "a", "the"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sentence model with random weights."""
    folder = tmp_path_factory.mktemp("sentences")
    (folder / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]))
    BertTokenizerFast(vocab=str(folder / "vocab.txt")).save_pretrained(folder)
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=5 + len(WORDS), hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32,
        max_position_embeddings=12,
    )  # fmt: skip
    BertModel(config).save_pretrained(folder)
    return folder


def by_hand(folder: Path, text: str) -> torch.Tensor:
    """The same for one text alone, without padding."""
    tokenizer = BertTokenizerFast.from_pretrained(folder)
    model: Any = BertModel.from_pretrained(folder)
    model.eval()
    ids = torch.tensor([tokenizer(text)["input_ids"][:12]])
    with torch.no_grad():
        mean: torch.Tensor = model(input_ids=ids).last_hidden_state[0].mean(dim=0)
    return torch.nn.functional.normalize(mean, dim=0)


def test_a_vector_is_the_mean_of_the_texts_own_tokens_at_length_one(folder: Path) -> None:
    texts = ["a red fox", "the tall hens", "river", "the lake a river the lake", "fox"] * 20  # more than a batch
    vectors_NE = embedder(folder)(texts)
    assert vectors_NE.shape == (100, 16)
    np.testing.assert_allclose(np.linalg.norm(vectors_NE, axis=1), 1.0, atol=1e-6)
    for text, vector_E in list(zip(texts, vectors_NE, strict=True))[:5]:
        np.testing.assert_allclose(vector_E, by_hand(folder, text).numpy(), atol=1e-5)
    np.testing.assert_allclose(vectors_NE[0], vectors_NE[5], atol=1e-6)


def test_no_text_gives_no_vector_and_a_long_one_is_cut(folder: Path) -> None:
    embed = embedder(folder)
    assert embed([]).shape == (0, 16)
    long = embed(["red fox " * 500])
    assert np.isfinite(long).all()


@pytest.mark.parametrize(
    ("files", "says"),
    [
        ({}, "has no config.json"),
        ({"config.json": {"model_type": "none of this world"}}, "no sentence model that can be read"),
        (
            {"config.json": {}, "1_Pooling/config.json": {"pooling_mode_cls_token": True}},
            "wants pooling_mode_cls_token; only the mean",
        ),
    ],
)
def test_a_folder_that_cannot_be_honoured_is_refused(tmp_path: Path, files: dict[str, object], says: str) -> None:
    for name, tree in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(json.dumps(tree))
    with pytest.raises(ModelUnusable, match=says):
        embedder(tmp_path)

"""What texts mean, as vectors: a local folder of a sentence-transformers or other BERT-type model.

Promises: a vector is the mean of the last hidden states over the text's own tokens, at length one, and does not depend
on the texts beside it; nothing is downloaded. A folder whose model wants another pooling is refused. Texts are cut at
the length that the model was made for. For the near-duplicate check of a holdout (`leyden.base.leaks`), not for agents.

Letters of shapes: B = texts of a batch, T = tokens, E = numbers of a vector, N = texts.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from leyden.base.errors import ModelUnusable
from leyden.base.leaks import Embed, Vectors

BATCH = 64
MAX_TOKENS = 256
"""Where the folder does not say how long its texts may be."""


def embedder(folder: Path) -> Embed:
    """Texts to vectors of length one, shape (N, E). Raises ModelUnusable."""
    import torch
    from transformers import AutoModel, AutoTokenizer

    from leyden.learning.backends.embedded.source import quiet

    _check_pooling(folder)
    try:
        with quiet():
            tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
            model: Any = AutoModel.from_pretrained(folder, local_files_only=True, dtype=torch.float32).eval()
    except (OSError, ValueError, KeyError) as error:
        raise ModelUnusable(f"tasks.near_model: {folder} holds no sentence model that can be read: {error}") from None
    limit = _max_tokens(folder, model)

    def embed(texts: Sequence[str]) -> Vectors:
        found = [np.zeros((0, model.config.hidden_size), np.float32)]
        for start in range(0, len(texts), BATCH):
            encoded = tokenizer(
                list(texts[start : start + BATCH]), padding=True, truncation=True, max_length=limit, return_tensors="pt"
            )
            with torch.inference_mode():
                hidden_BTE = model(**encoded).last_hidden_state
                own_BT1 = encoded["attention_mask"][..., None].to(hidden_BTE.dtype)
                mean_BE = (hidden_BTE * own_BT1).sum(dim=1) / own_BT1.sum(dim=1)
                found.append(torch.nn.functional.normalize(mean_BE, dim=1).numpy())
        return np.concatenate(found)

    return embed


def _check_pooling(folder: Path) -> None:
    if not (folder / "config.json").is_file():
        raise ModelUnusable(f"tasks.near_model: {folder} has no config.json; give the folder of a sentence model")
    pooling = _read(folder / "1_Pooling" / "config.json")
    asked = sorted(key for key, value in pooling.items() if key.startswith("pooling_mode_") and value is True)
    if asked and asked != ["pooling_mode_mean_tokens"]:
        raise ModelUnusable(f"tasks.near_model: {folder} wants {', '.join(asked)}; only the mean of tokens is known")


def _max_tokens(folder: Path, model: Any) -> int:
    said = _read(folder / "sentence_bert_config.json").get("max_seq_length")
    places = int(getattr(model.config, "max_position_embeddings", MAX_TOKENS))
    return min(said if isinstance(said, int) and said > 2 else MAX_TOKENS, places)


def _read(path: Path) -> dict[str, Any]:
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return tree if isinstance(tree, dict) else {}

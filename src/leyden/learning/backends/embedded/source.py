"""Where a model comes from: a folder, a hub id or a GGUF file, and what is refused before any weight is used.

Remote code is never run. Every refusal names the model, what is wrong with it and what to change.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging as transformers_logging

from leyden.base.errors import ModelUnusable
from leyden.base.model_names import is_path
from leyden.learning.backends.embedded.attention import ATTENTION_NAME

ADAPTER = "adapter_config.json"
"""File by which a folder with a low-rank update is known."""
LAYERS = ("full_attention", "sliding_attention")
"""Kinds of layers that are supported: a token sees every token before it, or those of a window."""

SUPPORTED_MODELS = (
    "Choose a model whose layers are all full or sliding softmax attention "
    "(Llama, SmolLM, Qwen2, Qwen3, Mistral, Gemma, Gemma 3 and their like)"
)
"""What to do about a refused model."""


def locate(source: str) -> tuple[str, dict[str, Any]]:
    """(what from_pretrained is given, extra arguments for it). Raises ModelUnusable."""
    if not source:
        raise ModelUnusable("no model is named; set policies.NAME.model to a folder, a hub id or a .gguf file")
    path = Path(source).expanduser()
    if path.suffix.lower() == ".gguf":
        if not path.is_file():
            raise ModelUnusable(f"there is no GGUF file {path}; correct policies.NAME.model")
        return str(path.parent), {"gguf_file": path.name}
    if path.is_dir():
        if not (path / "config.json").is_file() and not (path / ADAPTER).is_file():
            raise ModelUnusable(f"{path} holds no config.json, so it is no Hugging Face model folder")
        return str(path), {}
    if path.exists():
        raise ModelUnusable(f"{path} is a file but no .gguf; policies.NAME.model names a folder or a .gguf file")
    if is_path(source, Path()):
        raise ModelUnusable(f"there is no model folder {path}; correct policies.NAME.model")
    return source, {}


def base_of(source: str) -> str | None:
    """The model below a low-rank update, where `source` is the folder of an update alone; None for any other.

    Raises ModelUnusable if the folder does not say.
    """
    folder = Path(source).expanduser()
    if not (folder / ADAPTER).is_file() or (folder / "config.json").is_file():
        return None
    for name, key in (("leyden.json", "base"), (ADAPTER, "base_model_name_or_path")):
        try:
            base = json.loads((folder / name).read_text(encoding="utf-8")).get(key)
        except FileNotFoundError:  # an update that was trained elsewhere
            continue
        except (OSError, ValueError, AttributeError) as error:
            raise ModelUnusable(f"{folder / name} cannot be read: {error}") from error
        if isinstance(base, str) and base:
            return base
    raise ModelUnusable(f"{folder} holds a low-rank update and does not say of which model; merge it into its model")


def read_part(what: str, source: str, read: Callable[[], Any]) -> Any:
    """What `read` returns; whatever transformers raises becomes a ModelUnusable."""
    try:
        return read()
    except (OSError, ValueError, KeyError, ImportError, RuntimeError, SafetensorError) as error:
        first_line = str(error).strip().split("\n")[0]
        raise ModelUnusable(
            f"the {what} of {source!r} cannot be read: {first_line} (looked for a folder of this name, then "
            "for a model of this id on the hub); correct policies.NAME.model"
        ) from error


def read_weights(where: str, options: Mapping[str, Any], source: str) -> PreTrainedModel:
    """All weights in float32, with the attention of this package. Raises ModelUnusable."""
    causal, info = read_part(
        "model",
        source,
        lambda: AutoModelForCausalLM.from_pretrained(
            where,
            dtype=torch.float32,
            attn_implementation=ATTENTION_NAME,
            trust_remote_code=False,
            output_loading_info=True,
            **options,
        ),
    )
    # transformers fills what is missing with random numbers and only logs it.
    absent = sorted(info["missing_keys"])
    if absent:
        raise ModelUnusable(f"the weights of {source} lack {absent[0]} ({len(absent)} in all); fetch the model again")
    if "gguf_file" in options:
        # The weights were unpacked to float32; a config that still claims to be quantised cannot be saved.
        for name in ("quantization_config", "_pre_quantization_dtype"):
            if hasattr(causal.config, name):
                delattr(causal.config, name)
        causal.hf_quantizer = None
    assert isinstance(causal, PreTrainedModel)
    if getattr(causal.config, "quantization_config", None) is not None:
        raise ModelUnusable(f"{source} holds quantised weights, which cannot be trained; choose the full model")
    return causal


def check_config(config: Any, source: str) -> None:
    """Refuse by name what the configuration already says cannot be trained. Raises ModelUnusable."""
    if getattr(config, "is_encoder_decoder", False):
        raise ModelUnusable(f"{source} is an encoder-decoder ({config.model_type}); choose a causal language model")
    refused = sorted(set(getattr(config, "layer_types", None) or ()) - set(LAYERS))
    if refused:
        raise ModelUnusable(
            f"{source} ({config.model_type}) has layers of kind {', '.join(refused)}, in which tokens share a state or "
            f"see others than those before them; trees of shared prefixes have no exact gradient there. "
            f"{SUPPORTED_MODELS}"
        )
    if getattr(config, "use_bidirectional_attention", False):
        raise ModelUnusable(
            f"{source} ({config.model_type}) lets tokens see later ones (use_bidirectional_attention); "
            "choose a causal language model"
        )


def check_windows(config: Any, windows: Sequence[int | None], source: str, max_context: int) -> None:
    """Refuse a model whose layers ask for other windows than its configuration says. Raises ModelUnusable.

    `windows` are what the attention of each layer was given. A window of at least `max_context` is none.
    """
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * len(windows)
    said = [window if kind == "sliding_attention" else None for kind in kinds]

    def met(values: Sequence[int | None]) -> list[int | None]:
        return [value if value is not None and value < max_context else None for value in values]

    if met(said) != met(windows):
        raise ModelUnusable(
            f"{source} ({config.model_type}): its configuration says sliding_attention over {window} tokens in "
            f"{sum(value is not None for value in said)} of {len(said)} layers, but "
            f"{sum(value is not None for value in windows)} ask for it; set policies.NAME.max_context to at most "
            f"{window} or choose another model"
        )


def read_template(tokenizer: Any, replacement: Path | None, source: str) -> str:
    """Text of the chat template: the file `replacement`, or the tokenizer's own. Raises ModelUnusable."""
    if replacement is not None:
        try:
            return replacement.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ModelUnusable(f"the chat template {replacement} cannot be read: {error}") from error
    template = tokenizer.chat_template
    if isinstance(template, dict):
        template = template.get("default")
    if not template:
        raise ModelUnusable(
            f"the tokenizer of {source} has no chat template; set policies.NAME.chat_template to a file with one"
        )
    return str(template)


@contextmanager
def quiet() -> Iterator[None]:
    """No progress bars of transformers inside the block; Leyden shows its own."""
    shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        if shown:
            transformers_logging.enable_progress_bar()  # type: ignore[no-untyped-call]

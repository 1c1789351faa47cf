"""A causal language model with its tokenizer, ready to be trained and sampled from.

Promises: parameters are float32 and shared by trainer and sampler; the computation is bfloat16 or float32;
every attention layer goes through `attention.attention_scope`; logits are exactly `head(hidden(...))`. A
model for which one of these does not hold is refused by name when it is loaded, never approximated. Remote
code is never run.

Does not: apply any mask from token identity. Whether the tokenizer has a pad token, or pad equals eos, is of
no consequence: lengths say what is real.

    B rows   T columns   E hidden size   V vocabulary
"""

import hashlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoTokenizer, PreTrainedModel

from leyden.base.config import LoraConfig
from leyden.base.errors import ModelUnusable
from leyden.learning.backends.embedded import precision
from leyden.learning.backends.embedded.atomic import atomic_folder
from leyden.learning.backends.embedded.attention import attention_scope, causal_kernel
from leyden.learning.backends.embedded.kernels import kernel_for
from leyden.learning.backends.embedded.layouts import Segments
from leyden.learning.backends.embedded.lora import add_lora, merge_update
from leyden.learning.backends.embedded.source import (
    SUPPORTED_MODELS,
    base_of,
    check_config,
    check_windows,
    locate,
    quiet,
    read_part,
    read_template,
    read_weights,
)

ComputeType = Literal["bfloat16", "float32"]

MIXING_TOLERANCE = 1e-4
"""Largest relative change of hidden states by a sequence that attention hides. The same operations run on the same
numbers, so dense models give 0; experts are computed in other groups and may round in another way."""


@dataclass(slots=True, kw_only=True)
class LoadedModel:
    """A model in memory. The tokenizer is used through the methods here only: a fast one is not
    thread-safe."""

    model: nn.Module
    """The transformers model, or the peft model around it; parameters float32, in evaluation mode."""
    tokenizer: Any
    """Its tokenizer; hold `tokenizer_lock` to touch it."""
    chat_template: str
    """Text of the Jinja template in use."""
    chat_template_hash: str
    """First 16 hex digits of its SHA-256."""
    eos_ids: tuple[int, ...]
    """Ids that end a completion, ascending."""
    vocab_size: int
    """Rows of the output head, V."""
    max_context: int
    """Prompt and completion together; never more than the model's own limit."""
    dtype: ComputeType
    """Type of the computation."""
    device: torch.device
    """Where the parameters are."""
    source: str
    """What was asked for: folder, hub id or GGUF file."""
    lora: LoraConfig | None = None
    """The low-rank update that is trained, if not all weights."""
    tokenizer_lock: threading.RLock = field(default_factory=threading.RLock)
    """Held while the tokenizer is used."""

    @property
    def causal(self) -> PreTrainedModel:
        """The transformers model below any adapter."""
        if self.lora is None:
            assert isinstance(self.model, PreTrainedModel)
            return self.model
        base = self.model.get_base_model()  # type: ignore[operator]
        assert isinstance(base, PreTrainedModel)
        return base

    @property
    def config(self) -> Any:
        """The transformers configuration."""
        return self.causal.config

    @property
    def head(self) -> nn.Module:
        """Hidden states (..., E) to logits (..., V)."""
        head = self.causal.get_output_embeddings()  # type: ignore[no-untyped-call]
        assert isinstance(head, nn.Module)
        return head

    def hidden(self, ids_BT: Tensor, positions_BT: Tensor) -> Tensor:
        """Last hidden states (B, T, E), after the final norm. Needs an `attention_scope` around it."""
        with self.compute():
            out: Tensor = self.causal.base_model(
                input_ids=ids_BT, position_ids=positions_BT, use_cache=False
            ).last_hidden_state
        return out

    @contextmanager
    def compute(self) -> Iterator[None]:
        """Mixed precision where it was asked for; linear layers need none of it (see `precision`)."""
        # Autocast serves what is no nn.Linear (mixtures of experts). Its cache of casts is shared by all
        # threads of the process, so it stays off.
        scope = (
            torch.autocast(self.device.type, torch.bfloat16, cache_enabled=False)
            if self.dtype == "bfloat16" and not precision.is_exact()
            else nullcontext()
        )
        with scope:
            yield

    def refresh(self) -> None:
        """Call after every write to trained parameters; see `precision`."""
        precision.refresh(self.model)

    def trainable(self) -> dict[str, nn.Parameter]:
        """Parameters that are trained, by name, each once although it may be tied."""
        return {name: p for name, p in self.model.named_parameters() if p.requires_grad}

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        """Ids of `text`; `special` adds what the tokenizer puts around a text of its own."""
        with self.tokenizer_lock:
            ids: list[int] = self.tokenizer.encode(text, add_special_tokens=special)
        return ids

    def decode(self, ids: Sequence[int], *, skip_special: bool = False) -> str:
        """Text of `ids`, without any clean-up of spaces."""
        with self.tokenizer_lock:
            text: str = self.tokenizer.decode(
                list(ids), skip_special_tokens=skip_special, clean_up_tokenization_spaces=False
            )
        return text

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **kwargs: Any,
    ) -> str:
        """The conversation as text by the chat template. What the template raises goes through."""
        with self.tokenizer_lock:
            text: str = self.tokenizer.apply_chat_template(
                list(messages),
                tools=list(tools) if tools else None,
                add_generation_prompt=add_generation_prompt,
                tokenize=False,
                chat_template=self.chat_template,
                **kwargs,
            )
        return text


def load_model(
    path_or_hub_id: str | Path,
    *,
    dtype: ComputeType = "bfloat16",
    lora: LoraConfig | None = None,
    chat_template: Path | None = None,
    max_context: int = 2048,
    seed: int = 0,
) -> LoadedModel:
    """Load a folder, a hub id or a GGUF file; of a folder with a low-rank update (a checkpoint of a policy with `lora`)
    its base with the update in its weights. `chat_template` is a file that replaces the tokenizer's own.

    `seed` is that of new (LoRA) parameters; the global random state is left as it was. Raises ModelUnusable.
    """
    source = str(path_or_hub_id)
    where, options = locate(source)
    base = base_of(source)
    below, of_below = (where, options) if base is None else locate(base)
    with quiet():
        config = read_part("configuration", base or source, lambda: AutoConfig.from_pretrained(below, **of_below))
        check_config(config, source)
        tokenizer = read_part("tokenizer", source, lambda: AutoTokenizer.from_pretrained(where, **options))
        template = read_template(tokenizer, chat_template, source)
        causal = read_weights(below, of_below, base or source)
        if base is not None:
            causal = merge_update(causal, where)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    nn.Module.to(causal, device)
    return wrap(causal, tokenizer, template, dtype=dtype, lora=lora, max_context=max_context, source=source, seed=seed)


def wrap(
    causal: PreTrainedModel,
    tokenizer: Any,
    template: str,
    *,
    dtype: ComputeType,
    lora: LoraConfig | None,
    max_context: int,
    source: str,
    seed: int = 0,
) -> LoadedModel:
    """A LoadedModel from parts in memory. `causal` is float32 and was made with our attention."""
    limit = getattr(causal.config, "max_position_embeddings", None)
    if limit is not None and max_context > limit:
        raise ModelUnusable(
            f"{source} has positions for {limit} tokens, but max_context is {max_context}; "
            f"set policies.NAME.max_context to at most {limit}"
        )
    nn.Module.eval(causal)
    for module in causal.modules():
        if isinstance(module, nn.Embedding):
            # Otherwise torch drops the gradient of the pad token's row, which is the end token's where they
            # are one.
            module.padding_idx = None
    # A folder that is saved later carries the template that was used.
    tokenizer.chat_template = template or None
    model: nn.Module = causal
    if lora is not None:
        model = add_lora(causal, lora, source, seed)
    if dtype == "bfloat16":
        precision.lower(model)
    head = causal.get_output_embeddings()  # type: ignore[no-untyped-call]
    if head is None:
        raise ModelUnusable(f"{source} is a {type(causal).__name__} without an output head; choose a causal LM")
    loaded = LoadedModel(
        model=model,
        tokenizer=tokenizer,
        chat_template=template,
        chat_template_hash=hashlib.sha256(template.encode()).hexdigest()[:16],
        eos_ids=_eos_ids(causal, tokenizer, source),
        vocab_size=int(head.weight.shape[0]),
        max_context=max_context,
        dtype=dtype,
        device=next(causal.parameters()).device,
        source=source,
        lora=lora,
    )
    _check_anatomy(loaded)
    return loaded


def load_tokenizer(path_or_hub_id: str | Path) -> Any:
    """The tokenizer alone, for whoever only reads ids; not thread-safe. Raises ModelUnusable.

    A hub is not asked: whoever sampled has it in the cache, and one that cannot be reached is tried for a minute.
    """
    source = str(path_or_hub_id)
    where, options = locate(source)
    with quiet():
        return read_part(
            "tokenizer", source, lambda: AutoTokenizer.from_pretrained(where, local_files_only=True, **options)
        )


def convert_gguf(gguf_path: Path, out_dir: Path, progress: Callable[[str], None] | None = None) -> None:
    """Write the model in `gguf_path` as a plain Hugging Face folder. `out_dir` appears whole or not at all.

    `progress` gets one line per phase. Raises ModelUnusable.
    """
    say = progress or (lambda line: None)
    source = str(gguf_path)
    where, options = locate(source)
    with quiet():
        say(f"reading {gguf_path.name}")
        tokenizer = read_part("tokenizer", source, lambda: AutoTokenizer.from_pretrained(where, **options))
        say("unpacking weights")
        causal = read_weights(where, options, source)
        say(f"writing {out_dir}")
        with atomic_folder(out_dir) as folder:
            save_plain(causal, tokenizer, folder)


def save_plain(causal: PreTrainedModel, tokenizer: Any, folder: Path) -> None:
    """Config, safetensors and tokenizer (with its chat template) into an existing folder."""
    name = causal.config._attn_implementation
    # The name of our attention function means nothing to whoever loads this folder.
    causal.config._attn_implementation = "sdpa"
    try:
        with quiet():
            causal.save_pretrained(folder)
            tokenizer.save_pretrained(folder)
    finally:
        causal.config._attn_implementation = name


def parameter_fingerprint(model: nn.Module) -> str:
    """Hex digest over the names and exact bytes of all parameters; equal if and only if the weights are."""
    digest = hashlib.blake2b(digest_size=16)
    for name, parameter in model.named_parameters():
        digest.update(name.encode())
        digest.update(parameter.detach().cpu().contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _eos_ids(causal: PreTrainedModel, tokenizer: Any, source: str) -> tuple[int, ...]:
    found: set[int] = set()
    generation = getattr(causal, "generation_config", None)
    for value in (
        tokenizer.eos_token_id,
        causal.config.eos_token_id,
        getattr(generation, "eos_token_id", None),
    ):
        if isinstance(value, int):
            found.add(value)
        elif value is not None:
            found.update(int(v) for v in value)
    if not found:
        raise ModelUnusable(f"neither the model nor the tokenizer of {source} names an end-of-sequence token")
    return tuple(sorted(found))


def _check_anatomy(loaded: LoadedModel) -> None:
    """Refuse a model whose layers bypass the kernel or whose logits are not `head(hidden)`."""
    calls: list[nn.Module] = []
    windows: list[int | None] = []

    def counting(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, scaling: float, window: int | None) -> Tensor:
        calls.append(module)
        windows.append(window)
        return causal_kernel(module, q, k, v, scaling, window)

    ids_BT = torch.arange(5, device=loaded.device)[None] % loaded.vocab_size
    positions_BT = torch.arange(5, device=loaded.device)[None]
    name = f"{loaded.source} ({loaded.config.model_type})"
    with torch.no_grad(), attention_scope(counting), loaded.compute():
        hidden_BTE = loaded.hidden(ids_BT, positions_BT)
        num_calls = len(calls)
        logits_BTV = loaded.head(hidden_BTE)
        whole_BTV = loaded.causal(input_ids=ids_BT, position_ids=positions_BT, use_cache=False).logits
    num_layers = int(loaded.config.num_hidden_layers)
    if num_calls != num_layers:
        raise ModelUnusable(
            f"{name}: {num_calls} of {num_layers} layers use plain softmax attention; linear, state-space and "
            f"custom attention are not supported. {SUPPORTED_MODELS}"
        )
    check_windows(loaded.config, windows[:num_layers], loaded.source, loaded.max_context)
    if not torch.allclose(logits_BTV.float(), whole_BTV.float(), rtol=1e-2, atol=1e-2):
        raise ModelUnusable(f"{name} changes its logits after the output layer, which is not supported")
    if not _is_blind(loaded):
        raise ModelUnusable(
            f"{name} passes something from token to token beside its attention, as a recurrent state or a convolution "
            f"does; sequences that share a row or a prefix have no exact gradient there. {SUPPORTED_MODELS}"
        )


def _is_blind(loaded: LoadedModel) -> bool:
    """Whether a sequence comes out the same behind two others that its attention does not see.

    Whatever passes from one to the other does not go through attention.
    """
    num = 5
    kernel = kernel_for(Segments((0, num, 2 * num)), (1, 2 * num), loaded.device)
    ids_T = torch.arange(num, device=loaded.device)
    positions_BT = torch.cat([ids_T, ids_T])[None]
    found = []
    with torch.no_grad(), attention_scope(kernel):
        for first in (1, 2):
            ids_BT = torch.cat([ids_T * 3 + first, ids_T])[None] % loaded.vocab_size
            found.append(loaded.hidden(ids_BT, positions_BT)[:, num:].float())
    return bool((found[0] - found[1]).norm() <= MIXING_TOLERANCE * found[0].norm())

"""Low-rank updates: beside a model that is to be trained, and added to the weights of one that is read."""

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from leyden.base.config import LoraConfig
from leyden.base.errors import ModelUnusable
from leyden.learning.backends.embedded.source import read_part


def add_lora(causal: PreTrainedModel, lora: LoraConfig, source: str, seed: int) -> nn.Module:
    """`causal` inside a peft model with a fresh update that changes nothing yet. Raises ModelUnusable for a target
    that is no linear layer or embedding of `source`."""
    from peft import LoraConfig as PeftConfig
    from peft import TaskType, get_peft_model

    _check_targets(causal, lora.targets, source)
    peft_config = PeftConfig(
        task_type=TaskType.CAUSAL_LM,
        r=lora.rank,
        lora_alpha=lora.alpha,  # type: ignore[arg-type]
        lora_dropout=0.0,
        target_modules=list(lora.targets) or "all-linear",
    )
    with torch.random.fork_rng(devices=[]), _without_warnings():
        torch.manual_seed(seed)
        try:
            model: nn.Module = get_peft_model(causal, peft_config)
        except ValueError as error:
            raise ModelUnusable(
                f"policies.NAME.lora.targets = {list(lora.targets)} cannot be used with {source}: {error}"
            ) from error
    model.eval()
    return model


def merge_update(causal: PreTrainedModel, folder: str) -> PreTrainedModel:
    """`causal` with the update in `folder` added to its weights. Raises ModelUnusable."""
    from peft import PeftModel

    def merged() -> Any:
        with _without_warnings():
            return PeftModel.from_pretrained(causal, folder).merge_and_unload()

    made = read_part("low-rank update", folder, merged)
    assert isinstance(made, PreTrainedModel)
    return made


def _check_targets(causal: PreTrainedModel, targets: Sequence[str], source: str) -> None:
    """Each is the last part, or the last parts, of the name of a layer that can have an update: peft leaves out what it
    does not find if it finds another."""
    layers = [(name, one) for name, one in causal.named_modules() if isinstance(one, (nn.Linear, nn.Embedding))]
    for target in targets:
        if not any(name == target or name.endswith(f".{target}") for name, _ in layers):
            last = {name.rpartition(".")[2]: isinstance(one, nn.Embedding) for name, one in layers}
            known = sorted(last, key=lambda name: (last[name], name))
            raise ModelUnusable(
                f"policies.NAME.lora.targets names {target!r}, which is no linear layer or embedding of {source}; "
                f"it has {', '.join(known)}"
            )


@contextmanager
def _without_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        # peft 0.21 asks transformers 5.24 for an attribute that has been renamed; we cannot change that.
        warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing.*", category=FutureWarning)
        yield

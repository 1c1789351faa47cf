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
    that is no linear layer of `source`."""
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
        model: nn.Module = get_peft_model(causal, peft_config)
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
    """Each is the last part, or the last parts, of the name of a linear layer: peft leaves out what it does not find
    if it finds another."""
    linear = [name for name, module in causal.named_modules() if isinstance(module, nn.Linear)]
    for target in targets:
        if not any(name == target or name.endswith(f".{target}") for name in linear):
            known = sorted({name.rpartition(".")[2] for name in linear})
            raise ModelUnusable(
                f"policies.NAME.lora.targets names {target!r}, which is no linear layer of {source}; "
                f"it has {', '.join(known)}"
            )


@contextmanager
def _without_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        # peft 0.21 asks transformers 5.24 for an attribute that has been renamed; we cannot change that.
        warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing.*", category=FutureWarning)
        yield

"""Several policies in one process: one base model in memory, with an adapter for each that is trained.

Promises: policies that leave their base as it is (a LoRA update, or nothing trained at all) and name the same model and
type share every parameter of it, bfloat16 copies and what the sampler packs of them included; each has a module tree of
its own with its own adapter, so trainer, checkpoint and sampler of one know nothing of the others. A policy whose
weights are all trained has a model of its own. One forward pass runs at a time; decode steps of policies with one base
are one pass, in which each row reads the adapter of its policy.
"""

import copy
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from torch import nn
from transformers import PreTrainedModel

from leyden.base.config import LearnConfig, PolicyConfig
from leyden.learning.backends.embedded.backend import EmbeddedBackend
from leyden.learning.backends.embedded.joint import Turn
from leyden.learning.backends.embedded.model import LoadedModel, load_model, load_tokenizer, wrap
from leyden.learning.backends.embedded.sampler import PREFIX_BYTES
from leyden.learning.backends.embedded.source import read_template


def backends_of(
    policies: Mapping[str, PolicyConfig], learns: Mapping[str, LearnConfig], *, seed: int
) -> dict[str, EmbeddedBackend]:
    """A backend for each policy; `model` and `chat_template` are paths as they are. Raises ModelUnusable, ConfigError.

    All of them want the same key.
    """
    loaded = load_together(policies, seed=seed)
    turn = Turn()
    made: dict[str, EmbeddedBackend] = {}
    try:
        for name, settings in policies.items():
            made[name] = EmbeddedBackend(
                name, settings, learns[name], seed=seed, loaded=loaded[name], turn=turn,
                # Keys and values depend on the adapter, so the room is divided.
                prefix_bytes=PREFIX_BYTES // len(policies),
            )  # fmt: skip
    except BaseException:
        for backend in made.values():
            backend.close()
        raise
    keys = [backend.engine_key for backend in made.values()]
    for backend in made.values():
        backend.engine_key = keys[0]
    return made


def load_together(policies: Mapping[str, PolicyConfig], *, seed: int = 0) -> dict[str, LoadedModel]:
    """The model of each policy, with as few copies of weights in memory as they allow. Raises ModelUnusable."""
    sharing = Counter((one.model, one.dtype) for one in policies.values() if _leaves_base(one))
    bases: dict[tuple[str, str], LoadedModel] = {}
    found: dict[str, LoadedModel] = {}
    for name, one in policies.items():
        template = Path(one.chat_template) if one.chat_template else None
        if not _leaves_base(one) or sharing[one.model, one.dtype] == 1:
            found[name] = load_model(
                one.model,
                dtype=one.dtype,
                lora=one.lora,
                chat_template=template,
                max_context=one.max_context,
                seed=seed,
            )
            continue
        base = bases.get((one.model, one.dtype))
        if base is None:
            # The context is that of a view: no policy's own may be refused for the sake of another.
            base = load_model(one.model, dtype=one.dtype, chat_template=template, max_context=8)
            base.causal.requires_grad_(False)
            bases[one.model, one.dtype] = base
        found[name] = _view(base, one, template, seed)
    return found


def _leaves_base(policy: PolicyConfig) -> bool:
    return policy.lora is not None or not policy.trainable


def _view(base: LoadedModel, policy: PolicyConfig, template: Path | None, seed: int) -> LoadedModel:
    """A model of its own that shares the parameters of `base`. Raises ModelUnusable."""
    causal = twin(base.causal)
    assert isinstance(causal, PreTrainedModel)
    tokenizer = load_tokenizer(base.source)  # one is not thread-safe, and its template is the policy's
    return wrap(
        causal, tokenizer, read_template(tokenizer, template, base.source), dtype=policy.dtype,
        lora=policy.lora, max_context=policy.max_context, source=base.source, seed=seed,
    )  # fmt: skip


def twin(model: nn.Module) -> nn.Module:
    """A module tree of its own over the very same parameters and buffers: a layer put into one is not in the other."""
    return _twin(model, {}, {})


def _twin(module: nn.Module, seen: dict[int, nn.Module], configs: dict[int, object]) -> nn.Module:
    if id(module) in seen:
        return seen[id(module)]
    made = copy.copy(module)
    seen[id(module)] = made
    state = made.__dict__
    # _parameters and _buffers stay the same dictionaries: nothing writes to them, for the base is not trained.
    state["_modules"] = {
        name: None if child is None else _twin(child, seen, configs) for name, child in module._modules.items()
    }
    config = state.get("config")
    if config is not None:
        # Saving changes the name of the attention for a moment, and an adapter writes into it.
        state["config"] = configs.setdefault(id(config), copy.copy(config))
    return made

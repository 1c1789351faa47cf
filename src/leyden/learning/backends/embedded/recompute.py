"""Activation checkpointing: decoder layers keep their input only and run again in the backward.

Promises: gradients are those without it, bit for bit, since the same operations run on the same numbers; only passes
inside `recompute_scope` are touched, so sampling never is. The repeated forward runs under the attention kernel of
its pass, also in a backward thread of its own. A model whose layers cannot be found is refused by name.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from leyden.base.errors import ModelUnusable
from leyden.learning.backends.embedded import fused
from leyden.learning.backends.embedded.attention import AttentionKernel, attention_scope, current_kernel
from leyden.learning.backends.embedded.scope import held

_active: ContextVar[bool] = ContextVar("leyden_recompute", default=False)


def recompute_scope() -> AbstractContextManager[None]:
    """Layers prepared by `install` keep only their input for passes inside, in this thread."""
    return held(_active, True)


@contextmanager
def _again(kernel: AttentionKernel, is_fused: bool) -> Iterator[None]:
    """What the repeated forward needs of the scopes around the first."""
    with attention_scope(kernel), fused.fused_scope() if is_fused else nullcontext():
        yield


def install(model: nn.Module, name: str) -> None:
    """Prepare every decoder layer of `model`, once. Raises ModelUnusable with `name` if it has none."""
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise ModelUnusable(f"{name} has no layers that can be run again; set learn.activation_checkpointing = false")
    for layer in layers:
        if not getattr(layer.forward, "is_recomputed", False):
            layer.forward = _wrapped(layer.forward)


def _wrapped(forward: Callable[..., Any]) -> Callable[..., Any]:
    """`forward` that is run again in the backward where a scope asks for it."""

    def run(*args: Any, **kwargs: Any) -> Any:
        if not (_active.get() and torch.is_grad_enabled()):
            return forward(*args, **kwargs)
        again = _again(current_kernel(), fused.is_active())

        def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
            return nullcontext(), again

        return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, context_fn=contexts, **kwargs)

    run.is_recomputed = True  # type: ignore[attr-defined]
    return run

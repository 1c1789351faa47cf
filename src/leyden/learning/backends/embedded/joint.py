"""One forward pass at a time, and one for all samplers whose policies share a base model.

Promises: of samplers that share a `Turn`, no two compute at once. Decode steps that meet are one pass: linear layers
over the rows of all, each row with the adapter of its policy and the cache of its sampler. Such a pass reads the base
once instead of once for each policy, which is most of its time while rows are few. A sampler that decodes is waited
for, PATIENCE_S at most while nothing runs; one that has nothing to decode is not.

    B rows of a step   T rows of a pass   V vocabulary
"""

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from leyden.learning.backends.embedded.flat_layers import FlatAttention, FlatModel

PATIENCE_S = 0.02
"""Between two passes a sampler draws and hands out tokens, which takes 1 to 8 ms for 64 rows."""
ROW_STEPS = (1, 2, 4, 8)
"""Decode passes are padded to one of these numbers of rows or to a multiple of the last: the CPU's matrix kernels are
compiled anew for every number of rows they have not seen, which takes as long as 20 products."""


@dataclass(slots=True, eq=False)
class Step:
    """The next token of each sequence of one sampler."""

    sampler: object
    """Whose."""
    model: FlatModel
    head: Any
    """Hidden states to logits."""
    ids_B: np.ndarray
    places_B: np.ndarray
    attention: FlatAttention
    logits_BV: Tensor | None = None
    error: BaseException | None = None

    @property
    def is_over(self) -> bool:
        """Whether it was computed, or failed."""
        return self.logits_BV is not None or self.error is not None


class Turn:
    """Who computes; shared by samplers that share the machine. Its methods are called by their threads."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._is_taken = False
        self._free_since = 0.0
        self._decoding: set[object] = set()
        self._steps: list[Step] = []

    def expect(self, sampler: object, decodes: bool) -> None:
        """Say whether a sampler has sequences, so that a step of it comes soon."""
        if decodes != (sampler in self._decoding):
            with self._changed:
                (self._decoding.add if decodes else self._decoding.discard)(sampler)
                self._changed.notify_all()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Nobody else computes inside."""
        with self._changed:
            self._changed.wait_for(lambda: not self._is_taken)
            self._is_taken = True
        try:
            yield
        finally:
            self._give_back()

    def logits(self, step: Step) -> Tensor:
        """Logits (B, V) of a step, computed by this thread or by that of another sampler. Raises what the pass
        raised."""
        with self._changed:
            self._steps.append(step)
            self._changed.notify_all()
            arrived = time.monotonic()
            while not step.is_over:
                left_s = max(arrived, self._free_since) + PATIENCE_S - time.monotonic()
                if not self._is_taken and (left_s <= 0 or self._decoding <= {s.sampler for s in self._steps}):
                    break
                # While another computes its end is announced; the bound is for a thread that died.
                self._changed.wait(1.0 if self._is_taken else left_s)
            steps = []
            if not step.is_over:
                steps, self._steps, self._is_taken = self._steps, [], True
        if steps:
            try:
                _compute(steps)
            except BaseException as error:
                for one in steps:
                    one.error = error
                raise
            finally:
                self._give_back()
        if step.error is not None:
            raise RuntimeError(f"the pass of several samplers failed: {step.error}") from step.error
        assert step.logits_BV is not None
        return step.logits_BV

    def _give_back(self) -> None:
        with self._changed:
            self._is_taken = False
            self._free_since = time.monotonic()
            self._changed.notify_all()


def num_rows(number: int) -> int:
    """Rows of the pass for so many."""
    return next((step for step in ROW_STEPS if number <= step), -(-number // ROW_STEPS[-1]) * ROW_STEPS[-1])


def pad(values: np.ndarray, num: int) -> np.ndarray:
    """Behind the values zeros, `num` in all."""
    out = np.zeros(num, np.int64)
    out[: len(values)] = values
    return out


def _compute(steps: Sequence[Step]) -> None:
    """Logits of all, in one pass for each base model."""
    by_base: dict[int, list[Step]] = {}
    for step in steps:
        by_base.setdefault(id(step.model.embedding), []).append(step)
    for same in by_base.values():
        _compute_together(same)


def _compute_together(steps: Sequence[Step]) -> None:
    model = steps[0].model
    ends = np.cumsum([len(step.ids_B) for step in steps])
    rows = [slice(int(end) - len(step.ids_B), int(end)) for step, end in zip(steps, ends, strict=True)]
    num = num_rows(int(ends[-1]))
    device = model.embedding.device
    ids_T, places_T = (
        torch.from_numpy(pad(np.concatenate(values), num)).to(device)
        for values in ([step.ids_B for step in steps], [step.places_B for step in steps])
    )
    attention = _Several([(part, step.attention) for part, step in zip(rows, steps, strict=True)])
    adapted = [(part, step.model.adapter) for part, step in zip(rows, steps, strict=True)]
    hidden_TE = model.hidden(ids_T, places_T, attention, adapted)
    # An adapter of the head, or a head of its own, makes it another layer.
    if all(step.head.weight is steps[0].head.weight and not hasattr(step.head, "base_layer") for step in steps):
        logits_TV = steps[0].head(hidden_TE)
        for part, step in zip(rows, steps, strict=True):
            step.logits_BV = logits_TV[part]
    else:
        for part, step in zip(rows, steps, strict=True):
            step.logits_BV = step.head(hidden_TE[part])


class _Several:
    """Attention of rows of several caches, one behind the other; for the padding behind them it is 0."""

    def __init__(self, parts: Sequence[tuple[slice, FlatAttention]]) -> None:
        self._parts = parts

    def store(self, layer: int, k_TKD: Tensor, v_TKD: Tensor) -> None:
        for rows, attention in self._parts:
            attention.store(layer, k_TKD[rows], v_TKD[rows])

    def attend(self, layer: int, q_THD: Tensor, scaling: float, window: int | None) -> Tensor:
        found = [attention.attend(layer, q_THD[rows], scaling, window) for rows, attention in self._parts]
        num_padded = len(q_THD) - self._parts[-1][0].stop
        if num_padded:
            found.append(found[0].new_zeros(num_padded, *found[0].shape[1:]))
        return torch.cat(found) if len(found) > 1 else found[0]

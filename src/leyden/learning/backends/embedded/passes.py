"""How the sampler computes: by the flat layers of a known family, or by the modules of any other.

Promises: `fill` computes prompt tokens into the cache, `logits` one new token of every slot, `whole` one sequence
without a cache; both ways compute the same up to rounding. The first two take the turn (see `joint`). It does not know
requests.

    T tokens of a pass   R rows of one pass   Q new tokens per row   E hidden size   V vocabulary
"""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from leyden.learning.backends.embedded import shadow
from leyden.learning.backends.embedded.attention import attention_scope, causal_kernel
from leyden.learning.backends.embedded.cache import SlotCache, SlotKernel, Trunk
from leyden.learning.backends.embedded.flat import DecodeAttention, FillAttention, Segment
from leyden.learning.backends.embedded.flat_layers import FlatModel, flat_model, probe
from leyden.learning.backends.embedded.joint import Step, Turn, num_rows, pad
from leyden.learning.backends.embedded.model import LoadedModel

WIDTH_STEP = 16
FLAT_STEP = 64
"""Prefill passes are padded to a multiple of WIDTH_STEP tokens a row or of FLAT_STEP tokens in all, for the reason of
`joint.ROW_STEPS`; without it compilations took half of the time."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """Tokens that are to be computed into a slot."""

    slot: int
    ids: np.ndarray
    start: int
    """Column of the first."""
    trunk: Trunk | None = None
    """What comes before the slot."""

    def part(self, done: int, num: int) -> Segment:
        """`num` of the tokens, from `done` on."""
        return Segment(self.slot, self.start + done, num, self.trunk)


class Passes(Protocol):
    """Forward passes over a cache."""

    knows_trunks: bool
    """Whether sequences may have a trunk."""

    def fill(self, cache: SlotCache, prompts: Sequence[Prompt], budget: int) -> None:
        """Compute prompts into their slots, at most `budget` tokens at once; the slots are neighbours."""

    def logits(
        self, cache: SlotCache, ids_B: np.ndarray, columns_B: np.ndarray, trunks: Sequence[Trunk | None]
    ) -> Tensor:
        """Logits (B, V) of the new tokens of slots 0..B-1, which stand at these columns."""

    def expect(self, decodes: bool) -> None:
        """Say whether `logits` is soon called, or called again."""

    def whole(self, ids_T: Tensor) -> Tensor:
        """Logits (T, V) of one sequence."""

    def refresh(self) -> None:
        """The weights have changed, and the clone has taken them."""

    def stale(self) -> int:
        """Layers that hold other weights than the clone."""


def passes_of(causal: Any, loaded: LoadedModel, turn: Turn | None = None) -> Passes:
    """The quickest way that computes what the model does; `causal` is the clone of it that the sampler reads."""
    flat = flat_model(causal, loaded)
    head = causal.get_output_embeddings()
    turn = turn or Turn()
    return FlatPasses(flat, head, loaded, turn) if flat is not None else ModulePasses(causal, loaded, turn)


class FlatPasses:
    """By the layers of `flat_layers`."""

    def __init__(self, model: FlatModel, head: Any, loaded: LoadedModel, turn: Turn) -> None:
        self.model, self._head, self._turn, self._device = model, head, turn, loaded.device
        windows = [window for window in model.windows if window is not None]
        # Only the CPU's kernel tells the sums of its softmax.
        self.knows_trunks = (
            self._device.type == "cpu" and min(windows, default=loaded.max_context) >= loaded.max_context
        )

    def fill(self, cache: SlotCache, prompts: Sequence[Prompt], budget: int) -> None:
        for segments, ids_T in _packed(prompts, budget):
            places_T = np.concatenate([np.arange(s.start, s.start + s.num) + s.above for s in segments])
            num = _up(len(ids_T), FLAT_STEP if len(ids_T) > FLAT_STEP else WIDTH_STEP)
            attention = FillAttention(cache, segments)
            with self._turn.alone():
                self.model.fill(self._padded(ids_T, num), self._padded(places_T, num), attention)

    def logits(
        self, cache: SlotCache, ids_B: np.ndarray, columns_B: np.ndarray, trunks: Sequence[Trunk | None]
    ) -> Tensor:
        places_B = columns_B + np.asarray([len(trunk) if trunk is not None else 0 for trunk in trunks])
        attention = DecodeAttention(cache, columns_B, trunks)
        return self._turn.logits(Step(self, self.model, self._head, ids_B, places_B, attention))

    def expect(self, decodes: bool) -> None:
        self._turn.expect(self, decodes)

    def whole(self, ids_T: Tensor) -> Tensor:
        logits_TV: Tensor = self._head(probe(self.model, ids_T))
        return logits_TV

    def refresh(self) -> None:
        self.model.refresh()

    def stale(self) -> int:
        return self.model.stale()

    def _padded(self, values: np.ndarray, num: int) -> Tensor:
        return torch.from_numpy(pad(values, num)).to(self._device)


class ModulePasses:
    """By the modules of the clone, in rows of equal length."""

    knows_trunks = False

    def __init__(self, causal: Any, loaded: LoadedModel, turn: Turn) -> None:
        self._causal, self._turn, self._device = causal, turn, loaded.device
        self._compute = loaded.compute if shadow.needs_autocast(loaded.causal) else contextlib.nullcontext

    def fill(self, cache: SlotCache, prompts: Sequence[Prompt], budget: int) -> None:
        # Rows of a pass are padded to the longest, so neighbours should be alike; the caller sorts them.
        for chunk in _alike([len(one.ids) for one in prompts], budget):
            rows = [prompts[i] for i in chunk]
            done = 0
            while (most := max(len(one.ids) for one in rows) - done) > 0:
                width = min(_up(most, WIDTH_STEP), max(1, budget // len(rows)))
                self._fill(cache, rows, done, width)
                done += width

    def _fill(self, cache: SlotCache, rows: Sequence[Prompt], done: int, width: int) -> None:
        """The next `width` tokens of each row."""
        ids_RQ = np.zeros((len(rows), width), np.int64)
        positions_RQ = np.zeros((len(rows), width), np.int64)
        num_new = [min(width, max(0, len(one.ids) - done)) for one in rows]
        starts = [one.start + min(done, len(one.ids)) for one in rows]
        behind = max(start + n for start, n in zip(starts, num_new, strict=True))
        columns_RQ = np.full((len(rows), width), behind, np.int64)
        for r, (start, n) in enumerate(zip(starts, num_new, strict=True)):
            ids_RQ[r, :n] = rows[r].ids[done : done + n]
            columns_RQ[r, :n] = np.arange(start, start + n)
            positions_RQ[r, :n] = columns_RQ[r, :n]
            # A padded query needs at least one column that it sees: without one its softmax would be 0 / 0.
            positions_RQ[r, n:] = max(0, start + n - 1)
        cache.reserve(0, behind + 1)
        with self._turn.alone():
            self._pass(cache, rows[0].slot, ids_RQ, positions_RQ, columns_RQ)

    def logits(
        self, cache: SlotCache, ids_B: np.ndarray, columns_B: np.ndarray, trunks: Sequence[Trunk | None]
    ) -> Tensor:
        # Rows beyond the active ones write to slots that nobody has, and are not looked at.
        num = num_rows(len(ids_B))
        cache.reserve(num, 0)
        places_B1 = pad(columns_B, num)[:, None]
        with self._turn.alone():
            hidden_BE = self._pass(cache, 0, pad(ids_B, num)[:, None], places_B1, places_B1)[:, 0]
            logits_BV: Tensor = self._causal.get_output_embeddings()(hidden_BE)
        return logits_BV[: len(ids_B)]

    def _pass(
        self, cache: SlotCache, first: int, ids_RQ: np.ndarray, positions_RQ: np.ndarray, columns_RQ: np.ndarray
    ) -> Tensor:
        positions = torch.from_numpy(positions_RQ).to(self._device)
        kernel = SlotKernel(cache, first, positions, torch.from_numpy(columns_RQ).to(self._device))
        with self._compute(), attention_scope(kernel):
            hidden_RQE: Tensor = self._causal.base_model(
                input_ids=torch.from_numpy(ids_RQ).to(self._device), position_ids=positions, use_cache=False
            ).last_hidden_state
        return hidden_RQE

    def expect(self, decodes: bool) -> None:
        """Nothing to do: nobody computes with these passes."""

    def whole(self, ids_T: Tensor) -> Tensor:
        positions_1T = torch.arange(len(ids_T), device=ids_T.device)[None]
        with torch.no_grad(), self._compute(), attention_scope(causal_kernel):
            hidden_1TE: Tensor = self._causal.base_model(
                input_ids=ids_T[None], position_ids=positions_1T, use_cache=False
            ).last_hidden_state
        logits_TV: Tensor = self._causal.get_output_embeddings()(hidden_1TE[0])
        return logits_TV

    def refresh(self) -> None:
        """Nothing to do: the clone is what is read."""

    def stale(self) -> int:
        return 0


def _up(number: int, step: int) -> int:
    """`number` rounded up to a multiple of `step`."""
    return -(-number // step) * step


def _packed(prompts: Sequence[Prompt], budget: int) -> Iterator[tuple[list[Segment], np.ndarray]]:
    """Prompts one behind the other, cut wherever a pass is full."""
    segments: list[Segment] = []
    parts: list[np.ndarray] = []
    left = budget
    for prompt in prompts:
        done = 0
        while done < len(prompt.ids):
            num = min(left, len(prompt.ids) - done)
            segments.append(prompt.part(done, num))
            parts.append(prompt.ids[done : done + num])
            done, left = done + num, left - num
            if not left:
                yield segments, np.concatenate(parts)
                segments, parts, left = [], [], budget
    if segments:
        yield segments, np.concatenate(parts)


def _alike(widths: Sequence[int], budget: int) -> Iterator[list[int]]:
    """Group consecutive rows (widths ascending) into passes of at most `budget` tokens, little of it padding."""
    chunk: list[int] = []
    for i, width in enumerate(widths):
        too_many = (len(chunk) + 1) * width > budget
        # Rows that are less than half as long as the new one would be computed mostly as padding.
        if chunk and (too_many or 2 * widths[chunk[0]] < width):
            yield chunk
            chunk = []
        chunk.append(i)
    if chunk:
        yield chunk

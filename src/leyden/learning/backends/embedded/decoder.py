"""The active sequences of the sampler: their slots, and the forward passes that move them on.

Promises: `admit` computes a shared prompt once, reuses the longest stored prefix, and leaves every sequence
one token short of its prompt; `step` takes that token, or the last sampled one, of every active sequence in
one pass and draws the next. No threads, no queue, no text. `refresh` follows a change of the weights.

    B active sequences (slots 0..B-1)   R rows of one forward pass   Q new tokens per row
    E hidden size   V vocabulary
"""

import contextlib
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from leyden.base.errors import LearningError
from leyden.base.records import IntArray
from leyden.learning.backends.embedded import shadow
from leyden.learning.backends.embedded.attention import attention_scope, causal_kernel
from leyden.learning.backends.embedded.cache import PrefixStore, SlotCache, SlotKernel
from leyden.learning.backends.embedded.draw import Draw, draw
from leyden.learning.backends.embedded.model import LoadedModel
from leyden.learning.backends.embedded.requests import Counters, SamplingRequest, Sink, Ticket
from leyden.learning.backends.embedded.stopping import TextStream

PREFILL_TOKENS = 2048
"""Most tokens of one prefill pass, padding included; longer prompts are cut into passes. Its attention bias
has this many times the context entries, so it also bounds memory."""
ROW_STEP = 8
WIDTH_STEP = 16
"""Decode passes are padded to a multiple of ROW_STEP rows and prefill passes to a multiple of WIDTH_STEP tokens: the
CPU's matrix kernels are compiled anew for every number of rows they have not seen, which took half of the time."""
SYNC_TOLERANCE = 0.05
"""Largest mean difference in nats between sampler and trainer on a probe; rounding alone gives a fraction."""


@dataclass(slots=True, eq=False)
class RunningSequence:
    """One choice of one request, from the queue to its end."""

    request: SamplingRequest
    """What was asked."""
    choice: int
    """Index of the choice."""
    prompt: IntArray
    """The same ids as in the request."""
    ticket: Ticket
    """Says whether the client still wants it."""
    sink: Sink
    """Gets the deltas."""
    rng: random.Random
    """Uniform numbers of this choice alone."""
    text: TextStream
    """Its text."""
    rule: Draw
    """How it is drawn."""
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    num_cached: int = 0
    """Tokens whose keys and values are in the slot."""
    parts: list[str] = field(default_factory=list)
    """Text not delivered yet."""
    num_sent: int = 0
    """Ids delivered."""

    @property
    def length(self) -> int:
        """Prompt and sampled tokens."""
        return len(self.prompt) + len(self.ids)

    @property
    def next_input(self) -> int:
        """The last known token: the one whose logits say what comes next."""
        return self.ids[-1] if self.ids else int(self.prompt[-1])


class Decoder:
    """Owns the slots; used by one thread at a time."""

    def __init__(self, loaded: LoadedModel, counters: Counters, prefix_bytes: int) -> None:
        self.loaded = loaded
        self.counters = counters
        config = loaded.config
        heads = int(getattr(config, "num_key_value_heads", None) or config.num_attention_heads)
        head_dim = int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
        dtype = torch.bfloat16 if loaded.dtype == "bfloat16" else torch.float32
        self._causal: Any = shadow.shadow_of(loaded.causal)
        self._compute = loaded.compute if shadow.needs_autocast(loaded.causal) else contextlib.nullcontext
        self._cache = SlotCache(int(config.num_hidden_layers), heads, head_dim, dtype, loaded.device)
        self.prefixes = PrefixStore(prefix_bytes)
        self.active: list[RunningSequence] = []
        """By slot."""

    def refresh(self) -> None:
        """Take over the weights that the trainer has now. Nothing may be active. Raises LearningError."""
        assert not self.active
        shadow.refresh(self._causal)
        self.prefixes.clear()
        self._compare_with_trainer()

    def release(self) -> None:
        """Give back the memory of the slots; nothing may be active."""
        assert not self.active
        self._cache.release()

    def remove(self, slot: int, *, keep: bool) -> RunningSequence:
        """Free a slot and close the gap; `keep` stores the keys and values for the next turn."""
        gone = self.active[slot]
        if keep:
            known = np.concatenate([gone.prompt, np.asarray(gone.ids[:-1], np.int32)])
            self.prefixes.add(known, *self._cache.read(slot, len(known)))
        last = self.active.pop()
        if last is not gone:
            self._cache.move(len(self.active), slot, last.num_cached)
            self.active[slot] = last
        return gone

    def admit(self, taken: Sequence[RunningSequence]) -> None:
        """Give slots to sequences and compute their prompts, shared ones once."""
        began = time.perf_counter()
        leaders: dict[bytes, list[RunningSequence]] = {}
        for sequence in taken:
            leaders.setdefault(sequence.prompt.tobytes(), []).append(sequence)
        fresh = []
        for same in leaders.values():
            found = self.prefixes.longest(same[0].prompt)
            reused = min(found[0], len(same[0].prompt) - 1) if found else 0
            fresh.append((reused, found, same))
        # Rows of a pass are padded to the longest, so neighbours should be alike; all of them enter before
        # the next decode step, so the order among them delays nobody.
        fresh.sort(key=lambda item: len(item[2][0].prompt) - item[0])
        for chunk in _passes([len(same[0].prompt) - reused for reused, _, same in fresh]):
            self._prefill([fresh[i] for i in chunk])
        self.counters.prefill_s += time.perf_counter() - began

    def _prefill(self, rows: Sequence[tuple[int, Any, list[RunningSequence]]]) -> None:
        """Compute the prompts of new slots up to the token before the last, which the next decode step
        takes."""
        first = len(self.active)
        longest = max(len(same[0].prompt) for _, _, same in rows)
        total = sum(len(same) for _, _, same in rows)
        self._cache.reserve(first + total, longest + 1)
        for r, (reused, found, same) in enumerate(rows):
            leader = same[0]
            if reused:
                self._cache.write(first + r, found[1], found[2], reused)
                self.prefixes.num_hits += 1
            leader.num_cached = reused
            self.counters.num_reused_tokens += reused
            self.active.append(leader)
        leaders = [same[0] for _, _, same in rows]
        while (most := max(len(s.prompt) - 1 - s.num_cached for s in leaders)) > 0:
            width = min(_up(most, WIDTH_STEP), max(1, PREFILL_TOKENS // len(leaders)))
            self._prefill_pass(first, leaders, width)
        for r, (_, found, same) in enumerate(rows):
            leader, num_known = same[0], len(same[0].prompt) - 1
            if found is None or found[0] < num_known:
                self.prefixes.add(leader.prompt[:num_known], *self._cache.read(first + r, num_known))
            for twin in same[1:]:
                self._cache.move(first + r, len(self.active), num_known)
                twin.num_cached = num_known
                self.counters.num_reused_tokens += num_known
                self.active.append(twin)

    def _prefill_pass(self, first: int, rows: Sequence[RunningSequence], width: int) -> None:
        ids_RQ = np.zeros((len(rows), width), np.int64)
        positions_RQ = np.zeros((len(rows), width), np.int64)
        num_new = [min(width, len(s.prompt) - 1 - s.num_cached) for s in rows]
        behind = max(s.num_cached + n for s, n in zip(rows, num_new, strict=True))
        columns_RQ = np.full((len(rows), width), behind, np.int64)
        for r, (s, n) in enumerate(zip(rows, num_new, strict=True)):
            ids_RQ[r, :n] = s.prompt[s.num_cached : s.num_cached + n]
            columns_RQ[r, :n] = np.arange(s.num_cached, s.num_cached + n)
            positions_RQ[r, :n] = columns_RQ[r, :n]
            # A padded query needs at least one column that it sees: without one its softmax would be 0 / 0.
            positions_RQ[r, n:] = max(0, s.num_cached + n - 1)
            s.num_cached += n
            self.counters.num_prefill_tokens += n
        self._hidden(first, ids_RQ, positions_RQ, columns_RQ)

    def _hidden(self, first: int, ids_RQ: Any, positions_RQ: Any, columns_RQ: Any) -> Tensor:
        device = self.loaded.device
        positions = torch.from_numpy(positions_RQ).to(device)
        kernel = SlotKernel(self._cache, first, positions, torch.from_numpy(columns_RQ).to(device))
        with self._compute(), attention_scope(kernel):
            hidden_RQE: Tensor = self._causal.base_model(
                input_ids=torch.from_numpy(ids_RQ).to(device), position_ids=positions, use_cache=False
            ).last_hidden_state
        return hidden_RQE

    def step(self) -> tuple[list[int], list[float]]:
        """Token and log-probability that come next for every active sequence, by slot."""
        began = time.perf_counter()
        rows = self.active
        # Rows beyond the active ones write to slots that nobody has, and are not looked at.
        num_rows = _up(len(rows), ROW_STEP)
        self._cache.reserve(num_rows, max(s.length for s in rows) + 1)
        ids_B1 = np.zeros((num_rows, 1), np.int64)
        positions_B1 = np.zeros((num_rows, 1), np.int64)
        ids_B1[: len(rows), 0] = [s.next_input for s in rows]
        positions_B1[: len(rows), 0] = [s.length - 1 for s in rows]
        assert all(s.num_cached == s.length - 1 for s in rows)
        hidden_B1E = self._hidden(0, ids_B1, positions_B1, positions_B1)
        head: nn.Module = self._causal.get_output_embeddings()
        with self._compute():
            logits_BV = head(hidden_B1E[:, 0])[: len(rows)]
        tokens, logprobs = draw(logits_BV, [s.rule for s in rows], [s.rng.random() for s in rows])
        self.counters.num_steps += 1
        self.counters.num_sampled_tokens += len(rows)
        for s in rows:
            s.num_cached += 1
        self.counters.decode_s += time.perf_counter() - began
        return tokens, logprobs

    def _compare_with_trainer(self) -> None:
        """Raise LearningError unless sampler and trainer now read the same weights."""
        stale = shadow.stale(self._causal)
        if stale:
            raise LearningError(f"{stale} layers of the sampler hold other weights than the trainer after an update")
        ids_BT = torch.arange(7, device=self.loaded.device)[None] % self.loaded.vocab_size
        positions_BT = torch.arange(7, device=self.loaded.device)[None]
        with torch.no_grad(), self.loaded.compute(), attention_scope(causal_kernel):
            trainers = self.loaded.head(self.loaded.hidden(ids_BT, positions_BT)).float().log_softmax(-1)
            mine = self._causal.base_model(input_ids=ids_BT, position_ids=positions_BT, use_cache=False)
            ours = self._causal.get_output_embeddings()(mine.last_hidden_state).float().log_softmax(-1)
        gap = float(((ours - trainers).abs() * trainers.exp()).sum(-1).max())
        if not gap < SYNC_TOLERANCE:
            raise LearningError(
                f"after the update to a new version the sampler's log-probs differ from the trainer's by "
                f"{gap:.3g} nats on average, more than {SYNC_TOLERANCE}; the weights were not taken over"
            )


def _up(number: int, step: int) -> int:
    """`number` rounded up to a multiple of `step`."""
    return -(-number // step) * step


def _passes(widths: Sequence[int]) -> Iterator[list[int]]:
    """Group consecutive rows (widths ascending) into passes of at most PREFILL_TOKENS, little of it
    padding."""
    chunk: list[int] = []
    for i, width in enumerate(widths):
        too_many = (len(chunk) + 1) * width > PREFILL_TOKENS
        # Rows that are less than half as long as the new one would be computed mostly as padding.
        if chunk and (too_many or 2 * widths[chunk[0]] < width):
            yield chunk
            chunk = []
        chunk.append(i)
    if chunk:
        yield chunk

"""The active sequences of the sampler: their slots, and the forward passes that move them on.

Promises: `admit` computes a shared prompt once, reuses the longest stored prefix, and leaves every sequence
one token short of its prompt; `step` takes that token, or the last sampled one, of every active sequence in
one pass and draws the next. No threads, no queue, no text. `refresh` follows a change of the weights.

    B active sequences (slots 0..B-1)   R rows of one forward pass   Q new tokens per row
    E hidden size   V vocabulary
"""

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from leyden.base.errors import LearningError
from leyden.base.records import IntArray
from leyden.learning.backends.embedded import precision, shadow
from leyden.learning.backends.embedded.attention import attention_scope, causal_kernel
from leyden.learning.backends.embedded.cache import Entry, PrefixStore, SlotCache, Trunk
from leyden.learning.backends.embedded.draw import Draw, draw
from leyden.learning.backends.embedded.joint import Turn
from leyden.learning.backends.embedded.model import LoadedModel
from leyden.learning.backends.embedded.passes import Prompt, passes_of
from leyden.learning.backends.embedded.requests import Counters, SamplingRequest, Sink, Ticket
from leyden.learning.backends.embedded.stopping import TextStream

PREFILL_TOKENS = 2048
"""Most tokens of one prefill pass, padding included; longer prompts are cut into passes. Its attention bias
has this many times the context entries, so it also bounds memory."""
TRUNK_TOKENS = 1000
"""A prompt that is shared is kept once for all that run if reading it anew for each would read at least so many tokens
more; else it is copied to each, because putting two parts of a softmax together takes as long as reading them."""
SYNC_TOLERANCE = {"bfloat16": 0.1, "float32": 0.01}
"""Difference in nats between sampler and trainer on a probe that two ways to round explain, the largest mean over the
vocabulary. A 135M model in bfloat16 gives 0.04 to 0.08 before and after training, and other weights 1 and more."""
EXACT_FACTOR = 3.0
"""Where the difference is larger, how many times as far from float32 as the trainer the sampler may be. An update can
leave tokens at which the model is ill-conditioned: there the trainer itself was seen 0.25 nats from float32."""


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
    """Tokens whose keys and values are in the trunk and the slot."""
    trunk: Trunk | None = None
    """What the slot stands behind."""
    unread: list[int] = field(default_factory=list)
    """Sampled ids that `text` has not been given yet."""
    parts: list[str] = field(default_factory=list)
    """Text not delivered yet."""
    num_sent: int = 0
    """Ids delivered."""

    def read(self) -> None:
        """Give `text` what has been sampled since the last time."""
        self.parts.append(self.text.push(self.unread))
        self.unread.clear()

    @property
    def length(self) -> int:
        """Prompt and sampled tokens."""
        return len(self.prompt) + len(self.ids)

    @property
    def column(self) -> int:
        """Where the next token stands in the slot."""
        return self.num_cached - (len(self.trunk) if self.trunk is not None else 0)

    @property
    def next_input(self) -> int:
        """The last known token: the one whose logits say what comes next."""
        return self.ids[-1] if self.ids else int(self.prompt[-1])


@dataclass(slots=True, eq=False)
class _Newcomer:
    """Sequences of one prompt on their way into slots."""

    same: list[RunningSequence]
    ids: IntArray
    """The prompt without its last token, which the next step takes."""
    reused: int = 0
    """Tokens that are stored."""
    found: Entry | None = None
    """Where."""
    trunk: Trunk | None = None
    """What is not copied."""

    @property
    def num_known(self) -> int:
        """Tokens that are known when they have been settled."""
        return len(self.ids)

    @property
    def above(self) -> int:
        """Tokens of the trunk."""
        return len(self.trunk) if self.trunk is not None else 0

    @property
    def is_worth_a_trunk(self) -> bool:
        """Whether the whole prompt is better read once than by each."""
        return (len(self.same) - 1) * self.num_known >= TRUNK_TOKENS


class Decoder:
    """Owns the slots; used by one thread at a time."""

    def __init__(self, loaded: LoadedModel, counters: Counters, prefix_bytes: int, turn: Turn | None = None) -> None:
        self.loaded = loaded
        self.counters = counters
        config = loaded.config
        heads = int(getattr(config, "num_key_value_heads", None) or config.num_attention_heads)
        head_dim = int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
        dtype = torch.bfloat16 if loaded.dtype == "bfloat16" else torch.float32
        self._causal: Any = shadow.shadow_of(loaded.causal)
        self._passes = passes_of(self._causal, loaded, turn)
        self._cache = SlotCache(int(config.num_hidden_layers), heads, head_dim, dtype, loaded.device)
        self.prefixes = PrefixStore(prefix_bytes)
        self.active: list[RunningSequence] = []
        """By slot."""

    def refresh(self) -> None:
        """Take over the weights that the trainer has now. Nothing may be active. Raises LearningError."""
        assert not self.active
        shadow.refresh(self._causal)
        self._passes.refresh()
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
            self.prefixes.add(known, *self._cache.read(slot, gone.column), gone.trunk)
        last = self.active.pop()
        if last is not gone:
            self._cache.move(len(self.active), slot, last.column)
            self.active[slot] = last
        return gone

    def admit(self, taken: Sequence[RunningSequence]) -> None:
        """Give slots to sequences and compute their prompts, shared ones once."""
        began = time.perf_counter()
        twins: dict[bytes, list[RunningSequence]] = {}
        for sequence in taken:
            twins.setdefault(sequence.prompt.tobytes(), []).append(sequence)
        # Rows of a pass may be padded to the longest, so neighbours should be alike; all of them enter before
        # the next decode step, so the order among them delays nobody.
        fresh = sorted((self._newcomer(same) for same in twins.values()), key=lambda one: one.num_known - one.reused)
        first = len(self.active)
        self._cache.reserve(first + len(taken), max(one.num_known - one.above for one in fresh) + 1)
        prompts = []
        for slot, one in enumerate(fresh, first):
            if one.found is not None:
                one.found.write(self._cache, slot, one.above, one.reused)
                self.prefixes.num_hits += 1
            self.active.append(one.same[0])
            self.counters.num_prefill_tokens += one.num_known - one.reused
            self.counters.num_reused_tokens += one.reused + one.num_known * (len(one.same) - 1)
            prompts.append(Prompt(slot, one.ids[one.reused :], one.reused - one.above, one.trunk))
        self._passes.fill(self._cache, prompts, PREFILL_TOKENS)
        for slot, one in enumerate(fresh, first):
            self._settle(slot, one)
        self.counters.prefill_s += time.perf_counter() - began

    def _newcomer(self, same: list[RunningSequence]) -> _Newcomer:
        """What of their prompt is known, and whether it is read where it is."""
        one = _Newcomer(same, same[0].prompt[:-1])
        found = self.prefixes.longest(one.ids)
        if found is None:
            return one
        one.reused, one.found = found
        if not self._passes.knows_trunks:
            return one
        entry = one.found
        if entry.trunk is None and one.reused == one.num_known == len(entry.ids) and one.is_worth_a_trunk:
            one.trunk = self.prefixes.share(entry)
        elif entry.trunk is not None and one.reused >= len(entry.trunk):
            one.trunk = entry.trunk
        return one

    def _settle(self, slot: int, one: _Newcomer) -> None:
        """Store a computed prompt and give it to those who asked for the same."""
        num_own = one.num_known - one.above
        is_new = one.reused < one.num_known
        own = self._cache.read(slot, num_own) if is_new else None
        if own is not None and one.trunk is None and one.is_worth_a_trunk and self._passes.knows_trunks:
            one.trunk, num_own = Trunk(*own), 0
            own = own[0][:, :, :0].clone(), own[1][:, :, :0].clone()
        if own is not None:
            self.prefixes.add(one.ids, *own, one.trunk)
        for sequence in one.same:
            sequence.trunk, sequence.num_cached = one.trunk, one.num_known
        for twin in one.same[1:]:
            self._cache.move(slot, len(self.active), num_own)
            self.active.append(twin)

    def announce(self) -> None:
        """Say whether a step comes soon, for those who compute with it."""
        self._passes.expect(bool(self.active))

    def step(self) -> tuple[list[int], list[float]]:
        """Token and log-probability that come next for every active sequence, by slot."""
        began = time.perf_counter()
        rows = self.active
        self._cache.reserve(len(rows), max(s.column for s in rows) + 1)
        assert all(s.num_cached == s.length - 1 for s in rows)
        ids_B = np.asarray([s.next_input for s in rows], np.int64)
        columns_B = np.asarray([s.column for s in rows], np.int64)
        logits_BV = self._passes.logits(self._cache, ids_B, columns_B, [s.trunk for s in rows])
        tokens, logprobs = draw(logits_BV, [s.rule for s in rows], [s.rng.random() for s in rows])
        self.counters.num_steps += 1
        self.counters.num_sampled_tokens += len(rows)
        for s in rows:
            s.num_cached += 1
        self.counters.decode_s += time.perf_counter() - began
        return tokens, logprobs

    def _compare_with_trainer(self) -> None:
        """Raise LearningError unless sampler and trainer now read the same weights."""
        stale = shadow.stale(self._causal) + self._passes.stale()
        if stale:
            raise LearningError(f"{stale} layers of the sampler hold other weights than the trainer after an update")
        ids_T = torch.arange(7, device=self.loaded.device) % self.loaded.vocab_size
        with torch.no_grad():
            ours_TV = self._passes.whole(ids_T).float().log_softmax(-1)
            trainers_TV = self._trainers(ids_T)
            gap = float(_distance(ours_TV, trainers_TV).max())
            if gap < SYNC_TOLERANCE[self.loaded.dtype]:
                return
            with precision.exact_scope():
                exact_TV = self._trainers(ids_T)
        error, allowed = (float(_distance(found, exact_TV).mean()) for found in (ours_TV, trainers_TV))
        allowed = max(EXACT_FACTOR * allowed, SYNC_TOLERANCE[self.loaded.dtype])
        if not error < allowed:
            raise LearningError(
                f"after the update to a new version the sampler's log-probs differ from the trainer's by {gap:.3g} "
                f"nats and from float32 by {error:.3g}, more than {allowed:.3g}; the weights were not taken over"
            )

    def _trainers(self, ids_T: torch.Tensor) -> torch.Tensor:
        """Log-probs (T, V) by the modules of the trainer."""
        positions_1T = torch.arange(len(ids_T), device=ids_T.device)[None]
        with self.loaded.compute(), attention_scope(causal_kernel):
            logits_TV: torch.Tensor = self.loaded.head(self.loaded.hidden(ids_T[None], positions_1T))[0]
        return logits_TV.float().log_softmax(-1)


def _distance(a_TV: torch.Tensor, b_TV: torch.Tensor) -> torch.Tensor:
    """|a - b| of log-probs by position, its mean over what b expects."""
    return ((a_TV - b_TV).abs() * b_TV.exp()).sum(-1)

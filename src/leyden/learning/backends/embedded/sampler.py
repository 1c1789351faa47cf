"""Continuous batching: one thread samples for all requests at once, from the parameters that the trainer moves.

Promises: a request's tokens depend on its prompt, parameters and seed, not on its company (up to float noise of
batched products); log-probs are those of the distribution drawn from; requests are served in order of arrival;
`pause` returns when no forward pass runs and none will, `resume` names the version that is served from then on, and
what was asked of another version is refused. A generation that meets the context ends with finish reason `length`.
Every sequence ends with exactly one delta that has a finish reason or an error. It does not parse, render or speak HTTP.

The linear layers read a bfloat16 shadow of the shared parameters, refreshed by `resume` after every update; in
float32 they read the parameters themselves.

    B active sequences (slots 0..B-1)   R rows of one forward pass   Q new tokens per row   E hidden   V vocabulary
"""

import contextlib
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from leyden.base.errors import LearningError, LeydenError, RequestRefused
from leyden.base.records import IntArray
from leyden.learning.backends.embedded import shadow
from leyden.learning.backends.embedded.attention import attention_scope
from leyden.learning.backends.embedded.cache import PrefixStore, SlotCache, SlotKernel
from leyden.learning.backends.embedded.draw import Draw, draw
from leyden.learning.backends.embedded.model import LoadedModel
from leyden.learning.backends.embedded.stopping import TextStream

PREFILL_TOKENS = 2048
"""Most tokens of one prefill pass, padding included; longer prompts are cut into passes. Its attention bias has this
many times the context entries, so it also bounds memory."""
STOP_GRACE_S = 60.0
"""How long `pause` and `close` wait for the forward pass that runs now; a pass takes well under a second here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingRequest:
    """What is asked of the sampler."""

    prompt_ids: Sequence[int]
    """At least one id."""
    max_tokens: int
    """Most sampled tokens; the context may end a generation earlier."""
    temperature: float = 1.0
    """0 is greedy; its log-probs are those under temperature 1."""
    top_p: float = 1.0
    """See `draw`."""
    top_k: int = 0
    """See `draw`; 0 keeps all."""
    seed: int | None = None
    """Same seed, prompt and weights: same tokens. None takes the next of the sampler's own."""
    num_choices: int = 1
    """Independent samples of the same prompt; each has a stream of random numbers of its own."""
    stop: tuple[str, ...] = ()
    """Strings that end a generation; the text ends before them."""
    stop_ids: frozenset[int] = frozenset()
    """Ids that end a generation besides the model's own."""
    stream: bool = False
    """Deltas at every step; otherwise one per choice at its end."""
    version: int | None = None
    """Refused unless this version is served when sampling begins; None takes any."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """What one choice gained."""

    choice: int
    """Index of the choice."""
    text: str = ""
    """Certain new text."""
    ids: Sequence[int] = ()
    """New sampled ids; the one that ended the generation included."""
    logprobs: Sequence[float] = ()
    """One per id."""
    finish_reason: str | None = None
    """`stop`, `length` or `abort` in the last delta."""
    stop_reason: str | int | None = None
    """The stop string or extra stop id that ended it; None for the model's own."""
    error: LeydenError | None = None
    """Instead of a finish reason: why there is none."""


Sink = Callable[[Delta], None]
"""Called in the sampler's thread; must return at once and not raise."""


class Ticket:
    """A request in the sampler."""

    def __init__(self) -> None:
        self.cancelled = False

    def cancel(self) -> None:
        """Stop generating; the slots are free at the next step. From any thread, any number of times."""
        self.cancelled = True


@dataclass(slots=True, eq=False)
class _Sequence:
    request: SamplingRequest
    choice: int
    prompt: IntArray
    ticket: Ticket
    sink: Sink
    rng: random.Random
    text: TextStream
    rule: Draw
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
        return len(self.prompt) + len(self.ids)

    @property
    def next_input(self) -> int:
        """The last known token: the one whose logits say what comes next."""
        return self.ids[-1] if self.ids else int(self.prompt[-1])


@dataclass(slots=True)
class Counters:
    """What the sampler has done since it was made; read them for reports only."""

    num_prefill_tokens: int = 0
    """Prompt tokens computed."""
    num_reused_tokens: int = 0
    """Prompt tokens copied from earlier computation instead."""
    num_sampled_tokens: int = 0
    """Tokens drawn."""
    num_steps: int = 0
    """Decode passes."""
    num_aborted: int = 0
    """Sequences ended before their time."""
    prefill_s: float = 0.0
    """Time in prefill passes."""
    decode_s: float = 0.0
    """Time in decode passes, drawing and delivery included."""


class Sampler:
    """Owns the model while it samples. `version` is what it serves."""

    def __init__(
        self,
        loaded: LoadedModel,
        *,
        version: int = 0,
        seed: int = 0,
        max_active: int = 64,
        max_waiting: int = 4096,
        prefix_bytes: int = 512 * 1024 * 1024,
    ) -> None:
        self.loaded = loaded
        self.version = version
        self.counters = Counters()
        self.max_active, self.max_waiting = max_active, max_waiting
        self._rng = random.Random(seed)
        config = loaded.config
        heads = int(getattr(config, "num_key_value_heads", None) or config.num_attention_heads)
        head_dim = int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
        dtype = torch.bfloat16 if loaded.dtype == "bfloat16" else torch.float32
        self._causal: Any = shadow.shadow_of(loaded.causal)
        self._compute = loaded.compute if shadow.needs_autocast(loaded.causal) else contextlib.nullcontext
        self._cache = SlotCache(int(config.num_hidden_layers), heads, head_dim, dtype, loaded.device)
        self.prefixes = PrefixStore(prefix_bytes)
        self._active: list[_Sequence] = []
        self._waiting: deque[_Sequence] = deque()
        self._changed = threading.Condition()
        self._want_pause = self._paused = self._abort_all = self._closing = False
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="leyden-sampler", daemon=True)
        self._thread.start()

    # -- called from any thread ------------------------------------------------------------------------------

    @property
    def num_active(self) -> int:
        """Sequences in slots."""
        return len(self._active)

    @property
    def num_waiting(self) -> int:
        """Sequences that wait for a slot or for `resume`."""
        return len(self._waiting)

    def submit(self, request: SamplingRequest, sink: Sink) -> Ticket:
        """Queue a request; deltas go to `sink`. Raises RequestRefused (400 the prompt, 404 version, 429 queue)."""
        prompt = np.asarray(request.prompt_ids, np.int32)
        self._check(request, prompt)
        ticket = Ticket()
        rule = Draw(request.temperature, request.top_p, request.top_k)
        with self._changed:
            if self._closing or self._failure is not None:
                raise LearningError(f"the sampler has stopped ({self._failure or 'closed'}); start it anew")
            if request.version is not None and request.version != self.version:
                raise _stale(request.version, self.version)
            if len(self._waiting) + request.num_choices > self.max_waiting:
                raise RequestRefused(
                    f"{len(self._waiting)} sequences wait for the sampler already, and {self.max_waiting} is the most; "
                    "send fewer requests at once",
                    status=429,
                    kind="queue_full",
                )
            seed = self._rng.getrandbits(64) if request.seed is None else request.seed
            for choice in range(request.num_choices):
                rng = random.Random(f"{seed}/{choice}")
                text = TextStream(self._decode_text, request.stop)
                self._waiting.append(_Sequence(request, choice, prompt, ticket, sink, rng, text, rule))
            self._changed.notify_all()
        return ticket

    def _check(self, request: SamplingRequest, prompt: IntArray) -> None:
        limit = self.loaded.max_context
        if len(prompt) == 0:
            raise RequestRefused("the prompt has no tokens; send at least one", field="prompt")
        if len(prompt) >= limit:
            raise RequestRefused(
                f"the prompt has {len(prompt)} tokens, but the context holds {limit} and must leave room for one more; "
                "shorten the prompt or raise policies.NAME.max_context",
                kind="context_length_exceeded",
                field="prompt",
            )
        low, high = int(prompt.min()), int(prompt.max())
        if low < 0 or high >= self.loaded.vocab_size:
            raise RequestRefused(
                f"the prompt holds token id {low if low < 0 else high}; ids run from 0 to {self.loaded.vocab_size - 1}",
                field="prompt",
            )
        assert request.max_tokens >= 1 and request.num_choices >= 1

    def pause(self, deadline_s: float) -> int:
        """Wait for running sequences, abort those that are left after the deadline; how many were aborted.

        Sequences that wait stay waiting. When this returns, nothing reads the weights until `resume`.
        """
        before = self.counters.num_aborted
        with self._changed:
            self._want_pause = True
            self._changed.notify_all()
            if not self._changed.wait_for(self._is_still, deadline_s):
                self._abort_all = True
                self._changed.notify_all()
                if not self._changed.wait_for(self._is_still, STOP_GRACE_S):
                    raise LearningError(
                        f"waited {deadline_s + STOP_GRACE_S:.0f} s for the sampler's forward pass over "
                        f"{len(self._active)} sequences; the machine may be out of memory or stopped"
                    )
            self._abort_all = False
        return self.counters.num_aborted - before

    def resume(self, version: int | None = None) -> None:
        """Go on; with a version: the weights have changed and are this one now."""
        assert self._is_still(), "resume without pause"
        if version is not None:
            shadow.refresh(self._causal)
            self.prefixes.clear()
        with self._changed:
            if version is not None:
                self.version = version
            self._want_pause = self._paused = False
            self._changed.notify_all()

    def _is_still(self) -> bool:
        return self._paused or not self._thread.is_alive()

    def close(self) -> None:
        """Abort everything and end the thread. Idempotent."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join(STOP_GRACE_S)
        if self._thread.is_alive():
            raise LearningError(f"waited {STOP_GRACE_S:.0f} s for the sampler's forward pass to end")

    # -- the sampler's thread --------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            with torch.no_grad():
                while self._wait_for_work():
                    self._sweep()
                    if not self._want_pause:
                        self._admit()
                    if self._active:
                        self._decode_step()
        except BaseException as error:  # noqa: BLE001 - the boundary of the thread: every waiter must hear of it
            self._failure = error
        finally:
            with self._changed:
                reason = LearningError(f"the sampler has stopped: {self._failure or 'closed'}")
                stopped = [*self._active, *self._waiting]
                self._active, self._waiting = [], deque()
                self._closing = True
                self._changed.notify_all()
            for sequence in stopped:
                sequence.sink(Delta(choice=sequence.choice, error=reason))

    def _wait_for_work(self) -> bool:
        with self._changed:
            while not self._closing:
                if self._active or (self._waiting and not self._want_pause):
                    return True
                if self._want_pause and not self._paused:
                    self._paused = True
                    self._changed.notify_all()
                # Bounded, because a waiting request may be cancelled without a notice while all is paused.
                self._changed.wait(0.5)
                if self._waiting and self._paused:
                    return True
        return False

    def _sweep(self) -> None:
        """Free what was cancelled, aborted or asked of another version."""
        for slot in range(len(self._active) - 1, -1, -1):
            if self._active[slot].ticket.cancelled or self._abort_all:
                self._end(slot, "abort")
        with self._changed:
            gone, stay = [], deque[_Sequence]()
            for sequence in self._waiting:
                asked = sequence.request.version
                stale = asked is not None and asked != self.version
                (gone if sequence.ticket.cancelled or stale else stay).append(sequence)
            self._waiting = stay
        for sequence in gone:
            self.counters.num_aborted += 1
            if sequence.ticket.cancelled:
                sequence.sink(Delta(choice=sequence.choice, finish_reason="abort"))
            else:
                asked = sequence.request.version
                assert asked is not None
                sequence.sink(Delta(choice=sequence.choice, error=_stale(asked, self.version)))

    def _admit(self) -> None:
        """Give slots to waiting sequences in order of arrival and compute their prompts, shared ones once."""
        with self._changed:
            room = self.max_active - len(self._active)
            taken = [self._waiting.popleft() for _ in range(min(room, len(self._waiting)))]
        if not taken:
            return
        began = time.perf_counter()
        leaders: dict[bytes, list[_Sequence]] = {}
        for sequence in taken:
            leaders.setdefault(sequence.prompt.tobytes(), []).append(sequence)
        fresh = []
        for same in leaders.values():
            found = self.prefixes.longest(same[0].prompt)
            reused = min(found[0], len(same[0].prompt) - 1) if found else 0
            fresh.append((reused, found, same))
        # Rows of a pass are padded to the longest, so neighbours should be alike; all of them enter before the next
        # decode step, so the order among them delays nobody.
        fresh.sort(key=lambda item: len(item[2][0].prompt) - item[0])
        for chunk in _passes([len(same[0].prompt) - reused for reused, _, same in fresh]):
            self._prefill([fresh[i] for i in chunk])
        self.counters.prefill_s += time.perf_counter() - began

    def _prefill(self, rows: Sequence[tuple[int, Any, list[_Sequence]]]) -> None:
        """Compute the prompts of new slots up to the token before the last, which the next decode step takes."""
        first = len(self._active)
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
            self._active.append(leader)
        leaders = [same[0] for _, _, same in rows]
        while (most := max(len(s.prompt) - 1 - s.num_cached for s in leaders)) > 0:
            width = min(most, max(1, PREFILL_TOKENS // len(leaders)))
            self._prefill_pass(first, leaders, width)
        for r, (_, found, same) in enumerate(rows):
            leader, num_known = same[0], len(same[0].prompt) - 1
            if found is None or found[0] < num_known:
                self.prefixes.add(leader.prompt[:num_known], *self._cache.read(first + r, num_known))
            for twin in same[1:]:
                self._cache.move(first + r, len(self._active), num_known)
                twin.num_cached = num_known
                self.counters.num_reused_tokens += num_known
                self._active.append(twin)

    def _prefill_pass(self, first: int, rows: Sequence[_Sequence], width: int) -> None:
        ids_RQ = np.zeros((len(rows), width), np.int64)
        positions_RQ = np.zeros((len(rows), width), np.int64)
        num_new = [min(width, len(s.prompt) - 1 - s.num_cached) for s in rows]
        behind = max(s.num_cached + n for s, n in zip(rows, num_new, strict=True))
        columns_RQ = np.full((len(rows), width), behind, np.int64)
        for r, (s, n) in enumerate(zip(rows, num_new, strict=True)):
            ids_RQ[r, :n] = s.prompt[s.num_cached:s.num_cached + n]
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

    def _decode_step(self) -> None:
        """One more token for every active sequence."""
        began = time.perf_counter()
        rows = self._active
        self._cache.reserve(len(rows), max(s.length for s in rows) + 1)
        ids_B1 = np.asarray([[s.next_input] for s in rows], np.int64)
        positions_B1 = np.asarray([[s.length - 1] for s in rows], np.int64)
        assert all(s.num_cached == s.length - 1 for s in rows)
        hidden_B1E = self._hidden(0, ids_B1, positions_B1, positions_B1)
        head: nn.Module = self._causal.get_output_embeddings()
        with self._compute():
            logits_BV = head(hidden_B1E[:, 0])
        tokens, logprobs = draw(logits_BV, [s.rule for s in rows], [s.rng.random() for s in rows])
        self.counters.num_steps += 1
        self.counters.num_sampled_tokens += len(rows)
        for slot in range(len(rows) - 1, -1, -1):
            self._take(slot, tokens[slot], logprobs[slot])
        self.counters.decode_s += time.perf_counter() - began

    def _take(self, slot: int, token: int, logprob: float) -> None:
        """Give a sequence its new token, and end it if that is the end."""
        s = self._active[slot]
        s.num_cached += 1
        s.ids.append(token)
        s.logprobs.append(logprob)
        ends = token in self.loaded.eos_ids
        extra = token in s.request.stop_ids
        # An extra stop id belongs to the ids but, like the model's own, not to the text.
        s.parts.append("" if ends or extra else s.text.push([token]))
        if s.text.matched is not None:
            self._end(slot, "stop", s.text.matched)
        elif ends or extra:
            self._end(slot, "stop", None if ends else token)
        elif len(s.ids) >= s.request.max_tokens or s.length >= self.loaded.max_context:
            self._end(slot, "length")
        elif s.request.stream:
            self._send(s)

    def _send(self, s: _Sequence, finish_reason: str | None = None, stop_reason: str | int | None = None) -> None:
        text, ids, logprobs = "".join(s.parts), s.ids[s.num_sent:], s.logprobs[s.num_sent:]
        s.parts, s.num_sent = [], len(s.ids)
        s.sink(Delta(choice=s.choice, text=text, ids=ids, logprobs=logprobs, finish_reason=finish_reason,
                     stop_reason=stop_reason))

    def _end(self, slot: int, finish_reason: str, stop_reason: str | int | None = None) -> None:
        """Deliver the last delta and close the gap that the slot leaves."""
        s = self._active[slot]
        s.parts.append(s.text.finish())
        if s.text.matched is not None and finish_reason == "length":
            finish_reason, stop_reason = "stop", s.text.matched
        if finish_reason == "abort":
            self.counters.num_aborted += 1
        else:
            known = np.concatenate([s.prompt, np.asarray(s.ids[:-1], np.int32)])
            self.prefixes.add(known, *self._cache.read(slot, len(known)))
        last = self._active.pop()
        if last is not s:
            self._cache.move(len(self._active), slot, last.num_cached)
            self._active[slot] = last
        self._send(s, finish_reason, stop_reason)

    def _decode_text(self, ids: Sequence[int]) -> str:
        return self.loaded.decode(ids, skip_special=True) if ids else ""


def _passes(widths: Sequence[int]) -> Iterator[list[int]]:
    """Group consecutive rows (widths ascending) into passes of at most PREFILL_TOKENS, little of it padding."""
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


def _stale(asked: int, served: int) -> RequestRefused:
    return RequestRefused(
        f"version {asked} of this policy is not served any more; version {served} is",
        status=404,
        kind="model_not_found",
        field="model",
    )

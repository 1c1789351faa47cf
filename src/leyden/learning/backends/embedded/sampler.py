"""Continuous batching: one thread samples for all requests at once, from the parameters that the trainer
moves.

Promises: a request's tokens depend on its prompt, parameters and seed, not on its company (up to float noise
of batched products); log-probs are those of the distribution drawn from; requests are served in order of
arrival; `pause` returns when no forward pass runs and none will, `resume` names the version that is served
from then on, and what was asked of another version is refused. A generation that meets the context ends with
finish reason `length`. Every sequence ends with exactly one delta that has a finish reason or an error. It
does not parse, render or speak HTTP.

The linear layers read a bfloat16 shadow of the shared parameters, refreshed by `resume` after every update;
in float32 they read the parameters themselves.
"""

import random
import threading
from collections import deque
from collections.abc import Sequence

import numpy as np
import torch

from leyden.base.errors import LearningError, RequestRefused
from leyden.base.records import IntArray
from leyden.learning.backends.embedded.cache import PrefixStore
from leyden.learning.backends.embedded.decoder import Decoder, RunningSequence
from leyden.learning.backends.embedded.draw import Draw
from leyden.learning.backends.embedded.joint import Turn
from leyden.learning.backends.embedded.model import LoadedModel
from leyden.learning.backends.embedded.requests import Counters, Delta, SamplingRequest, Sink, Ticket
from leyden.learning.backends.embedded.stopping import TextStream

STOP_GRACE_S = 60.0
"""How long `pause` and `close` wait for the forward pass that runs now; a pass takes well under a second
here."""


BUSY_ROWS = 16
ADMIT_ROWS = 8
ADMIT_STEPS = 4
"""While BUSY_ROWS or more sequences run, newcomers enter together: once ADMIT_ROWS wait, or at every ADMIT_STEPS-th
step. Prompts that entered one by one took 43 % of the sampler's time with 64 agents on two cores."""


PREFIX_BYTES = 512 * 1024 * 1024
"""Room for the keys and values of prompts that may come again."""


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
        prefix_bytes: int = PREFIX_BYTES,
        turn: Turn | None = None,
    ) -> None:
        """Samplers that share the machine share the `turn`."""
        self.loaded = loaded
        self.version = version
        self.counters = Counters()
        self.max_active, self.max_waiting = max_active, max_waiting
        self._turn = turn or Turn()
        self._rng = random.Random(seed)
        self._decoder = Decoder(loaded, self.counters, prefix_bytes, self._turn)
        self._waiting: deque[RunningSequence] = deque()
        self._changed = threading.Condition()
        self._want_pause = self._paused = self._abort_all = self._closing = False
        self._failure: BaseException | None = None
        self._steps_since_admit = 0
        self._thread = threading.Thread(target=self._run, name="leyden-sampler", daemon=True)
        self._thread.start()

    @property
    def _active(self) -> list[RunningSequence]:
        return self._decoder.active

    @property
    def prefixes(self) -> PrefixStore:
        """Stored prefixes; to be cleared by measurements only."""
        return self._decoder.prefixes

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
        """Queue a request; deltas go to `sink`. Raises RequestRefused (400 the prompt, 404 version, 429
        queue)."""
        prompt = self._check(request)
        ticket = Ticket()
        rule = Draw(request.temperature, request.top_p, request.top_k)
        with self._changed:
            if self._closing or self._failure is not None:
                raise LearningError(f"the sampler has stopped ({self._failure or 'closed'}); start it anew")
            if request.version is not None and request.version != self.version:
                raise _stale(request.version, self.version)
            if len(self._waiting) + request.num_choices > self.max_waiting:
                raise RequestRefused(
                    f"{len(self._waiting)} sequences wait for the sampler already, and {self.max_waiting} "
                    "is the most; send fewer requests at once",
                    status=429,
                    kind="queue_full",
                )
            seed = self._rng.getrandbits(64) if request.seed is None else request.seed
            for choice in range(request.num_choices):
                rng = random.Random(f"{seed}/{choice}")
                text = TextStream(self._decode_text, request.stop)
                self._waiting.append(RunningSequence(request, choice, prompt, ticket, sink, rng, text, rule))
            self._changed.notify_all()
        return ticket

    def _check(self, request: SamplingRequest) -> IntArray:
        limit = self.loaded.max_context
        prompt = request.prompt_ids
        if len(prompt) == 0:
            raise RequestRefused("the prompt has no tokens; send at least one", field="prompt")
        if len(prompt) >= limit:
            raise RequestRefused(
                f"the prompt has {len(prompt)} tokens, but the context holds {limit} and must leave room "
                "for one more; shorten the prompt or raise policies.NAME.max_context",
                kind="context_length_exceeded",
                field="prompt",
            )
        low, high = min(prompt), max(prompt)
        if low < 0 or high >= self.loaded.vocab_size:
            raise RequestRefused(
                f"the prompt holds token id {low if low < 0 else high}; ids run from 0 to {self.loaded.vocab_size - 1}",
                field="prompt",
            )
        assert request.max_tokens >= 1 and request.num_choices >= 1
        return np.asarray(prompt, np.int32)

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
        # The trainer's activations may want the room; nothing is active.
        self._decoder.release()
        return self.counters.num_aborted - before

    def resume(self, version: int | None = None) -> None:
        """Go on; with a version: the weights have changed and are this one now."""
        assert self._is_still(), "resume without pause"
        if version is not None:
            self._decoder.refresh()
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
                        tokens, logprobs = self._decoder.step()
                        # From the highest slot down: ending a sequence moves the last one into its place.
                        for slot in range(len(tokens) - 1, -1, -1):
                            self._take(slot, tokens[slot], logprobs[slot])
        except BaseException as error:  # noqa: BLE001 - the boundary of the thread: every waiter must hear of it
            self._failure = error
        finally:
            with self._changed:
                reason = LearningError(f"the sampler has stopped: {self._failure or 'closed'}")
                stopped = [*self._active, *self._waiting]
                self._decoder.active, self._waiting = [], deque()
                self._decoder.announce()
                self._closing = True
                self._changed.notify_all()
            for sequence in stopped:
                sequence.sink(Delta(choice=sequence.choice, error=reason))

    def _wait_for_work(self) -> bool:
        self._decoder.announce()
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
            gone: list[RunningSequence] = []
            stay: deque[RunningSequence] = deque()
            for sequence in self._waiting:
                asked = sequence.request.version
                stale = asked is not None and asked != self.version
                if sequence.ticket.cancelled or stale:
                    gone.append(sequence)
                else:
                    stay.append(sequence)
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
        """Give free slots to waiting sequences, in order of arrival."""
        with self._changed:
            self._steps_since_admit += 1
            # The waiting ones of a few steps share one pass over the weights: it costs the same for one or eight.
            busy = len(self._active) >= BUSY_ROWS and len(self._waiting) < ADMIT_ROWS
            if busy and self._steps_since_admit < ADMIT_STEPS:
                return
            self._steps_since_admit = 0
            room = self.max_active - len(self._active)
            taken = [self._waiting.popleft() for _ in range(min(room, len(self._waiting)))]
        if taken:
            self._decoder.admit(taken)

    def _take(self, slot: int, token: int, logprob: float) -> None:
        """Give a sequence its new token, and end it if that is the end."""
        s = self._active[slot]
        s.ids.append(token)
        s.logprobs.append(logprob)
        ends = token in self.loaded.eos_ids
        extra = token in s.request.stop_ids
        # An extra stop id belongs to the ids but, like the model's own, not to the text.
        if not (ends or extra):
            s.unread.append(token)
        # Text that nobody waits for is decoded at the end, all at once: two calls of the tokenizer for each token of
        # 64 rows take 2 to 3 ms a step.
        if s.request.stream or s.request.stop:
            s.read()
        if s.text.matched is not None:
            self._end(slot, "stop", s.text.matched)
        elif ends or extra:
            self._end(slot, "stop", None if ends else token)
        elif len(s.ids) >= s.request.max_tokens or s.length >= self.loaded.max_context:
            self._end(slot, "length")
        elif s.request.stream:
            self._send(s)

    def _send(self, s: RunningSequence, finish_reason: str | None = None, stop_reason: str | int | None = None) -> None:
        text, ids, logprobs = "".join(s.parts), s.ids[s.num_sent :], s.logprobs[s.num_sent :]
        s.parts, s.num_sent = [], len(s.ids)
        s.sink(
            Delta(
                choice=s.choice,
                text=text,
                ids=ids,
                logprobs=logprobs,
                finish_reason=finish_reason,
                stop_reason=stop_reason,
            )
        )

    def _end(self, slot: int, finish_reason: str, stop_reason: str | int | None = None) -> None:
        """Deliver the last delta and close the gap that the slot leaves."""
        s = self._active[slot]
        s.read()
        s.parts.append(s.text.finish())
        if s.text.matched is not None and finish_reason == "length":
            finish_reason, stop_reason = "stop", s.text.matched
        if finish_reason == "abort":
            self.counters.num_aborted += 1
        self._decoder.remove(slot, keep=finish_reason != "abort")
        self._send(s, finish_reason, stop_reason)

    def _decode_text(self, ids: Sequence[int]) -> str:
        return self.loaded.decode(ids, skip_special=True) if ids else ""


def _stale(asked: int, served: int) -> RequestRefused:
    return RequestRefused(
        f"version {asked} of this policy is not served any more; version {served} is",
        status=404,
        kind="model_not_found",
        field="model",
    )

"""Exactly once: which requests are new samples, which are retries of a call that is under way or done.

A request is known by the digest of its kind and body. Equal unmarked requests are new samples, told apart by
their occurrence. A request that an SDK marked as a retry belongs to an earlier call with the same digest: it
joins the call while that is in flight, is answered from the store once that is done, and is a new sample if
that failed.

`Book` is one attempt's page, `Flight` one call between arrival and record. Both live on the event loop.
"""

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from hashlib import blake2b
from typing import Any, TypeVar

import orjson

from leyden.base.errors import LeydenError, RequestRefused
from leyden.base.records import Call, new_id
from leyden.gateway.dialects.anthropic_blocks import stored_texts
from leyden.gateway.dialects.base import Body
from leyden.traces.reader import Reader

T = TypeVar("T")
Settle = Callable[[Call, int], Awaitable[Call]]
"""(an open call, number of the retry) -> the call as it ended, or as it is if nobody will end it."""

LINGER_MARGIN_S = 1.0
"""How much longer than an SDK's longest back-off a call goes on after its client left: network and
scheduling."""
SDK_BACKOFF_S, SDK_BACKOFF_MAX_S = 0.5, 8.0
"""Back-off of the OpenAI and Anthropic SDKs: 0.5 s doubled with every retry, up to 8 s."""


def digest_of(kind: str, body: Body) -> str:
    """Hash of a request: equal for equal JSON, whatever the order of keys or the white space."""
    return blake2b(kind.encode() + b"\0" + orjson.dumps(body, option=orjson.OPT_SORT_KEYS), digest_size=16).hexdigest()


CALL_IDS = new_id("call") + "_"
"""How the ids of this process's calls begin."""
_CALL_NUMBERS = itertools.count()
# Random per process and counted within it: asking the kernel for randomness lets go of the interpreter's
# lock, and on the hot path that hands a busy core to another thread.


class Flight:
    """One call between its arrival and its record, and everybody who waits for it."""

    def __init__(self, digest: str, retry_count: int, sdk_retries: bool) -> None:
        self.call_id = f"{CALL_IDS}{next(_CALL_NUMBERS):08x}"
        """Of the call."""
        self.digest = digest
        """Of the request."""
        self.occurrence = 0
        """Set when the intent is written."""
        self.seq = 0
        """Set when the intent is written."""
        self.retry_count = retry_count
        """Highest retry number that was marked."""
        self.sdk_retries = sdk_retries
        """Whether the client is an SDK that may come back for the answer."""
        self.entered = False
        """Whether it is past the hold, so that a drain waits for it."""
        self.clients = 1
        """Clients that are waiting."""
        self.head: tuple[int, list[tuple[bytes, bytes]]] | None = None
        """Status and headers, once they are known."""
        self.passed: list[tuple[bytes, bytes]] = []
        """Headers of the engine's answer that belong into ours."""
        self.parts: list[bytes] = []
        """Everything that was released to clients so far."""
        self.finished = False
        """Whether `parts` is all there is."""
        self.error: LeydenError | None = None
        """Why there is no answer, if it failed before anything was released."""
        self.abort_reason: str | None = None
        """Why it was stopped, if it was."""
        self._task = asyncio.current_task()
        self._interruptible = False
        self._signal: asyncio.Event | None = None
        self._expiry: asyncio.TimerHandle | None = None

    def join(self, retry_count: int) -> None:
        """One more client waits for it."""
        self.clients += 1
        self.retry_count = max(self.retry_count, retry_count)
        if self._expiry is not None:
            self._expiry.cancel()
            self._expiry = None
        self._wake()

    def left(self) -> None:
        """A client left. The last one stops the call, unless its SDK is about to come back for it."""
        self.clients -= 1
        if self.clients > 0 or self.finished:
            return
        if self.sdk_retries and not self.parts:
            back_off_s = min(SDK_BACKOFF_S * 2**self.retry_count, SDK_BACKOFF_MAX_S) + LINGER_MARGIN_S
            self._expiry = asyncio.get_running_loop().call_later(back_off_s, self._expire)
        else:
            self.abort("the client left")

    def abort(self, reason: str) -> None:
        """Stop the generation. What has come so far is recorded."""
        if self.abort_reason is None and not self.finished:
            self.abort_reason = reason
            if self._interruptible and self._task is not None:
                self._task.cancel(reason)
            self._wake()

    def mine(self) -> bool:
        """Whether the running task made it."""
        return asyncio.current_task() is self._task

    async def interruptible(self, work: Coroutine[Any, Any, T]) -> T:
        """Await `work`; RequestRefused (kind `aborted`) if the call is aborted meanwhile or was before."""
        if self.abort_reason is not None:
            work.close()
            raise self._aborted(self.abort_reason)
        self._interruptible = True
        try:
            return await work
        except asyncio.CancelledError:
            if self.abort_reason is None or self._task is None:
                raise
            self._task.uncancel()
            raise self._aborted(self.abort_reason) from None
        finally:
            self._interruptible = False

    async def settled(self) -> bool:
        """Whether somebody is there to take the answer; waits while a retry may still come (bounded by its
        timer)."""
        while self.clients == 0 and self._expiry is not None:
            await self._changed()
        return self.clients > 0

    def start(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        """Status and headers are known."""
        self.head = (status, headers)
        self._wake()

    def release(self, part: bytes) -> None:
        """One more piece may go to every client."""
        self.parts.append(part)
        self._wake()

    def finish(self, error: LeydenError | None = None) -> None:
        """There is no more to come."""
        self.finished = True
        self.error = error
        if self._expiry is not None:
            self._expiry.cancel()
            self._expiry = None
        self._wake()

    async def part(self, index: int) -> bytes | None:
        """Part `index` as soon as it is there; None after the last."""
        while len(self.parts) <= index:
            if self.finished:
                return None
            await self._changed()
        return self.parts[index]

    async def started(self) -> None:
        """Wait until there is a head, or an error instead."""
        while self.head is None and not self.finished:
            await self._changed()

    @staticmethod
    def _aborted(reason: str) -> RequestRefused:
        return RequestRefused(
            f"the call was stopped: {reason}",
            status=503,
            kind="aborted",
            hint="send it again: nothing was delivered",
        )

    def _expire(self) -> None:
        self._expiry = None
        self.abort("the client left and did not come back")

    def _wake(self) -> None:
        if self._signal is not None:
            self._signal.set()
            self._signal = None

    async def _changed(self) -> None:
        if self._signal is None:
            self._signal = asyncio.Event()
        await self._signal.wait()


Texts = dict[str, list[tuple[Any, str]]]
"""By id of a tool call: (arguments, their text) as the engine gave them; only what a harness cannot give back."""


def note_texts(known: Texts, new: Mapping[str, Sequence[tuple[Any, str]]]) -> None:
    """Add texts; engines may use an id again, so an id may have several."""
    for call_id, texts in new.items():
        known.setdefault(call_id, []).extend(texts)


class Book:
    """One attempt's page in the ledger."""

    __slots__ = ("_attempt_id", "_flights", "_loading", "_occurrences", "_stored", "next_seq", "texts")

    def __init__(self, attempt_id: str | None) -> None:
        self._attempt_id = attempt_id
        self.next_seq = 0
        self.texts: Texts = {}
        self._occurrences: dict[str, int] = {}
        self._flights: dict[str, list[Flight]] = {}
        self._stored: bool | None = None
        self._loading: asyncio.Lock | None = None

    @property
    def busy(self) -> bool:
        """Whether a call is in flight."""
        return bool(self._flights)

    async def place(
        self, reader: Reader, digest: str, retry_count: int, sdk: bool, settle: Settle | None = None
    ) -> "Flight | Call":
        """Where a request belongs: a new flight, an earlier flight (joined), or a stored call. `settle` waits for the
        end of a call that another worker has in flight."""
        if self._attempt_id is not None and self._stored is None:
            await self._load(reader)
        if retry_count > 0:
            flights = self._flights.get(digest)
            if flights:
                # Of several equal calls the one whose client left is the one that is asked for again.
                flight = min(flights, key=lambda flight: (flight.clients > 0, flight.occurrence))
                flight.join(retry_count)
                return flight
            call = await self._last(reader, digest)
            if call is not None and call.status == "open" and settle is not None:
                call = await settle(call, retry_count)
            if call is not None and call.status == "ok":
                return call
        flight = Flight(digest, retry_count, sdk)
        self._flights.setdefault(digest, []).append(flight)
        return flight

    async def recall(self, reader: Reader) -> Texts:
        """Exact texts of arguments, those that an earlier process recorded among them."""
        if self._attempt_id is not None and self._stored is None:
            await self._load(reader)
        return self.texts

    async def number(self, reader: Reader, flight: Flight, worker: tuple[int, int] = (0, 1)) -> None:
        """Give a flight its occurrence and its place in the order of arrival. `worker` is (index, number of workers):
        where there are several, the store gives both to calls of an attempt when their intent is written."""
        if worker[1] > 1 and self._attempt_id is not None:
            return
        if self._stored and flight.digest not in self._occurrences:
            await self._last(reader, flight.digest)
        flight.occurrence = self._occurrences.get(flight.digest, 0)
        flight.seq = self.next_seq
        self.numbered(flight)

    def numbered(self, flight: Flight) -> None:
        """Take notice of the numbers of a flight."""
        self._occurrences[flight.digest] = max(self._occurrences.get(flight.digest, 0), flight.occurrence + 1)
        self.next_seq = max(self.next_seq, flight.seq + 1)

    async def take_place(self, reader: Reader) -> int:
        """The next place in the order of arrival, for a call that is reported instead of relayed."""
        if self._attempt_id is not None and self._stored is None:
            await self._load(reader)
        self.next_seq += 1
        return self.next_seq - 1

    def close(self, flight: Flight) -> None:
        """A flight is over."""
        flights = self._flights[flight.digest]
        flights.remove(flight)
        if not flights:
            del self._flights[flight.digest]
            if self._attempt_id is None:
                self._occurrences.pop(flight.digest, None)  # live traffic has no end, so nothing may pile up

    async def _load(self, reader: Reader) -> None:
        """Calls that an earlier process recorded for this attempt."""
        if self._loading is None:
            self._loading = asyncio.Lock()
        async with self._loading:
            if self._stored is None:
                assert self._attempt_id is not None
                calls = await asyncio.to_thread(reader.calls_of, self._attempt_id)
                self.next_seq = max((call.seq + 1 for call in calls), default=0)
                for call in calls:
                    note_texts(self.texts, stored_texts(call.response))
                self._stored = bool(calls)

    async def _last(self, reader: Reader, digest: str) -> Call | None:
        """The newest stored call with this digest; also learns how many there are."""
        if self._attempt_id is None:
            return None
        last: Call | None = None
        occurrence = max(0, self._occurrences.get(digest, 0) - 1)
        while True:
            call = await asyncio.to_thread(reader.find_call, self._attempt_id, digest, occurrence)
            if call is None:
                break
            last = call
            occurrence += 1
        self._occurrences[digest] = max(self._occurrences.get(digest, 0), occurrence)
        return last

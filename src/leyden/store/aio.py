"""The store for code that runs in an event loop. Nothing here blocks the loop for longer than a queue
operation."""

import asyncio
import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

from sqlalchemy import Connection, Table

from leyden.store.base import Receipt, Row, Store

T = TypeVar("T")


async def append(store: Store, table: Table, rows: Sequence[Row]) -> None:
    """`store.append`, awaited until it is durable."""
    await asyncio.wrap_future(store.append(table, rows))


async def write(store: Store, job: Callable[[Connection], T]) -> T:
    """`store.write`, awaited until it is durable. The job runs even if the waiting task is cancelled."""
    return await asyncio.wrap_future(store.write(job))


async def read(store: Store, query: Callable[[Connection], T]) -> T:
    """`store.read` in a thread of the loop's pool."""
    return await asyncio.to_thread(store.read, query)


async def watch(store: Store, topic: str, after: int, timeout_s: float) -> int:
    """`store.watch` without a thread per waiter: thousands of tasks may wait at once."""
    try:
        async with asyncio.timeout(timeout_s):
            return await asyncio.wrap_future(store.subscribe(topic, after))
    except TimeoutError:
        return after


class Quay:
    """Where rows leave an event loop and receipts for them arrive: the writer is woken once for all that a turn of the
    loop handed in, and the loop once for all that the writer committed together. A future per row would be a wake-up
    each, and on one core every wake-up is two switches between threads."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._loop: asyncio.AbstractEventLoop | None = None
        self._flushing = False
        self._arrived: list[tuple[asyncio.Future[None], BaseException | None]] = []
        self._lock = threading.Lock()

    async def durable(self, hand_in: Callable[[Receipt], None]) -> None:
        """Wait until what `hand_in` handed in with its receipt is durable. Raises what the store could not do."""
        loop = asyncio.get_running_loop()
        self._loop = loop
        waiter: asyncio.Future[None] = loop.create_future()
        hand_in(lambda failure: self._arrive(waiter, failure))
        if not self._flushing:
            self._flushing = True
            loop.call_soon(self._flush)
        await waiter

    def _flush(self) -> None:
        self._flushing = False
        self._store.flush()

    def _arrive(self, waiter: "asyncio.Future[None]", failure: BaseException | None) -> None:
        """Called by the store's writer."""
        with self._lock:
            self._arrived.append((waiter, failure))
            first = len(self._arrived) == 1
        if first and self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._unload)

    def _unload(self) -> None:
        with self._lock:
            arrived, self._arrived = self._arrived, []
        for waiter, failure in arrived:
            if waiter.cancelled():
                continue
            if failure is None:
                waiter.set_result(None)
            else:
                waiter.set_exception(failure)

"""The store for code that runs in an event loop. Nothing here blocks the loop for longer than a queue
operation."""

import asyncio
from collections.abc import Callable, Sequence
from typing import TypeVar

from sqlalchemy import Connection, Table

from leyden.store.base import Row, Store

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
        return await asyncio.wait_for(asyncio.wrap_future(store.subscribe(topic, after)), timeout_s)
    except TimeoutError:
        return after

"""The contract of a store: transactions on the tables of `schema`, and a way to wait for changes.

A store knows no meaning. Rooms hand it jobs; it makes them durable and says so.

- `append(table, rows)` is the hot road: rows of many callers are committed together (group commit).
  `append_all` does the same for rows that belong together although their tables differ, and `hand_in` is both
  without a future, for an event loop that has hundreds of them a second (`aio.Quay`).
- `write(job)` runs one function inside a transaction of its own savepoint: all of it or nothing; `hand_in_job` does
  so without a future.
- `read(query)` runs one function on a snapshot.
- `changed(topic)` and `watch(topic, after)` (or `subscribe`, its future) are how anybody waits: nobody polls
  one row at a time.

Whatever `append` or `write` returned for is on disk (`synchronous=FULL`) or, with `synchronous=NORMAL`,
survives a killed process but perhaps not a power cut. What was handed in `lazily` is as with NORMAL at first, and on
disk no later than anything that is committed after it.
"""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Protocol, TypeVar

from sqlalchemy import Connection, Table

T = TypeVar("T")
Row = Mapping[str, Any]
Parts = Sequence[tuple[Table, Sequence[Row]]]
"""Rows of several tables that belong together."""
Receipt = Callable[[BaseException | None], None]
"""Called once, by any thread: rows are durable, or why they are not. It must not raise, and not wait."""


class Store(Protocol):
    """What every store does. One contract suite runs over every implementation."""

    url: str
    """Where it is, without credentials."""

    def append(self, table: Table, rows: Sequence[Row]) -> "Future[None]":
        """Insert rows that carry every non-null column of `table`; the future is done when they are durable.

        Raises (in the future) Conflict if a key exists: then none of `rows` is in. StoreUnusable if the disk
        is full or the file cannot be written.
        """

    def append_all(self, parts: Parts) -> "Future[None]":
        """Like `append` for rows of several tables: all of them or none, in one transaction."""

    def hand_in(self, parts: Parts, receipt: Receipt, *, lazily: bool = False) -> None:
        """Like `append_all`, but nothing happens before `flush`, or before something else is handed in; `receipt` gets
        what would be in the future. `lazily` see the module."""

    def flush(self) -> None:
        """See to it that everything that was handed in is committed now."""

    def write(self, job: Callable[[Connection], T]) -> "Future[T]":
        """Run `job` in a transaction; the future has its result once that is durable.

        `job` may be run again after a lost race, so it must only touch the connection. Whatever it raises is
        raised in the future and leaves no trace in the store.
        """

    def hand_in_job(self, job: Callable[[Connection], object], receipt: Receipt, *, lazily: bool = False) -> None:
        """Like `write`, with a receipt as in `hand_in`: what `job` finds out it keeps itself."""

    def read(self, query: Callable[[Connection], T]) -> T:
        """Run `query` on a read connection of the calling thread and return its result."""

    def changed(self, connection: Connection, topic: str) -> None:
        """Inside a `write` job: wake everybody who watches `topic` once the transaction is durable."""

    def watch(self, topic: str, after: int, timeout_s: float) -> int:
        """Wait until `topic` changed more than `after` times; its count, or `after` when the time is over."""

    def subscribe(self, topic: str, after: int) -> "Future[int]":
        """A future with the count of `topic` as soon as it is above `after`; cancel it to let go.

        StoreUnusable (in the future) when the store is closed first.
        """

    def count(self, topic: str) -> int:
        """How often `topic` changed so far."""

    def close(self) -> None:
        """Finish what was handed in, then let go of every connection. Idempotent."""


def started() -> "Future[Any]":
    """A future that cannot be cancelled: what was handed in is done even if nobody waits for it any more."""
    future: Future[Any] = Future()
    future.set_running_or_notify_cancel()
    return future


def resolve(future: "Future[Any]", value: Any, failure: BaseException | None) -> None:
    """Give a future its value, or the failure instead."""
    if failure is None:
        future.set_result(value)
    else:
        future.set_exception(failure)


def promise() -> "tuple[Future[None], Receipt]":
    """A future that cannot be cancelled, and the receipt that resolves it."""
    future: Future[None] = started()
    return future, lambda failure: resolve(future, None, failure)

"""A store in one SQLite file: write-ahead log, one writer thread with group commit, readers on snapshots.

The writer takes everything that is queued, begins one transaction, runs it in order, commits, and only then
resolves the futures. Rows of consecutive appends are inserted with few statements per table: each one costs a
release of the interpreter's lock, which a busy event loop takes at once. Several processes may have the file
open; a lock held elsewhere is waited for (bounded). Not for use across a fork: open it in the child.
"""

import os
import sqlite3
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

from sqlalchemy import Connection, Table, create_engine, event
from sqlalchemy.engine import make_url
from sqlalchemy.exc import DBAPIError
from sqlalchemy.pool import NullPool, QueuePool

from leyden.base.errors import ConfigError, StoreUnusable
from leyden.store.base import Parts, Receipt, Row, promise, resolve, started
from leyden.store.sqlite_file import connect, explain, is_lost, prepare
from leyden.store.sqlite_work import INSERTS, Append, Insert, Job, Result, Work
from leyden.store.topics import TopicHub

T = TypeVar("T")

MAX_GROUP = 512
"""Jobs per commit: bounds how long the first of a burst waits, while the commit costs next to nothing per
job."""
BUSY_TIMEOUT_S = 10.0
"""Longest wait for another process: a group commit takes milliseconds, a migration under a second."""
CLOSE_TIMEOUT_S = 60.0
"""Longest wait for queued work when closing: several times a full queue on a slow disk."""

_BUMP = (
    "INSERT INTO topics (topic, changes) VALUES (?, 1) "
    "ON CONFLICT (topic) DO UPDATE SET changes = changes + 1 RETURNING changes"
)


class SqliteStore:
    """See the module and the contract `leyden.store.base.Store`."""

    def __init__(
        self,
        url: str,
        *,
        synchronous: Literal["full", "normal"] = "normal",
        create: bool = True,
        busy_timeout_s: float = BUSY_TIMEOUT_S,
    ) -> None:
        self.path = _path_of(url)
        self.url = f"sqlite:///{self.path}"
        self._busy_timeout_s = busy_timeout_s
        prepare(self.path, create=create, busy_timeout_s=busy_timeout_s)
        self._synchronous = self._asked = synchronous
        self._raw, self._connection = self._open_writer()
        # A reader per thread that reads at this moment; 32 stay open, which is what the loop's thread pool
        # holds.
        self._readers = create_engine(
            "sqlite://", creator=self._connect_reader, poolclass=QueuePool, pool_size=32, max_overflow=-1
        )
        event.listen(self._readers, "begin", lambda connection: connection.exec_driver_sql("BEGIN"))
        self._hub = TopicHub(self._connect_reader(), self._explain)
        self._bumped: dict[str, int] = {}
        self._waiting: list[Work] = []
        self._door = threading.Lock()
        self._asleep = False
        # A pipe and no condition: writing lets go of the interpreter's lock, so the writer that wakes has it at once.
        self._bell_out, self._bell_in = os.pipe()
        self._closed = False
        self._pid = os.getpid()
        self._writer = threading.Thread(target=self._work, name="leyden-store-writer", daemon=True)
        self._writer.start()

    def append(self, table: Table, rows: Sequence[Row]) -> "Future[None]":
        """See `Store.append`."""
        return self.append_all([(table, rows)])

    def append_all(self, parts: Parts) -> "Future[None]":
        """See `Store.append_all`."""
        future, receipt = promise()
        self.hand_in(parts, receipt)
        self.flush()
        return future

    def hand_in(self, parts: Parts, receipt: Receipt, *, lazily: bool = False) -> None:
        """See `Store.hand_in`."""
        made = [(insert, insert.tuples(rows)) for insert, rows in ((INSERTS[table], rows) for table, rows in parts)]
        self._submit(Append(made, receipt, lazily))

    def flush(self) -> None:
        """See `Store.flush`. Wakes the writer if it sleeps; while it works it looks by itself."""
        with self._door:
            asleep, self._asleep = self._asleep, False
        if asleep:
            os.write(self._bell_in, b"!")

    def write(self, job: Callable[[Connection], T]) -> "Future[T]":
        """See `Store.write`."""
        future: Future[T] = started()
        self._submit(Job(job, partial(resolve, future), lazily=False))
        self.flush()
        return future

    def hand_in_job(self, job: Callable[[Connection], object], receipt: Receipt, *, lazily: bool = False) -> None:
        """See `Store.hand_in_job`."""
        self._submit(Job(job, lambda _, failure: receipt(failure), lazily))

    def read(self, query: Callable[[Connection], T]) -> T:
        """See `Store.read`."""
        self._check_open()
        try:
            with self._readers.connect() as connection:
                return query(connection)
        except (sqlite3.Error, DBAPIError) as error:
            raise self._explain(error) from error

    def changed(self, connection: Connection, topic: str) -> None:
        """See `Store.changed`."""
        self._bumped[topic] = connection.exec_driver_sql(_BUMP, (topic,)).scalar_one()

    def subscribe(self, topic: str, after: int) -> "Future[int]":
        """See `Store.subscribe`."""
        return self._hub.subscribe(topic, after)

    def watch(self, topic: str, after: int, timeout_s: float) -> int:
        """See `Store.watch`."""
        future = self._hub.subscribe(topic, after)
        try:
            return future.result(timeout_s)
        except TimeoutError:
            return after if future.cancel() else future.result()

    def count(self, topic: str) -> int:
        """See `Store.count`."""
        return self._hub.count(topic)

    def close(self) -> None:
        """See `Store.close`. StoreUnusable if the queued work is not done after CLOSE_TIMEOUT_S."""
        with self._door:
            first, self._closed = not self._closed, True
        if first and self._pid == os.getpid():
            self.flush()
        if self._pid != os.getpid() or self._writer is threading.current_thread():
            return
        self._writer.join(CLOSE_TIMEOUT_S)
        if self._writer.is_alive():
            raise StoreUnusable(f"store {self.path} still writes after {CLOSE_TIMEOUT_S:g} s; see why its disk is slow")
        if first:
            self._hub.close(timeout_s=self._busy_timeout_s)
            self._readers.dispose()
            self._connection.close()
            self._raw.close()
            os.close(self._bell_in)
            os.close(self._bell_out)

    def _connect(self) -> sqlite3.Connection:
        return connect(self.path, busy_timeout_s=self._busy_timeout_s)

    def _open_writer(self) -> tuple[sqlite3.Connection, Connection]:
        """The writer's connection twice: as the driver has it, for speed, and as jobs get it."""
        raw = self._connect()
        raw.execute(f"PRAGMA synchronous = {self._asked.upper()}")
        self._synchronous = self._asked
        raw.execute("PRAGMA foreign_keys = ON")
        return raw, create_engine("sqlite://", creator=lambda: raw, poolclass=NullPool).connect()

    def _connect_reader(self) -> sqlite3.Connection:
        connection = self._connect()
        connection.execute("PRAGMA query_only = ON")
        return connection

    def _explain(self, error: BaseException) -> BaseException:
        return explain(error, self.path, self._busy_timeout_s)

    def _check_open(self) -> None:
        if self._closed:
            raise StoreUnusable(f"store {self.path} was closed; open it again")
        if self._pid != os.getpid():
            raise StoreUnusable(f"store {self.path} was opened before this process was forked; open it in this process")

    def _submit(self, work: Work) -> None:
        with self._door:
            try:
                self._check_open()
            except StoreUnusable as error:
                work.resolve(None, error)
            else:
                self._waiting.append(work)

    def _work(self) -> None:
        """Body of the writer thread."""
        while True:
            with self._door:
                group, self._waiting = self._waiting[:MAX_GROUP], self._waiting[MAX_GROUP:]
                if not group and self._closed:
                    return
                self._asleep = not group
            if group:
                self._commit_group(group)
            else:
                os.read(self._bell_out, 1)

    def _commit_group(self, group: list[Work]) -> None:
        bumped: dict[str, int] = {}
        try:
            self._set_synchronous("normal" if all(work.lazily for work in group) else self._asked)
            self._raw.execute("BEGIN IMMEDIATE")
            results = self._insert_whole(group) or self._apply(group, bumped)
            if self._connection.in_transaction():
                self._connection.commit()
            if self._raw.in_transaction:
                self._raw.execute("COMMIT")
        except Exception as error:  # noqa: BLE001 - the boundary of the thread: everybody in the group gets the error
            self._abandon()
            reason = self._explain(error)
            results = [(work, None, reason) for work in group]
            bumped = {}
        self._hub.publish(bumped)
        for work, value, failure in results:
            work.resolve(value, failure)

    def _set_synchronous(self, wanted: Literal["full", "normal"]) -> None:
        if wanted != self._synchronous:
            self._raw.execute(f"PRAGMA synchronous = {wanted.upper()}")
            self._synchronous = wanted

    def _abandon(self) -> None:
        """Undo the whole transaction; SQLite may have done so already."""
        try:
            if self._connection.in_transaction():
                self._connection.rollback()
            if self._raw.in_transaction:
                self._raw.execute("ROLLBACK")
        except (sqlite3.Error, DBAPIError):
            # Closing is the rollback that cannot fail; the next group begins on a new connection.
            self._raw.close()
            self._raw, self._connection = self._open_writer()

    def _insert_whole(self, group: list[Work]) -> list[Result] | None:
        """A group of appends without a savepoint, which nearly every group is; None if they have to be told apart."""
        appends = [work for work in group if isinstance(work, Append)]
        if len(appends) != len(group):
            return None
        try:
            self._insert(appends)
        except Exception as error:
            if is_lost(error) or not self._raw.in_transaction:
                raise
            self._raw.execute("ROLLBACK")
            self._raw.execute("BEGIN IMMEDIATE")
            return None
        return [(append, None, None) for append in appends]

    def _apply(self, group: list[Work], bumped: dict[str, int]) -> list[Result]:
        results: list[Result] = []
        appends: list[Append] = []
        for work in group:
            if isinstance(work, Append):
                appends.append(work)
                continue
            if appends:
                results += self._apply_appends(appends)
                appends = []
            results.append(self._apply_job(work, bumped))
        if appends:
            results += self._apply_appends(appends)
        return results

    def _apply_appends(self, appends: list[Append]) -> list[Result]:
        """One statement per table, parents first; if that fails, one by one to find the guilty."""
        failure = self._in_savepoint(lambda: self._insert(appends))
        if failure is None:
            return [(append, None, None) for append in appends]
        if len(appends) == 1:
            return [(appends[0], None, failure)]
        return [result for append in appends for result in self._apply_appends([append])]

    def _insert(self, appends: list[Append]) -> None:
        rows: dict[Insert, list[tuple[Any, ...]]] = {}
        for append in appends:
            for insert, tuples in append.parts:
                rows.setdefault(insert, []).extend(tuples)
        for insert in sorted(rows, key=lambda insert: insert.order):
            insert.run(self._raw, rows[insert])

    def _apply_job(self, job: Job, bumped: dict[str, int]) -> Result:
        self._bumped = {}
        box: list[Any] = []
        failure = self._in_savepoint(lambda: box.append(job.function(self._connection)))
        if failure is not None:
            return job, None, failure
        bumped.update(self._bumped)
        return job, box[0], None

    def _in_savepoint(self, function: Callable[[], None]) -> BaseException | None:
        """Run `function`; what it raised, undone and explained. Raises when the whole transaction is lost."""
        self._raw.execute("SAVEPOINT work")
        try:
            function()
            self._raw.execute("RELEASE work")
        except Exception as error:
            if is_lost(error) or not self._raw.in_transaction:
                raise
            self._raw.execute("ROLLBACK TO work")
            self._raw.execute("RELEASE work")
            return self._explain(error)
        return None


def _path_of(url: str) -> Path:
    parsed = make_url(url)
    if parsed.query or parsed.host or parsed.drivername not in ("sqlite", "sqlite+pysqlite"):
        raise ConfigError(f"store.url {url!r} has parts that are not understood; write sqlite:///path/to/file.db")
    if not parsed.database or parsed.database == ":memory:":
        raise ConfigError(f"store.url {url!r} is in memory, where no other process sees it; write sqlite:///leyden.db")
    return Path(parsed.database).absolute()

"""Waiting for changes: who waits for which topic, and one thread that looks for commits of other processes.

The thread asks `PRAGMA data_version` only while somebody waits; commits of this process wake their waiters at
once.
"""

import sqlite3
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future

from leyden.base.errors import StoreUnusable

POLL_S = 0.005
"""Pause between two looks: well under what a person or a rollout notices, about 0.1 % of a core."""


class TopicHub:
    """Counts of topics and the futures that wait for them. Owns one connection of its own."""

    def __init__(self, connection: sqlite3.Connection, explain: Callable[[BaseException], BaseException]) -> None:
        self._connection = connection
        self._explain = explain
        self._reading = threading.Lock()
        self._state = threading.Condition()
        self._waiting: dict[str, dict[Future[int], int]] = {}
        self._thread: threading.Thread | None = None
        self._closed = False

    def count(self, topic: str) -> int:
        """How often `topic` changed so far, freshly read."""
        return self._counts([topic])[topic]

    def subscribe(self, topic: str, after: int) -> "Future[int]":
        """See `Store.subscribe`."""
        future: Future[int] = Future()
        with self._state:
            if self._closed:
                future.set_exception(StoreUnusable(f"the store was closed; nobody can wait for {topic!r} any more"))
                return future
            self._waiting.setdefault(topic, {})[future] = after
            if self._thread is None:
                self._thread = threading.Thread(target=self._look, name="leyden-store-topics", daemon=True)
                self._thread.start()
            self._state.notify_all()
        future.add_done_callback(lambda done: self._forget(topic, done))
        # Registered first, read second: a change in between is seen by one of the two.
        self.publish({topic: self.count(topic)})
        return future

    def publish(self, counts: Mapping[str, int]) -> None:
        """Resolve every future whose topic is past what it waits for."""
        ready: list[tuple[Future[int], int]] = []
        with self._state:
            for topic, count in counts.items():
                waiting = self._waiting.get(topic, {})
                for future in [future for future, after in waiting.items() if count > after]:
                    del waiting[future]
                    ready.append((future, count))
        for future, count in ready:
            if future.set_running_or_notify_cancel():
                future.set_result(count)

    def close(self, timeout_s: float) -> None:
        """Fail whoever still waits, end the thread, close the connection. Idempotent."""
        with self._state:
            self._closed = True
            left = {future: topic for topic, waiting in self._waiting.items() for future in waiting}
            self._waiting.clear()
            self._state.notify_all()
        for future, topic in left.items():
            if future.set_running_or_notify_cancel():
                future.set_exception(StoreUnusable(f"the store was closed while somebody waited for {topic!r}"))
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout_s)
        with self._reading:
            self._connection.close()

    def _counts(self, topics: list[str]) -> dict[str, int]:
        counts = dict.fromkeys(topics, 0)
        try:
            with self._reading:
                marks = ", ".join("?" * len(topics))
                query = f"SELECT topic, changes FROM topics WHERE topic IN ({marks})"
                rows = self._connection.execute(query, topics).fetchall()
            counts.update(rows)
        except sqlite3.Error as error:
            if self._closed:
                raise StoreUnusable("the store was closed; open it again") from error
            raise self._explain(error) from error
        return counts

    def _forget(self, topic: str, future: "Future[int]") -> None:
        with self._state:
            self._waiting.get(topic, {}).pop(future, None)

    def _look(self) -> None:
        """Body of the thread: sleeps without a time limit while nobody waits."""
        seen = -1
        while True:
            with self._state:
                self._state.wait_for(lambda: self._closed or any(self._waiting.values()))
                if self._closed:
                    return
                topics = [topic for topic, waiting in self._waiting.items() if waiting]
            try:
                with self._reading:
                    version = self._connection.execute("PRAGMA data_version").fetchone()[0]
                if version != seen:
                    self.publish(self._counts(topics))
                    seen = version
            except (sqlite3.Error, StoreUnusable) as error:
                self._fail(error)
            time.sleep(POLL_S)

    def _fail(self, error: BaseException) -> None:
        """Nobody may wait for ever because the file cannot be read: hand the error to all of them."""
        with self._state:
            left = [future for waiting in self._waiting.values() for future in waiting]
            self._waiting.clear()
        for future in left:
            if future.set_running_or_notify_cancel():
                future.set_exception(self._explain(error))

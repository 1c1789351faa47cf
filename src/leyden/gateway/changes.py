"""How often a topic of the store changed, pushed by the store instead of asked for on every call.

A change of this process is seen at once, one of another process within the store's polling pause
(milliseconds). Asking the store costs a read transaction, which is dear while another connection commits
hundreds of times a second.
"""

from concurrent.futures import Future

from leyden.store.base import Store


class Changes:
    """The counter of one topic."""

    def __init__(self, store: Store, topic: str) -> None:
        self._store = store
        self._topic = topic
        self._count = store.count(topic)
        self._pushed = True
        self._arm()

    def count(self) -> int:
        """How often the topic changed. Raises StoreError where the store cannot tell any more."""
        return self._count if self._pushed else self._store.count(self._topic)

    def _arm(self) -> None:
        self._store.subscribe(self._topic, self._count).add_done_callback(self._changed)

    def _changed(self, future: "Future[int]") -> None:
        if future.cancelled() or future.exception() is not None:
            self._pushed = False
            return
        self._count = future.result()
        self._arm()

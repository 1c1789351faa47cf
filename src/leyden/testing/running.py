"""A real gateway in a thread of its own, and attempts to call it with, for tests of harnesses."""

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from leyden.base.config import Config
from leyden.base.records import Attempt, Rollout, Task, new_id
from leyden.gateway.app import Listening, serve
from leyden.store import queue
from leyden.store.base import Store
from leyden.traces.recorder import Recorder

START_TIMEOUT_S = 20.0
"""A gateway starts in well under a second; a loaded machine may take a few."""


@contextmanager
def running_gateway(
    config: Config, store: Store, *, recorder: Recorder | None = None, admin_key: str | None = None
) -> Iterator[Listening]:
    """A gateway that serves until the block ends."""
    ready = threading.Event()
    listening: list[Listening] = []
    stops: list[Callable[[], None]] = []
    failures: list[BaseException] = []

    def on_ready(where: Listening) -> None:
        listening.append(where)
        ready.set()

    def run() -> None:
        try:
            serve(config, store, recorder=recorder, admin_key=admin_key, on_ready=on_ready, stop=stops.append)
        except BaseException as error:  # noqa: BLE001 - the boundary of the thread: raised again by the caller
            failures.append(error)
        finally:
            ready.set()

    thread = threading.Thread(target=run, name="gateway", daemon=True)
    thread.start()
    if not ready.wait(START_TIMEOUT_S) or not listening:
        raise (failures[0] if failures else TimeoutError(f"the gateway did not start within {START_TIMEOUT_S} s"))
    try:
        yield listening[0]
    finally:
        stops[0]()
        thread.join(START_TIMEOUT_S)


@dataclass(frozen=True, slots=True)
class Started:
    """An attempt that may call."""

    rollout: Rollout
    """Whose it is."""
    attempt: Attempt
    """Itself."""
    token: str
    """Its key."""

    def base_url(self, gateway_url: str) -> str:
        """What a runner puts into OPENAI_BASE_URL."""
        return (
            f"{gateway_url}/proxy/rollout/{self.rollout.id}/attempt/{self.attempt.id}/mode/{self.rollout.mode}"
            "/openai/v1"
        )


def start_attempt(store: Store, *, task_input: Mapping[str, Any] | None = None, **fields: Any) -> Started:
    """A new rollout with `fields`, and its first attempt."""
    mode = fields.get("mode", "train")
    task = Task(id=new_id("task"), split="train" if mode == "train" else "val", input=task_input or {})
    rollout = Rollout(id=new_id("ro"), task=task, **fields)
    owner = "leyden.testing"

    def job(connection: Any) -> tuple[Attempt, str]:
        queue.enqueue(connection, store, [rollout])
        return queue.start_attempt(connection, store, rollout.id, owner, time.time())

    attempt, token = store.write(job).result(10)
    return Started(store.read(lambda connection: queue.get(connection, rollout.id)), attempt, token)

"""Several gateway processes on one port: started, watched, started again when they die, ended with the parent.

The parent keeps the port bound without listening on it, so that no worker's crash gives it away; the kernel spreads
connections over those that listen. What the workers share (pause, retries, scrapes) goes through the store: see
`leyden.gateway.siblings`.
"""

import os
import secrets
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from sqlalchemy import Connection

from leyden.base.config import Config, dump
from leyden.base.errors import ConfigError
from leyden.cli import wiring
from leyden.cli.processes import Child, write_ready
from leyden.store import ledger
from leyden.store.base import Store

if TYPE_CHECKING:
    from leyden.gateway.app import Listening

RUNNER_KEY_ENV = "LEYDEN_WORKER_RUNNER_KEY"
"""Variable in which workers find the runner's key that they share."""
LOOK_S = 0.2
"""Pause between two looks whether a worker died."""
FORGIVEN_S = 60.0
"""A worker that ran this long before it died is not counted as one that dies again and again."""


def serve_with_workers(
    config: Config, store: Store, folder: Path, num_workers: int, on_ready: "Callable[[Listening], None]"
) -> None:
    """Serve with several processes until SIGINT or SIGTERM. Raises ConfigError, and LearningError when a worker keeps
    dying."""
    from leyden.gateway.app import Listening, listen, tls_files, url_of
    from leyden.gateway.auth import make_token

    tls_files(config)
    listener = listen(config.gateway.host, config.gateway.port, shared=True)
    group = f"{os.getpid()}-{secrets.token_hex(4)}"
    stopped: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, frame: stopped.append(number))
    with listener:
        port = listener.getsockname()[1]
        fixed = config.model_copy(update={"gateway": config.gateway.model_copy(update={"port": port})})
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"workers-{group}.json"
        path.write_text(dump(fixed), encoding="utf-8")
        keys = {
            config.gateway.admin_key_env: os.environ.get(config.gateway.admin_key_env) or make_token(),
            RUNNER_KEY_ENV: make_token(),
        }
        children = [
            Child(
                f"worker-{index}",
                ["serve", "--config", str(path), "--worker-of", f"{group}:{index}:{num_workers}"],
                folder / "logs",
                {**os.environ, **keys},
            )
            for index in range(num_workers)
        ]
        try:
            for child in children:
                child.start()
            on_ready(Listening(url_of(listener, config), keys[config.gateway.admin_key_env], keys[RUNNER_KEY_ENV]))
            _watch(children, stopped)
        finally:
            _end(children, config.gateway.shutdown_timeout_s)
            path.unlink(missing_ok=True)
            _forget(store, group)


def serve_as_worker(config: Config, place: str, ready_file: Path | None) -> None:
    """Be one of the workers; `place` is group, index and number of workers."""
    from leyden.gateway.app import serve
    from leyden.gateway.siblings import Siblings

    group, index, size = place.rsplit(":", 2)
    if RUNNER_KEY_ENV not in os.environ:
        raise ConfigError("--worker-of is for `leyden serve --workers` alone; use that")
    store = wiring.store_of(config)
    try:
        serve(
            config, store, runner_key=os.environ[RUNNER_KEY_ENV], siblings=Siblings(group, int(index), int(size)),
            on_ready=lambda listening: write_ready(ready_file, {"url": listening.url, "pid": os.getpid()}),
        )  # fmt: skip
    finally:
        store.close()


def _watch(children: list[Child], stopped: list[int]) -> None:
    since = dict.fromkeys((child.name for child in children), time.monotonic())
    while not stopped:
        for child in children:
            if child.pid is None and time.monotonic() - since[child.name] > FORGIVEN_S:
                child.num_restarts = 0
            if child.check():
                since[child.name] = time.monotonic()
        time.sleep(LOOK_S)


def _end(children: list[Child], shutdown_timeout_s: float) -> None:
    """All at once, so that each has the whole time to end its calls."""
    for child in children:
        if child.pid is not None:
            os.kill(child.pid, signal.SIGTERM)
    for child in children:
        child.stop(shutdown_timeout_s + 10)


def _forget(store: Store, group: str) -> None:
    """Nothing of the group is left in the store."""

    def job(connection: Connection) -> None:
        kept = ledger.control_below(connection, f"gateway.{group}.")
        ledger.delete_control(connection, list(kept))

    store.write(job).result(30)

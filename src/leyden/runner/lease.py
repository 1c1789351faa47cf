"""The runner: leases rollouts, keeps the leases alive, runs up to `harness.concurrency` attempts at once.

Promises: never works on a rollout that another runner owns; gives everything back when it is stopped; a
runner that dies loses nothing, its leases run out and others take over. Does not create rollouts or call
models.
"""

import asyncio
import os
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from leyden.base.config import Config
from leyden.base.records import new_id
from leyden.rewards.components import reward_version
from leyden.rewards.verifiers import Verifier, check_verifier, open_canary, open_verifier, reward_files
from leyden.runner.attempt import AttemptRunner, Slot
from leyden.runner.base import Launcher
from leyden.runner.environment import Harness, preload_environment, read_harness
from leyden.runner.local import LocalLauncher
from leyden.runner.outcome import policies
from leyden.runner.snapshots import check_snapshots
from leyden.runner.workspace import Workspaces, check_template
from leyden.store import aio, queue
from leyden.store.base import Store
from leyden.traces.recorder import Recorder

LEASE_S = 30.0
"""How long a dead runner's rollouts wait for another one."""
STOP_S = 60.0
"""Longest wait for attempts to end when the runner stops; ending one takes 2 s of grace and milliseconds."""


def check_harness(config: Config) -> None:
    """HarnessError or ConfigError for a harness that could never start. Runs before the first rollout."""
    read_harness(config)
    policies(config.rewards)
    check_snapshots(config)
    if config.harness.workspace:
        check_template(config.resolve(config.harness.workspace))


class Runner:
    """Runs harnesses for the rollouts of a store."""

    def __init__(
        self,
        store: Store,
        config: Config,
        gateway_url: str,
        *,
        launcher: Launcher | None = None,
        verifier: Verifier | None = None,
        recorder: Recorder | None = None,
        workspace_root: Path | None = None,
        owner: str | None = None,
        lease_s: float = LEASE_S,
        run_id: str | None = None,
    ) -> None:
        """Raises HarnessError, ConfigError or VerifierError for what could never work.

        `run_id` narrows it to the rollouts of one run: others may need an engine that is not there.
        `launcher`, `verifier` and `recorder` replace the configured ones. `workspace_root` holds the
        workspaces that `harness.keep_workspaces` keeps; by default `workspaces` in `run.dir`.
        """
        check_harness(config)
        check_verifier(config)
        self._store = store
        self._config = config
        self._gateway_url = gateway_url
        self._launcher = launcher
        self._verifier = verifier
        self._recorder = recorder or Recorder(store)
        self._workspace_root = workspace_root or config.resolve(config.run.dir) / "workspaces"
        self._lease_s = lease_s
        self._run_id = run_id
        self._slots: dict[str, Slot] = {}
        self._changed = asyncio.Event()
        self.owner = owner or new_id(f"runner_{socket.gethostname()[:40]}_{os.getpid()}")
        """Name of this runner in the store."""

    @property
    def num_running(self) -> int:
        """Rollouts that this runner works on now."""
        return len(self._slots)

    async def run(self, stop: asyncio.Event) -> None:
        """Work until `stop` is set; then no harness is left and unfinished rollouts are given back.

        Raises HarnessError when a preload module cannot be imported, StoreError when the store fails.
        """
        harness = read_harness(self._config)
        launcher = self._launcher or _launcher(self._config, harness)
        num_workers = min(self._config.harness.concurrency, os.cpu_count() or 1)
        verifier = self._verifier or open_verifier(self._config, num_workers=num_workers)
        canary = open_canary(self._config, num_workers=1)
        template = self._config.harness.workspace
        workspaces = Workspaces(
            self._config.resolve(template) if template else None,
            self._workspace_root if self._config.harness.keep_workspaces else None,
        )
        attempts = AttemptRunner(
            self._store,
            self._config,
            self._gateway_url,
            owner=self.owner,
            harness=harness,
            launcher=launcher,
            workspaces=workspaces,
            verifier=verifier,
            reward_version=reward_version(self._config.rewards, *reward_files(self._config)),
            recorder=self._recorder,
            canary=canary,
        )
        beating = asyncio.create_task(self._beat())
        leasing = asyncio.create_task(self._lease(attempts, stop))
        stopping = asyncio.create_task(stop.wait())
        try:
            if isinstance(launcher, LocalLauncher):
                await launcher.start()
            await asyncio.wait({beating, leasing, stopping}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            await self._end([leasing, stopping], beating, launcher, verifier, workspaces)
            if canary is not None:
                await canary.close()
        for task in (leasing, beating):
            if not task.cancelled():
                task.result()

    async def _end(
        self,
        waiting: Sequence["asyncio.Task[Any]"],
        beating: "asyncio.Task[None]",
        launcher: Launcher,
        verifier: Verifier | None,
        workspaces: Workspaces,
    ) -> None:
        for task in waiting:
            task.cancel()
        await asyncio.wait(waiting)
        tasks = [slot.task for slot in self._slots.values() if slot.task is not None]
        for slot in self._slots.values():
            slot.interrupt()
        if tasks:
            await asyncio.wait(tasks, timeout=STOP_S)
        beating.cancel()
        await asyncio.wait([beating])
        await launcher.close()
        if verifier is not None:
            await verifier.close()
        workspaces.close()

    async def _lease(self, attempts: AttemptRunner, stop: asyncio.Event) -> None:
        """Take rollouts for free slots; sleep until the queue or a slot changes or a lease may be over."""
        while not stop.is_set():
            self._changed.clear()
            self._check()
            free = self._config.harness.concurrency - len(self._slots)
            if free <= 0:
                await self._changed.wait()  # bounded by the time limit of the attempts that hold the slots
                continue
            seen = await asyncio.to_thread(self._store.count, queue.TOPIC)
            if not await self._take(attempts, free):
                await self._wait(seen)

    async def _take(self, attempts: AttemptRunner, limit: int) -> int:
        leased = await aio.write(
            self._store,
            lambda conn: queue.lease(conn, self._store, self.owner, limit, self._lease_s, time.time(), self._run_id),
        )
        for rollout in leased:
            slot = Slot(rollout)
            self._slots[rollout.id] = slot
            slot.task = asyncio.create_task(attempts.run(slot))
            slot.task.add_done_callback(lambda task, slot=slot: self._over(slot, task))  # type: ignore[misc]
        return len(leased)

    async def _wait(self, seen: int) -> None:
        queued = asyncio.ensure_future(aio.watch(self._store, queue.TOPIC, seen, self._lease_s / 3))
        freed = asyncio.ensure_future(self._changed.wait())
        try:
            await asyncio.wait({queued, freed}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            freed.cancel()
            queued.cancel()
        if queued.done() and not queued.cancelled():
            queued.result()

    async def _beat(self) -> None:
        """Extend the leases; interrupt what is not ours any more."""
        while True:
            await asyncio.sleep(self._lease_s / 3)
            held = list(self._slots)
            if not held:
                continue
            owned = await aio.write(
                self._store,
                lambda conn, held=held: queue.heartbeat(conn, self.owner, held, self._lease_s, time.time()),  # type: ignore[misc]
            )
            for rollout_id in held:
                slot = self._slots.get(rollout_id)
                if slot is not None and rollout_id not in owned:
                    slot.interrupt()

    def _over(self, slot: Slot, task: "asyncio.Task[None]") -> None:
        # A released rollout may have been leased again already, by this very runner.
        if (task.cancelled() or task.exception() is None) and self._slots.get(slot.rollout.id) is slot:
            del self._slots[slot.rollout.id]
        self._changed.set()

    def _check(self) -> None:
        """Raise what broke an attempt in a way that is no outcome, for example a full disk."""
        for slot in list(self._slots.values()):
            if slot.task is not None and slot.task.done():
                self._slots.pop(slot.rollout.id, None)
                slot.task.result()


def _launcher(config: Config, harness: Harness) -> Launcher:
    if not config.harness.preload:
        return LocalLauncher()
    return LocalLauncher(preload=config.harness.preload, path=harness.path, env=preload_environment(config))

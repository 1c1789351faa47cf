"""A store, a gateway stand-in and a runner in a temporary folder."""

import asyncio
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.unit.runner.stand_in import StandIn, stand_in

from leyden.base.config import Config, from_tree
from leyden.base.records import Attempt, Rollout, RolloutState, Task, Trace
from leyden.runner import attempt as attempt_module
from leyden.runner.lease import Runner
from leyden.store import aio, open_store, queue
from leyden.store.base import Store
from leyden.traces.reader import Reader

CALL = """
import json, os, urllib.request

def call(url=None):
    request = urllib.request.Request(
        (url or os.environ["OPENAI_BASE_URL"]) + "/chat/completions",
        json.dumps({"model": "main", "messages": [{"role": "user", "content": "hello"}]}).encode(),
        {"content-type": "application/json", "authorization": "Bearer " + os.environ["OPENAI_API_KEY"]},
    )
    with urllib.request.urlopen(request) as response:
        return json.load(response)["choices"][0]["message"]["content"]
"""


class Bench:
    """Everything that a test of the runner needs."""

    def __init__(self, folder: Path, store: Store, gateway: StandIn) -> None:
        self.folder = folder
        self.store = store
        self.gateway = gateway
        self.tree: dict[str, Any] = {"harness": {"command": "python agent.py", "concurrency": 4}}
        (folder / "model.py").write_text(CALL)

    def agent(self, text: str, **harness: Any) -> None:
        (self.folder / "agent.py").write_text(textwrap.dedent(text))
        self.tree["harness"].update(harness)

    def verifier(self, body: str, **rewards: Any) -> None:
        (self.folder / "verify.py").write_text(f"def verify(task, trace, workspace): {body}\n")
        self.tree["rewards"] = {"verifier": "verify.py:verify", **rewards}

    def config(self) -> Config:
        return from_tree(self.tree, base_dir=self.folder)

    async def enqueue(self, num: int = 1, **fields: Any) -> list[Rollout]:
        task_input = fields.pop("input", {"q": "?"})
        rollouts = [
            Rollout(id=f"r{i}", task=Task(id=f"t{i}", input=task_input, answer={"secret": "42"}), **fields)
            for i in range(num)
        ]
        return await aio.write(self.store, lambda conn: queue.enqueue(conn, self.store, rollouts))

    async def run(self, num: int = 1, *, timeout_s: float = 30.0, **options: Any) -> list[Rollout]:
        """Run until `num` rollouts are over; they, in order of their end."""
        stop = asyncio.Event()
        runner = Runner(self.store, self.config(), self.gateway.url, **options)
        running = asyncio.create_task(runner.run(stop))
        try:
            return await self.over(num, timeout_s, running)
        finally:
            stop.set()
            await running

    async def over(
        self, num: int, timeout_s: float = 30.0, running: "asyncio.Task[None] | None" = None
    ) -> list[Rollout]:
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            seen = self.store.count(queue.TOPIC)
            found, _, total = await aio.read(self.store, lambda conn: queue.terminal(conn, 0, 1000))
            if total >= num:
                return found
            if running is not None and running.done():
                running.result()
                pytest.fail("the runner ended early")
            await aio.watch(self.store, queue.TOPIC, seen, 0.5)
        pytest.fail(f"{total} of {num} rollouts ended in {timeout_s} s")

    async def one(self, **options: Any) -> tuple[Rollout, Attempt]:
        """Queue one rollout, run it to its end."""
        await self.enqueue()
        [rollout] = await self.run(**options)
        return rollout, self.attempts()[-1]

    def attempts(self, rollout_id: str = "r0") -> list[Attempt]:
        return self.store.read(lambda conn: queue.attempts(conn, rollout_id))

    def rollout(self, rollout_id: str = "r0") -> Rollout:
        return self.store.read(lambda conn: queue.get(conn, rollout_id))

    def trace(self, rollout_id: str = "r0") -> Trace:
        return Reader(self.store).trace(rollout_id)


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    monkeypatch.setattr(attempt_module, "BACKOFF_S", (0.01,))
    store = open_store(f"sqlite:///{tmp_path / 'leyden.db'}")
    with stand_in(store) as gateway:
        yield Bench(tmp_path, store, gateway)
    store.close()


Until = Callable[[Callable[[], bool], str], Any]
FAILED, SUCCEEDED = RolloutState.FAILED, RolloutState.SUCCEEDED

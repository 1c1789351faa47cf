"""What a run is made of: the house that `leyden.cli.wiring` builds and the loop lives in, and whom it talks to."""

import asyncio
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from leyden.base.config import Config
from leyden.base.errors import LearningError
from leyden.base.records import Task
from leyden.base.tasks import Demo
from leyden.learning.backends.base import Backend
from leyden.learning.evidence import Teacher
from leyden.learning.inflight import Carried
from leyden.store import aio, queue
from leyden.store.base import Store

POLL_S = 0.25
"""Shortest time between two looks at rollouts that are waited for: each look decodes every row."""


class Progress(Protocol):
    """Where the loop says what it does."""

    def say(self, text: str) -> None:
        """One sentence for people."""

    def begin(self, phase: str, total: int) -> None:
        """A phase of `total` units starts; it replaces the one before."""

    def advance(self, done: int, note: str = "") -> None:
        """`done` units of the phase are over."""

    def end(self) -> None:
        """The phase is over."""

    def metrics(self, row: Mapping[str, Any]) -> None:
        """The report of a step."""


class Services(Protocol):
    """The gateway and runner processes of this run."""

    def check(self) -> None:
        """Restart what died; LearningError when it keeps dying, with the end of its log."""

    async def hold(self) -> None:
        """New calls wait and the calls in flight have ended when this returns."""

    async def resume(self) -> None:
        """Calls go on."""


@dataclass(frozen=True, kw_only=True)
class Learner:
    """One policy that a run trains, and what trains it."""

    config: Config
    """That of the run, with `learn` as this policy reads it."""
    backend: Backend
    """Samples from its weights and moves them."""
    teacher: Teacher | None = None
    """Scores tokens, for algorithms that learn from another model."""
    base_version: int = 0
    """Version that this run starts from."""

    @property
    def policy(self) -> str:
        """Its name."""
        return self.config.learn.policy


@dataclass(kw_only=True)
class House:
    """Everything a run is made of; `leyden.cli.wiring` builds it."""

    config: Config
    run_id: str
    folder: Path
    store: Store
    backend: Backend
    services: Services
    progress: Progress
    train_tasks: Sequence[Task]
    holdout_tasks: Sequence[Task]
    val_tasks: Sequence[Task] = ()
    demos: Sequence[Demo] = ()
    engine_url: str = ""
    """Where the backend serves, without `/v1`."""
    teacher: Teacher | None = None
    """Scores tokens, for algorithms that learn from another model."""
    carried: Carried | None = None
    """Groups that run on from step to step, where `learn.max_staleness` is above 0."""
    base_version: int = 0
    """Version of the policy that this run starts from."""
    others: Sequence[Learner] = ()
    """Policies that are trained beside `policy`, from the same rollouts."""
    frozen: Sequence[str] = ()
    """Policies that are served beside them as version 0 and never changed."""
    done_steps: int = 0
    """Reinforcement steps whose result the backend holds already (after --resume)."""
    sft_done: bool = False
    """Whether the supervised stage is behind us (after --resume)."""
    stop_requested: Callable[[], None] = lambda: None
    """Raises Interrupted when the user asked to stop."""

    @property
    def policy(self) -> str:
        """Name of the policy that this run improves."""
        return self.config.learn.policy

    @property
    def learners(self) -> tuple[Learner, ...]:
        """Every policy that this run trains, `policy` first."""
        lead = Learner(config=self.config, backend=self.backend, teacher=self.teacher, base_version=self.base_version)
        return (lead, *self.others)

    @property
    def versions(self) -> dict[str, int]:
        """What a rollout that starts now asks for: the version of every policy that is served here."""
        return {one.policy: one.backend.version for one in self.learners} | dict.fromkeys(self.frozen, 0)

    async def wait(self, seen: int, deadline: float, late: Callable[[], str]) -> None:
        """Wait until rollouts changed since their count was `seen`, for a second at most.

        Raises Interrupted when the user asked to stop, and LearningError: when a process of the run keeps dying, and
        with what `late` says once `deadline` (on the monotonic clock) is over.
        """
        self.stop_requested()
        self.services.check()
        if time.monotonic() > deadline:
            raise LearningError(late())
        await asyncio.sleep(POLL_S)
        await aio.watch(self.store, queue.TOPIC, seen, 1.0)

    @property
    def sft_version(self) -> int:
        """Version after the supervised stage; every optimizer step makes one."""
        return self.base_version + sft_steps(self.config, len(self.demos))


def sft_steps(config: Config, num_demos: int) -> int:
    """Optimizer steps of the supervised stage."""
    return config.sft.epochs * math.ceil(num_demos / config.sft.batch_size) if config.sft else 0

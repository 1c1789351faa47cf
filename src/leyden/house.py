"""What a run is made of: the house that `leyden.cli.wiring` builds and the loop lives in, and whom it talks to."""

import asyncio
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
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
    """That of the run, as this policy reads it."""
    backend: Backend
    """Samples from its weights and moves them."""
    teacher: Teacher | None = None
    """Scores tokens, for algorithms that learn from another model."""
    base_version: int = 0
    """Version that this run starts from."""
    demos: Sequence[Demo] = ()
    """Approved conversations that it imitates in the supervised stage."""

    @property
    def policy(self) -> str:
        """Its name."""
        return self.config.learn.policy

    @property
    def sft_steps(self) -> int:
        """Optimizer steps of its supervised stage."""
        sft = self.config.sft
        return sft.epochs * math.ceil(len(self.demos) / sft.batch_size) if sft else 0


@dataclass(kw_only=True)
class House:
    """Everything a run is made of; `leyden.cli.wiring` builds it."""

    learners: Sequence[Learner]
    """Every policy that is trained, from the same rollouts; the first leads."""
    run_id: str
    folder: Path
    store: Store
    services: Services
    progress: Progress
    train_tasks: Sequence[Task]
    holdout_tasks: Sequence[Task]
    val_tasks: Sequence[Task] = ()
    engine_url: str = ""
    """Where the backend serves, without `/v1`."""
    carried: Carried | None = None
    """Groups that run on from step to step, where `learn.max_staleness` is above 0."""
    frozen: Sequence[str] = ()
    """Policies that are served beside them as version 0 and never changed."""
    done_steps: int = 0
    """Reinforcement steps whose result the backend holds already (after --resume)."""
    sft_done: bool = False
    """Whether the supervised stage is behind us (after --resume)."""
    stop_requested: Callable[[], None] = lambda: None
    """Raises Interrupted when the user asked to stop."""

    @property
    def lead(self) -> Learner:
        """The policy that the run is named by."""
        return self.learners[0]

    @property
    def policy(self) -> str:
        """Its name."""
        return self.lead.policy

    @property
    def config(self) -> Config:
        """The configuration of the run, as that policy reads it."""
        return self.lead.config

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
        """Version of the leading policy after the supervised stage."""
        return self.lead.base_version + sft_steps(self.learners)


def sft_steps(learners: Iterable[Learner]) -> int:
    """Versions that the supervised stage makes: the steps of the policy with most of them, for all advance together."""
    return max(one.sft_steps for one in learners)

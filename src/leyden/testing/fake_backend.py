"""A backend without weights and services without processes, for tests of the loop; no torch.

`ScriptedServices` plays runner and gateway: whenever the loop looks after its services, every queued rollout
is run at once and ends as the script says.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from sqlalchemy import Connection

from leyden.base.records import (
    Attempt,
    CallCompletion,
    CallIntent,
    Choice,
    FloatArray,
    IntArray,
    Outcome,
    Provenance,
    Reward,
    Rollout,
    RolloutState,
    new_id,
)
from leyden.learning.backends.base import Objective, UpdateReport
from leyden.learning.batch import Batch
from leyden.store import attempts, queue, selections
from leyden.store.base import Store
from leyden.traces.recorder import Recorder

BOUND_S = 20.0
"""Longest wait for the store."""

Play = Callable[[Rollout], float | None]
"""Rollout to its reward; None: the harness made no call."""


class FakeBackend:
    """Counts what it is asked for. It has versions, and no weights."""

    def __init__(self, policy: str = "main", version: int = 0) -> None:
        self.policy = policy
        self.version = version
        self.num_optimizer_steps = 0
        self.saved: list[Path] = []

    engine_key = "fake"

    def start(self) -> str:
        """Nothing listens there."""
        return "http://127.0.0.1:9"

    def encode_demo(self, messages: Sequence[Mapping[str, Any]]) -> tuple[list[int], int]:
        """One id per byte; everything before the last message is prompt."""
        texts = [str(message["content"]).encode() for message in messages]
        return [byte for text in texts for byte in text], sum(map(len, texts[:-1]))

    def update(self, batches: Sequence[Batch], objective: Objective, version: int) -> UpdateReport:
        """One optimizer step per batch."""
        assert version > self.version, (version, self.version)
        self.version = version
        self.num_optimizer_steps += len(batches)
        labels = sum(batch.num_labels for batch in batches)
        return UpdateReport(
            loss=1.0 / version, grad_norm=0.0, kl=0.0, entropy=0.0, clip_fraction=0.0, importance_capped=0.0,
            gap_mean=0.0, gap_max=0.0, num_labels=labels, num_forward_tokens=labels, num_sequence_tokens=labels,
            num_optimizer_steps=len(batches),
        )  # fmt: skip

    def logprobs(self, batch: Batch) -> FloatArray:
        """Zeros; shape (N,)."""
        return np.zeros(batch.num_labels, np.float32)

    def values(self, batch: Batch) -> FloatArray:
        """Zeros; shape (A,)."""
        return np.zeros(len(batch.sequences), np.float32)

    def save(self, folder: Path, *, full: bool) -> None:
        """An empty folder."""
        folder.mkdir(parents=True, exist_ok=True)
        self.saved.append(folder)

    def load(self, folder: Path, version: int, *, full: bool) -> None:
        """Be that version."""
        self.version = version

    def serve_as(self, version: int) -> None:
        """Be that version."""
        self.version = version

    def load_base(self, version: int) -> None:
        """Be that version."""
        self.version = version

    def forget_optimizer(self, folder: Path) -> None:
        """There is none."""

    def close(self) -> None:
        """Nothing is open."""


class ScriptedServices:
    """Runs every queued rollout by `play` when it is checked."""

    def __init__(
        self,
        store: Store,
        play: Play,
        policy: str = "main",
        asked: Callable[[Rollout], Sequence[str]] | None = None,
    ) -> None:
        """`asked`: the policies that a rollout calls, in order; one call of `policy` where it is not given."""
        self.num_held = 0
        self.held = False
        self.played: list[Rollout] = []
        self._store, self._play = store, play
        self._asked = asked or (lambda _: (policy,))
        self._recorder = Recorder(store)

    def check(self) -> None:
        """Run what is queued."""
        waiting = self._store.read(
            lambda connection: selections.select_by_state(connection, [RolloutState.QUEUING], 10_000)
        )
        for rollout in waiting:
            assert not self.held, "a rollout ran while the gateway held calls"
            self._run(rollout)
            self.played.append(rollout)

    async def hold(self) -> None:
        """Counted."""
        self.num_held += 1
        self.held = True

    async def resume(self) -> None:
        """Not held any more."""
        self.held = False

    def _run(self, rollout: Rollout) -> None:
        reward, now = self._play(rollout), time.time()

        def begin(connection: Connection) -> Attempt:
            return queue.start_attempt(connection, self._store, rollout.id, "script", now)[0]

        attempt = self._store.write(begin).result(BOUND_S)
        if reward is not None:
            for seq, policy in enumerate(self._asked(rollout)):
                self._record(rollout, attempt, seq, policy)
            self._score(rollout, attempt, reward)

        def end(connection: Connection) -> None:
            called = reward is not None
            attempts.end_attempt(
                connection,
                self._store,
                Attempt(
                    id=attempt.id,
                    rollout_id=rollout.id,
                    number=attempt.number,
                    started_at=attempt.started_at,
                    ended_at=now,
                    outcome=Outcome.COMPLETED,
                    detail="" if called else "the harness ended without a model call",
                    diagnosis=None if called else "no_calls",
                    stderr_tail="" if called else "where is everybody?",
                    duration_s=0.0,
                ),
            )
            queue.finish(
                connection, self._store, rollout.id, state=RolloutState.SUCCEEDED, outcome=Outcome.COMPLETED,
                reward=reward, error_message=None, now=now,
            )  # fmt: skip

        self._store.write(end).result(BOUND_S)

    def _score(self, rollout: Rollout, attempt: Attempt, reward: float) -> None:
        self._recorder.rewards(rollout.id, attempt.id, [Reward(name="right", value=reward)]).result(BOUND_S)

    def _said(self, rollout: Rollout, policy: str) -> tuple[IntArray, IntArray, FloatArray, str]:
        """(prompt, sampled ids, their log-probs, text) of a call."""
        ids = np.asarray([len(rollout.task.id) % 7, 5, 2], np.int32)
        return np.asarray([1, 4, 3], np.int32), ids, np.full(3, -0.5, np.float32), "hi"

    def _record(self, rollout: Rollout, attempt: Attempt, seq: int, policy: str) -> None:
        call_id = new_id("call")
        sampling = {"temperature": rollout.sampling.get("temperature", 1.0), "top_p": 1.0}
        prompt_ids, ids, logprobs, text = self._said(rollout, policy)
        self._recorder.intent(
            CallIntent(
                call_id=call_id, rollout_id=rollout.id, attempt_id=attempt.id, seq=seq, digest="d", occurrence=seq,
                origin="rollout", dialect="openai_chat", alias=policy, policy=policy,
                policy_version=rollout.policy_versions[policy], engine="fake", stream=False,
                request={"model": policy, "messages": [{"role": "user", "content": rollout.task.id}]},
                sampling={"asked": {}, "used": sampling}, started_at=time.time(),
            )
        ).result(BOUND_S)  # fmt: skip
        self._recorder.completion(
            CallCompletion(
                call_id=call_id, status="ok", http_status=200, response={"id": call_id},
                provenance=Provenance.SERVED, prompt_ids=prompt_ids,
                choices=[Choice(index=0, completion_ids=ids, logprobs=logprobs,
                                finish_reason="stop", text=text)],
            )
        ).result(BOUND_S)  # fmt: skip

"""One attempt, start to finish: start, launch, judge, verify, record.

Everything that decides about the rollout is one transaction at the end, and it holds only if this runner
still owns the lease; otherwise the result is discarded and the attempt is ended as an infrastructure error.
"""

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar
from urllib.parse import urlsplit

from sqlalchemy import Connection, select

from leyden.base.config import Config
from leyden.base.errors import Conflict, HarnessError, NotFound, RecordError, VerifierError
from leyden.base.records import VERIFICATION_SPAN, Attempt, Outcome, Reward, Rollout, RolloutState, Span, Trace, new_id
from leyden.rewards.components import Total
from leyden.rewards.verifiers import Verifier
from leyden.runner.base import Finished, Launcher, LaunchSpec
from leyden.runner.environment import Harness, build_environment, run_words, task_file
from leyden.runner.outcome import Ending, judge, policies
from leyden.runner.scoring import Scorer, rewards_of
from leyden.runner.snapshots import Snapshots, spans_of
from leyden.runner.workspace import Workspaces
from leyden.store import aio, queue
from leyden.store.base import Store
from leyden.store.schema import rollouts as rollouts_table
from leyden.traces.reader import Reader
from leyden.traces.recorder import Recorder

T = TypeVar("T")
logger = logging.getLogger("leyden.runner")

BACKOFF_S = (1.0, 5.0, 15.0)
"""Pause before the rollout of an infrastructure error is given back, by number of the attempt: an engine that
restarts needs seconds, and all retries would otherwise be spent in the same second."""
PROBE_S = 2.0
"""Longest wait for the gateway to accept a connection; it is on this machine or in the same network."""
MAX_WARNINGS = 3
"""Warnings per diagnosis; every one of them is in the store."""


@dataclass(slots=True)
class Slot:
    """A rollout that this runner works on."""

    rollout: Rollout
    """Whose turn it is."""
    attempt: Attempt | None = None
    """Once it has started."""
    token: str = ""
    """Key of the attempt."""
    task: "asyncio.Task[None] | None" = None
    """The coroutine that works."""
    recording: bool = False
    """True while the result is written, which is not interrupted."""
    interrupted: bool = False
    """Whether it was told to end."""

    def interrupt(self) -> None:
        """End the attempt, unless its result is being written. A second time changes nothing."""
        if self.task is not None and not self.recording and not self.interrupted:
            self.interrupted = True
            self.task.cancel()


@dataclass(frozen=True, slots=True)
class _Result:
    """What one attempt came to."""

    ending: Ending
    finished: Finished
    total: float | None = None
    rewards: Sequence[Reward] = ()


class AttemptRunner:
    """Everything that one attempt needs and shares with the others."""

    def __init__(
        self,
        store: Store,
        config: Config,
        gateway_url: str,
        *,
        owner: str,
        harness: Harness,
        launcher: Launcher,
        workspaces: Workspaces,
        verifier: Verifier | None,
        reward_version: str,
        recorder: Recorder,
        canary: Verifier | None = None,
    ) -> None:
        self._store = store
        self._config = config
        self._gateway_url = gateway_url
        self._owner = owner
        self._harness = harness
        self._launcher = launcher
        self._workspaces = workspaces
        self._reward_version = reward_version
        self._scorer = Scorer(config, gateway_url, verifier, canary)
        self._snapshots = Snapshots(config)
        self._max_attempts = config.harness.max_attempts
        self._policies = policies(config.rewards)
        self._total = Total(config.rewards)
        self._recorder = recorder
        self._reader = Reader(store)
        self._warned: Counter[str] = Counter()

    async def run(self, slot: Slot) -> None:
        """Work on one leased rollout until it is finished, released or lost."""
        try:
            if await self._worn_out(slot):
                return
            await _settle(self._start(slot))
            result = await self._try(slot)
            assert slot.attempt is not None
            if result.ending.outcome is Outcome.INFRA_ERROR and slot.attempt.number < self._max_attempts:
                await asyncio.sleep(BACKOFF_S[min(slot.attempt.number, len(BACKOFF_S)) - 1])
            slot.recording = True
            await self._record(slot, result)
        except asyncio.CancelledError:
            slot.recording = True
            await self._abandon(slot)
        except NotFound:
            logger.warning("rollout %s was deleted while it ran; its result is discarded", slot.rollout.id)

    async def _start(self, slot: Slot) -> None:
        slot.attempt, slot.token = await aio.write(
            self._store,
            lambda conn: queue.start_attempt(conn, self._store, slot.rollout.id, self._owner, time.time()),
        )

    async def _worn_out(self, slot: Slot) -> bool:
        """Give up on a rollout whose runners keep dying: it may be what kills them."""
        limit = self._max_attempts
        if slot.rollout.num_attempts < limit:
            return False
        tries = await aio.read(self._store, lambda conn: queue.attempts(conn, slot.rollout.id))
        if sum(attempt.diagnosis == "lost_runner" for attempt in tries) < limit:
            return False
        message = f"its runner was lost in {limit} attempts (harness.max_attempts)"

        def give_up(conn: Connection) -> None:
            if self._owns(conn, slot.rollout.id):
                queue.finish(
                    conn,
                    self._store,
                    slot.rollout.id,
                    state=RolloutState.FAILED,
                    outcome=Outcome.INFRA_ERROR,
                    reward=None,
                    error_message=message,
                    now=time.time(),
                )

        slot.recording = True
        await aio.write(self._store, give_up)
        return True

    async def _try(self, slot: Slot) -> _Result:
        """Run the harness in a workspace of its own and find out what it came to."""
        assert slot.attempt is not None
        folder = self._workspaces.root / slot.attempt.id
        try:
            try:
                await _settle(asyncio.to_thread(self._workspaces.create, slot.attempt.id))
                spec = self._spec(slot, folder)
                before = await asyncio.to_thread(self._snapshots.take, slot.rollout.task, folder, before=True)
                begun_at = time.time()
                finished = await self._launcher.launch(spec)
            except HarnessError as error:
                ending = Ending(outcome=Outcome.ENV_ERROR, detail=str(error), diagnosis="cannot_start")
                return _Result(ending, Finished(exit_code=None))
            finished = _without_token(finished, slot.token)
            after = await asyncio.to_thread(self._snapshots.take, slot.rollout.task, folder, before=False)
            for span in spans_of(slot.attempt, before, begun_at, after):
                await asyncio.wrap_future(self._recorder.span(span))
            return await self._evaluate(slot, spec, finished, folder)
        finally:
            await _settle(asyncio.to_thread(self._clean, folder))

    def _spec(self, slot: Slot, folder: Path) -> LaunchSpec:
        assert slot.attempt is not None
        rollout, harness = slot.rollout, self._config.harness
        foreign = sorted(key for key, value in rollout.config.items() if key != "timeout_seconds" and value)
        if foreign:
            raise HarnessError(
                f"rollout {rollout.id} has config.{foreign[0]}, which this runner does not honour; "
                "leave it out: the harness comes from [harness] of the configuration"
            )
        return LaunchSpec(
            argv=run_words(self._harness, rollout.task.input),
            cwd=folder,
            env=build_environment(self._config, self._gateway_url, rollout, slot.attempt, slot.token, folder),
            timeout_s=float(rollout.config.get("timeout_seconds") or harness.timeout_s),
            output_bytes=harness.output_bytes,
            memory_bytes=harness.memory_bytes,
        )

    def _clean(self, folder: Path) -> None:
        task_file(folder).unlink(missing_ok=True)
        if folder.exists():
            self._workspaces.remove(folder)

    async def _evaluate(self, slot: Slot, spec: LaunchSpec, finished: Finished, folder: Path) -> _Result:
        trace = await asyncio.to_thread(self._reader.trace, slot.rollout.id)
        answers = True
        if not finished.fault and (finished.exit_code != 0 or not trace.calls):
            answers = await _accepts(self._gateway_url)
        ending = judge(finished, trace, timeout_s=spec.timeout_s, gateway_answers=answers)
        policy = "exclude" if ending.excluded else self._policies[ending.outcome]
        if policy == "zero":
            return _Result(ending, finished, total=0.0)
        if policy != "train":
            return _Result(ending, finished)
        attempt = replace(
            trace.attempt,
            outcome=ending.outcome,
            exit_code=finished.exit_code,
            detail=ending.detail,
            stdout_tail=finished.stdout_tail,
            stderr_tail=finished.stderr_tail,
            duration_s=finished.duration_s,
        )
        trace = replace(trace, attempt=attempt)
        result = await self._score(slot, trace, ending, finished, folder)
        hidden = await self._scorer.hidden(trace, folder) if result.total is not None else []
        return replace(result, rewards=[*result.rewards, *hidden])

    async def _score(self, slot: Slot, trace: Trace, ending: Ending, finished: Finished, folder: Path) -> _Result:
        """Ask the verifier; a failure of it is an environment error, never a reward."""
        components = {reward.name: reward.value for reward in trace.rewards if reward.call_id is None}
        rewards: list[Reward] = []
        try:
            begun_at = time.time()
            found = await self._scorer.assess(slot.rollout, trace.attempt, slot.token, trace, folder)
            await self._record_verification(trace.attempt, begun_at)
            rewards = rewards_of(found)
            components.update(found.components or {})
            if found.unusable:
                detail = f"{ending.detail}; there is no reward: {found.unusable}"
                return _Result(replace(ending, detail=detail, diagnosis="judge_failed"), finished, rewards=rewards)
            step = trace.rollout.step if trace.rollout.mode == "train" else None
            explanation = self._total.explain(components, step) if components else None
        except (VerifierError, RecordError) as error:
            broken = Ending(outcome=Outcome.ENV_ERROR, detail=str(error), diagnosis="verifier_failed")
            return _Result(broken, finished, rewards=rewards)
        if explanation is not None:
            detail = f"{ending.detail}; reward {explanation.text()}"
            return _Result(replace(ending, detail=detail), finished, total=explanation.total, rewards=rewards)
        if ending.outcome is Outcome.AGENT_ERROR:
            return _Result(ending, finished, total=0.0)
        why = "rewards.verifier is not set and nobody posted a reward"
        if self._scorer.asks:
            why = f"{self._scorer.asks} gave none and nobody posted one"
        detail = f"{ending.detail}; there is no reward: {why}"
        return _Result(replace(ending, detail=detail, diagnosis="no_reward"), finished)

    async def _record_verification(self, attempt: Attempt, begun_at: float) -> None:
        """How long the verifier took, as a span: it is part of what a rollout costs."""
        span = Span(
            id=new_id("span"), rollout_id=attempt.rollout_id, attempt_id=attempt.id, name=VERIFICATION_SPAN,
            started_at=begun_at, ended_at=time.time(),
        )  # fmt: skip
        await asyncio.wrap_future(self._recorder.span(span))

    async def _record(self, slot: Slot, result: _Result) -> None:
        assert slot.attempt is not None
        ending = result.ending
        self._warn(slot, ending)
        if result.rewards:
            await asyncio.wrap_future(
                self._recorder.rewards(slot.rollout.id, slot.attempt.id, result.rewards, version=self._reward_version)
            )
        attempt = replace(
            slot.attempt,
            ended_at=time.time(),
            outcome=ending.outcome,
            exit_code=result.finished.exit_code,
            detail=ending.detail,
            diagnosis=ending.diagnosis,
            stdout_tail=result.finished.stdout_tail,
            stderr_tail=result.finished.stderr_tail,
            duration_s=result.finished.duration_s,
        )
        if not await aio.write(self._store, lambda conn: self._decide(conn, attempt, result)):
            await self._abandon(slot)

    def _decide(self, conn: Connection, attempt: Attempt, result: _Result) -> bool:
        """In one transaction: end the attempt and finish or release its rollout. False: the lease is lost."""
        if not self._owns(conn, attempt.rollout_id):
            return False
        ending, now = result.ending, time.time()
        queue.end_attempt(conn, self._store, attempt)
        policy = "exclude" if ending.excluded else self._policies[ending.outcome]
        tries = [a for a in queue.attempts(conn, attempt.rollout_id) if a.outcome is not Outcome.CANCELLED]
        if policy == "retry" and len(tries) < self._max_attempts:
            queue.release(conn, self._store, attempt.rollout_id, now)
            return True
        counts = policy in ("train", "zero")
        queue.finish(
            conn,
            self._store,
            attempt.rollout_id,
            state=RolloutState.SUCCEEDED if counts else RolloutState.FAILED,
            outcome=ending.outcome,
            reward=result.total if counts else None,
            error_message=None if ending.outcome is Outcome.COMPLETED and counts else ending.detail,
            now=now,
        )
        return True

    async def _abandon(self, slot: Slot) -> None:
        """End an attempt whose result does not count; give the rollout back if it is still ours."""

        def give_up(conn: Connection) -> None:
            now, mine = time.time(), self._owns(conn, slot.rollout.id)
            if slot.attempt is not None:
                outcome = Outcome.CANCELLED if mine else Outcome.INFRA_ERROR
                detail = "the runner was stopped" if mine else "this runner lost its lease; the result was discarded"
                ended = replace(slot.attempt, ended_at=now, outcome=outcome, detail=detail)
                # Whoever took the rollout over, deleted or cancelled it has ended the attempt already.
                with contextlib.suppress(Conflict, NotFound):
                    queue.end_attempt(conn, self._store, ended)
            if mine:
                queue.release(conn, self._store, slot.rollout.id, now)

        await aio.write(self._store, give_up)

    def _owns(self, conn: Connection, rollout_id: str) -> bool:
        row = conn.execute(
            select(rollouts_table.c.lease_owner, rollouts_table.c.state).where(
                rollouts_table.c.rollout_id == rollout_id
            )
        ).one_or_none()
        return row is not None and row.lease_owner == self._owner and row.state == RolloutState.RUNNING.value

    def _warn(self, slot: Slot, ending: Ending) -> None:
        if ending.diagnosis is None:
            return
        self._warned[ending.diagnosis] += 1
        if self._warned[ending.diagnosis] <= MAX_WARNINGS:
            logger.warning("rollout %s: %s: %s", slot.rollout.id, ending.diagnosis, ending.detail)
        if self._warned[ending.diagnosis] == MAX_WARNINGS:
            logger.warning("more of %s are recorded with their attempts and not shown here", ending.diagnosis)


async def _settle(work: Awaitable[T]) -> T:
    """Await `work` to its end even when cancelled, and be cancelled then: what it made must be known."""
    task = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError as error:
            cancelled = error
        except Exception:  # noqa: BLE001 - raised again below, by `result`
            break
    result = task.result()
    if cancelled is not None:
        raise cancelled
    return result


async def _accepts(gateway_url: str) -> bool:
    """Whether somebody listens where the gateway should be."""
    parts = urlsplit(gateway_url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    try:
        async with asyncio.timeout(PROBE_S):
            _, writer = await asyncio.open_connection(parts.hostname, port)
    except (OSError, TimeoutError):
        return False
    writer.close()
    return True


def _without_token(finished: Finished, token: str) -> Finished:
    """Keys are not stored; a harness may have printed its own."""
    return replace(
        finished,
        stdout_tail=finished.stdout_tail.replace(token, "[attempt key]"),
        stderr_tail=finished.stderr_tail.replace(token, "[attempt key]"),
    )

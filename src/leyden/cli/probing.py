"""Running probes: real gateway, runner, harness and verifier, and an engine that says the text of the probe.

Promises: nothing of it reaches the project's own store, model or checkpoints; everything is in a temporary folder and
gone afterwards; no torch. Each rollout asks for a policy version of its own, which is how the engine knows what to say.
"""

import asyncio
import logging
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from leyden.base.config import Config, JudgeConfig, RewardsConfig
from leyden.base.errors import ProbeError, RecordError, VerifierError
from leyden.base.records import Outcome, Rollout, RolloutState, Task, Trace, new_id
from leyden.rewards.components import Total
from leyden.rewards.evidence import task_dict, trace_dict
from leyden.rewards.probes import probes_of
from leyden.rewards.probes.answers import PROBES as ANSWERS
from leyden.rewards.probes.base import (
    CHARS_PER_TOKEN,
    Probe,
    ProbeResult,
    Stage,
    Try,
    component_names,
    judge,
    share_of,
)
from leyden.rewards.verifiers import VerifierPool, open_verifier
from leyden.runner.environment import public_task
from leyden.runner.lease import Runner, check_harness
from leyden.store import aio, open_store, queue
from leyden.store.base import Store
from leyden.testing.fake_engine import FakeEngine
from leyden.testing.running import running_gateway
from leyden.testing.scripted import Behaviour, Reply
from leyden.traces.reader import Reader

NUM_VERSIONS = 1_000
"""Policy versions of probes begin here, far from the versions of a run."""
MAX_TASKS_BEFORE = 2
"""Tasks per probe before training: it has to cost seconds, and a reward that is open is open on most tasks."""
NEUTRAL = Probe(name="", says="an attempt to be changed", replies=ANSWERS[0].replies[:1])
"""The attempt with an empty answer that workspace and verifier probes begin with."""


class Says(Protocol):
    """Where progress goes."""

    def begin(self, phase: str, total: int) -> None:
        """A phase starts."""

    def advance(self, done: int, note: str = "") -> None:
        """So much of it is over."""

    def end(self) -> None:
        """It is over."""


@dataclass(frozen=True, slots=True)
class _Play:
    """One rollout: a variant of an answer probe at a task."""

    probe: Probe
    variant: int
    task: Task
    rollout: Rollout


def before_training(
    config: Config, tasks: Sequence[Task], progress: Any, stop: Callable[[], None] = lambda: None
) -> None:
    """Run the quick probes; ProbeError when one wins. Nothing without a verifier or with `before_training = false`."""
    if not config.probes.before_training or not tasks or not (config.rewards.verifier or config.rewards.judge.policy):
        return
    started = time.monotonic()
    few = config.probes.model_copy(update={"tasks": min(config.probes.tasks, MAX_TASKS_BEFORE)})
    config = config.model_copy(update={"probes": few})
    results = run_probes(config, tasks, probes_of(config, quick=True), progress, stop)
    unjudged = [result for result in results if result.score is None]
    progress.say(
        f"{len(results) - len(unjudged)} probes of the reward took {time.monotonic() - started:.0f} s"
        + (f"; {len(unjudged)} could not be judged: {unjudged[0].why}" if unjudged else "")
    )
    refuse_winners(results)


def refuse_winners(results: Sequence[ProbeResult]) -> None:
    """Raise ProbeError that names each probe that won, how much, and on which tasks."""
    won = [result for result in results if result.won]
    if won:
        lines = [f"  {result.name} ({result.says}): {result.why}" for result in won]
        raise ProbeError(
            "the reward can be had without doing the task, and training would learn just that:\n"
            + "\n".join(lines)
            + "\nMend the verifier (see `leyden probe`, docs/probes.md). If a win is meant, raise probes.bounds.NAME; "
            "probes.before_training=false turns this check off."
        )


def choose_tasks(tasks: Sequence[Task], num: int) -> list[Task]:
    """Up to `num` tasks, each domain once before any comes twice; the same for the same files."""
    by_domain: dict[str, list[Task]] = {}
    for task in tasks:
        by_domain.setdefault(task.domain, []).append(task)
    rounds = max((len(group) for group in by_domain.values()), default=0)
    ordered = [group[i] for i in range(rounds) for group in by_domain.values() if i < len(group)]
    return ordered[:num]


def run_probes(
    config: Config,
    tasks: Sequence[Task],
    probes: Sequence[Probe],
    progress: Says,
    stop: Callable[[], None] = lambda: None,
) -> list[ProbeResult]:
    """Every probe at a handful of tasks. Raises what the harness or the verifier raise when they cannot start, and
    what `stop` raises, which is asked again and again."""
    check_harness(config)
    quiet = logging.getLogger("leyden.runner")
    level = quiet.level
    quiet.setLevel(logging.ERROR)  # attempts that fail are what probes are for; the results tell of them
    try:
        return _run_probes(config, tasks, probes, progress, stop)
    finally:
        quiet.setLevel(level)


def _run_probes(
    config: Config, tasks: Sequence[Task], probes: Sequence[Probe], progress: Says, stop: Callable[[], None]
) -> list[ProbeResult]:
    chosen = choose_tasks(tasks, config.probes.tasks)
    with tempfile.TemporaryDirectory(prefix="leyden-probes-") as name, FakeEngine() as engine:
        folder = Path(name)
        probing = probing_config(config, engine.url)
        store = open_store(f"sqlite:///{folder / 'probes.db'}")
        try:
            plays = _plays(probing, chosen, probes)
            engine.behaviour = Behaviour(reply=_speaker(plays, component_names(config.rewards)))
            with running_gateway(probing, store, admin_key=new_id("key")) as listening:
                tries = asyncio.run(_run(probing, store, listening.url, folder, plays, probes, progress, stop))
        finally:
            store.close()
    return [judge(probe, tries.get(probe.name, ()), config.probes) for probe in probes]


def probing_config(config: Config, engine_url: str) -> Config:
    """The configuration with every policy answered by the scripted engine; a judge keeps its own."""
    scripted = {
        name: policy.model_copy(update={"engine": engine_url, "engine_key_env": "", "max_context": 1 << 20})
        for name, policy in config.policies.items()
        if name != config.rewards.judge.policy
    }
    harness = config.harness.model_copy(update={"keep_workspaces": True, "max_attempts": 1})
    update = {
        "policies": {**config.policies, **scripted},
        "harness": harness,
        "rewards": config.rewards.model_copy(update={"canary_verifier": ""}),
        "gateway": config.gateway.model_copy(update={"port": 0, "host": "127.0.0.1"}),
    }
    return config.model_copy(update=update)


def _plays(config: Config, tasks: Sequence[Task], probes: Sequence[Probe]) -> list[_Play]:
    plays: list[_Play] = []
    changed = any(probe.kind != "answer" for probe in probes)
    for probe in [*(p for p in probes if p.kind == "answer"), *([NEUTRAL] if changed else [])]:
        for variant in range(len(probe.replies)):
            for task in tasks:
                number = NUM_VERSIONS + len(plays)
                rollout = Rollout(
                    id=new_id("ro"), task=task, mode="val", policy_versions=dict.fromkeys(config.policies, number),
                    created_at=time.time(),
                )  # fmt: skip
                plays.append(_Play(probe, variant, task, rollout))
    return plays


def _speaker(plays: Sequence[_Play], components: Sequence[str]) -> Any:
    """The engine's reply function: the version in the model's name tells which play a request belongs to."""

    def reply(body: Mapping[str, Any]) -> Reply:
        number = str(body.get("model", "")).rpartition("@")[2]
        index = int(number) - NUM_VERSIONS if number.isdigit() else -1
        if not 0 <= index < len(plays):
            return Reply(text="")
        play = plays[index]
        limit = int(body.get("max_tokens") or 1000) * CHARS_PER_TOKEN
        messages = body.get("messages") or [{"role": "user", "content": str(body.get("prompt", ""))}]
        stage = Stage(task=public_task(play.task), messages=messages, components=components, max_chars=limit)
        text = play.probe.replies[play.variant](stage)
        return Reply(text=text.encode("utf-8", "replace").decode()[:limit], whole=True)

    return reply


async def _run(
    config: Config,
    store: Store,
    url: str,
    folder: Path,
    plays: Sequence[_Play],
    probes: Sequence[Probe],
    progress: Says,
    stop: Callable[[], None],
) -> dict[str, list[Try]]:
    ended = asyncio.Event()
    deadline = time.monotonic() + config.probes.timeout_s
    runner = Runner(store, config, url, workspace_root=folder / "workspaces")
    await aio.write(store, lambda connection: queue.enqueue(connection, store, [play.rollout for play in plays]))
    running = asyncio.create_task(runner.run(ended))
    progress.begin("probing the reward", len(plays))
    try:
        await _wait(store, [play.rollout.id for play in plays], running, deadline, progress, stop)
    finally:
        ended.set()
        await running
        progress.end()
    traces = await asyncio.to_thread(Reader(store).traces, [play.rollout.id for play in plays])
    tries: dict[str, list[Try]] = {}
    for play, trace in zip(plays, traces, strict=True):
        tries.setdefault(play.probe.name, []).append(_judged(config, play, trace))
    neutral = [(p.task, t) for p, t in zip(plays, traces, strict=True) if p.probe is NEUTRAL and _usable(t)]
    pool = open_verifier(config, num_workers=2)
    if pool is None:
        return tries
    try:
        for probe in (p for p in probes if p.kind != "answer"):
            tries[probe.name] = await _change(config, probe, neutral, pool, folder, deadline)
    finally:
        await pool.close()
    return tries


async def _wait(
    store: Store,
    ids: Sequence[str],
    running: "asyncio.Task[None]",
    deadline: float,
    progress: Says,
    stop: Callable[[], None],
) -> None:
    """Until all are over or the time is; what is not over is not judged."""
    while time.monotonic() < deadline:
        seen = store.count(queue.TOPIC)
        found = await aio.read(store, lambda connection: queue.get_many(connection, ids))
        over = sum(r.state in (RolloutState.SUCCEEDED, RolloutState.FAILED) for r in found)
        progress.advance(over)
        if over == len(ids):
            return
        if running.done():
            running.result()
            return
        stop()
        await asyncio.sleep(0.05)
        await aio.watch(store, queue.TOPIC, seen, 0.5)


def _usable(trace: Trace) -> bool:
    """Whether the harness got far enough for its verifier to be asked."""
    return bool(trace.calls) and trace.attempt.outcome in (Outcome.COMPLETED, Outcome.AGENT_ERROR, Outcome.ENV_ERROR)


def _judged(config: Config, play: _Play, trace: Trace) -> Try:
    rollout, attempt = trace.rollout, trace.attempt
    if attempt.diagnosis == "verifier_failed":
        return Try(task_id=play.task.id, variant=play.variant, share=None, crash=attempt.detail)
    if rollout.reward is None:
        why = f"{attempt.diagnosis or attempt.outcome or 'not over in time'}: {attempt.detail}".rstrip(": ")
        earned = 0.0 if attempt.diagnosis == "no_reward" else None
        return Try(task_id=play.task.id, variant=play.variant, share=earned, why=why)
    components = {reward.name: reward.value for reward in trace.rewards if reward.call_id is None}
    return _earned(config.rewards, play.task, play.variant, rollout.reward, components)


def _earned(rewards: RewardsConfig, task: Task, variant: int, total: float, components: Mapping[str, float]) -> Try:
    solved = bool(components) and Total(rewards).success(components)
    return Try(task_id=task.id, variant=variant, share=share_of(total, solved, rewards), total=total)


def without_judge(rewards: RewardsConfig) -> RewardsConfig:
    """The part of the reward that the verifier gives alone, for evidence that no judge is asked about."""
    name = rewards.judge.component
    if not rewards.judge.policy:
        return rewards
    return rewards.model_copy(
        update={
            "judge": JudgeConfig(),
            "weights": {n: w for n, w in rewards.weights.items() if n != name},
            "schedule": {n: one for n, one in rewards.schedule.items() if n != name},
            "gates": {n: gate for n, gate in rewards.gates.items() if name not in (n, gate)},
            "clip": {n: ends for n, ends in rewards.clip.items() if n != name},
            "success": "" if rewards.success == name else rewards.success,
        }
    )


async def _change(
    config: Config,
    probe: Probe,
    neutral: Sequence[tuple[Task, Trace]],
    pool: VerifierPool,
    folder: Path,
    deadline: float,
) -> list[Try]:
    """Change what attempts with an empty answer left, and ask the verifier. Hostile inputs need one task only."""
    tries = []
    tasks = neutral[:1] if probe.wins_by == "crash" else neutral
    for variant, tamper in enumerate(probe.tampers):
        for task, trace in tasks:
            if time.monotonic() > deadline:
                tries.append(Try(task_id=task.id, variant=variant, share=None, why="not over in time"))
                continue
            copy = folder / new_id("changed")
            shutil.copytree(folder / "workspaces" / trace.attempt.id, copy, symlinks=True)
            evidence = trace_dict(trace, judge=config.rewards.judge.policy)
            stage = Stage(task=public_task(task), components=component_names(config.rewards))
            await asyncio.to_thread(tamper, stage, copy, evidence)
            posted = {r.name: r.value for r in trace.rewards if r.call_id is None and r.source != "verifier"}
            tries.append(await _ask(config, probe, task, variant, evidence, copy, pool, posted))
            shutil.rmtree(copy, ignore_errors=True)
    return tries


async def _ask(
    config: Config,
    probe: Probe,
    task: Task,
    variant: int,
    evidence: Mapping[str, Any],
    copy: Path,
    pool: VerifierPool,
    posted: Mapping[str, float],
) -> Try:
    rewards = without_judge(config.rewards)
    try:
        found = (await pool.assess_dicts(task_dict(task), evidence, copy)).components
        if probe.wins_by == "difference":
            return await _twice(task, variant, evidence, copy, pool, found)
        if found is None:
            return Try(task_id=task.id, variant=variant, share=0.0, why="no reward")
        found = {**posted, **found}
        return _earned(rewards, task, variant, Total(rewards).explain(found).total, found)
    except (VerifierError, RecordError) as error:
        return Try(task_id=task.id, variant=variant, share=None, crash=str(error))


async def _twice(
    task: Task, variant: int, evidence: Mapping[str, Any], copy: Path, pool: VerifierPool, first: Any
) -> Try:
    """The same question again, to a worker that has answered and to one that has not."""
    both = await asyncio.gather(*(pool.assess_dicts(task_dict(task), evidence, copy) for _ in range(3)))
    for again in both:
        if again.components != first:
            why = f"the same attempt was scored {first} and {again.components}"
            return Try(task_id=task.id, variant=variant, share=1.0, why=why)
    return Try(task_id=task.id, variant=variant, share=0.0)

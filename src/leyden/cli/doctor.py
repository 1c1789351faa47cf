"""The examination of a set-up before money is spent on it: files, disk, harness, verifier, model.

Cheap things come first. Whatever cannot be examined because something before it is broken is said, not skipped
silently. One dry rollout goes the whole way: runner, harness, gateway, engine, verifier.
"""

import asyncio
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from leyden.base.config import Config
from leyden.base.errors import LeydenError
from leyden.base.findings import Finding
from leyden.base.records import Outcome, Rollout, Task, Trace, new_id
from leyden.cli import wiring
from leyden.cli.progress import JsonProgress, TextProgress
from leyden.house import House
from leyden.loop import collect
from leyden.rewards.verifiers import check_verifier, open_verifier
from leyden.runner.lease import check_harness

NUM_DRY = 2
"""Rollouts that are tried; two of one task show whether the verifier and the seeds behave."""
DRY_LIMIT_S = 600.0
"""Longest wait for them on top of the harness's own limit."""
SMALL_HOLDOUT = 30
"""Below it even a policy that solves a third more of the tasks is mostly not told apart."""
FREE_FACTOR = 2.0
"""Space wanted, as a multiple of what the checkpoints of a run take: others write to the disk as well."""


def examine(config: Config, progress: TextProgress | JsonProgress, *, model: bool) -> Iterator[Finding]:
    """Everything that can be said about a configuration; `model=False` stops before the model is loaded."""
    broken = False
    files = {"tasks": _tasks, "harness": _harness, "verifier": _verifier, "store": _store}
    for name, check in files.items():
        for finding in _guarded(name, check(config)):
            broken = broken or finding.level == "problem"
            yield finding
    if not model:
        return
    if broken:
        yield Finding(
            name="model", level="note", what="not examined, nor was a rollout tried: mend the problems above first"
        )
        return
    yield from _guarded("model", _with_model(config, progress))


def _guarded(name: str, findings: Iterator[Finding]) -> Iterator[Finding]:
    """The findings of a check; an error of its own is a finding too."""
    try:
        yield from findings
    except LeydenError as error:
        yield Finding(
            name=name, level="problem", what=str(error), why="a run would stop here", do="mend what the message names"
        )


def _tasks(config: Config) -> Iterator[Finding]:
    train, _, held, demos = wiring.tasks_of(config)
    if not train:
        yield Finding(
            name="tasks", level="problem" if config.learn.steps else "note", what="tasks.train is not set",
            why="there is nothing to learn from", do="write a task file (docs/files.md) and set tasks.train",
        )  # fmt: skip
    else:
        counts = f"{len(train)} to learn from, {len(held)} held out, {len(demos)} demonstrations"
        yield Finding(name="tasks", level="ok", what=counts)
    if not held:
        yield Finding(
            name="holdout", level="warning", what="there are no holdout tasks",
            why="a run can learn, but nobody can tell whether it helped", do="set tasks.holdout",
        )  # fmt: skip
    elif len(held) < SMALL_HOLDOUT:
        yield Finding(
            name="holdout", level="warning", what=f"{len(held)} tasks",
            why="so few tell only very large gains from luck", do=f"hold out at least {SMALL_HOLDOUT}, better 100",
        )  # fmt: skip
    unanswered = [task.id for task in (*train, *held) if task.answer is None]
    if unanswered and config.rewards.verifier:
        yield Finding(
            name="answers", level="note", what=f"{len(unanswered)} tasks have none, {unanswered[0]!r} among them",
            why="a verifier that compares would find nothing to compare with", do="nothing, if yours needs none",
        )  # fmt: skip


def _harness(config: Config) -> Iterator[Finding]:
    check_harness(config)
    yield Finding(name="harness", level="ok", what=config.harness.command or config.harness.callable)


def _verifier(config: Config) -> Iterator[Finding]:
    if not config.rewards.verifier and not config.rewards.from_agent:
        yield Finding(
            name="verifier", level="problem", what="rewards.verifier is not set and agents may not reward themselves",
            why="no rollout would have a reward", do="set rewards.verifier (docs/rewards.md)",
        )  # fmt: skip
        return
    check_verifier(config)
    yield Finding(name="verifier", level="ok", what=config.rewards.verifier or "rewards come from the agent")


def _store(config: Config) -> Iterator[Finding]:
    started = time.perf_counter()
    store = wiring.store_of(config)
    try:
        store.write(lambda connection: None).result(30)
        took_ms = 1000 * (time.perf_counter() - started)
    finally:
        store.close()
    yield Finding(name="store", level="ok", what=f"{store.url} opens and takes a write in {took_ms:.0f} ms")


def _with_model(config: Config, progress: TextProgress | JsonProgress) -> Iterator[Finding]:
    from leyden.learning.backends.embedded import examine as model
    from leyden.learning.backends.embedded.backend import EmbeddedBackend

    with wiring.open_house(config, progress, training=False) as house:
        assert isinstance(house.lead.backend, EmbeddedBackend)
        yield from model.examine(house.lead.backend, config.policies[house.policy], house.engine_url)
        yield _disk(house)
        yield from asyncio.run(_dry_rollouts(house))


def _disk(house: House) -> Finding:
    learn = house.config.learn
    loaded = house.lead.backend.loaded  # type: ignore[attr-defined]  # the embedded one has a model here
    trained = sum(p.numel() for p in loaded.trainable().values())
    num_versions = max(1, learn.steps // learn.checkpoint_every)
    size = trained * (4 * num_versions + 8 * learn.keep_checkpoints)
    free = shutil.disk_usage(house.folder).free
    what = f"{size / 1e9:.1f} GB for {num_versions} checkpoints, {free / 1e9:.0f} GB are free"
    if free >= FREE_FACTOR * size:
        return Finding(name="disk", level="ok", what=what)
    return Finding(
        name="disk", level="problem" if free < size else "warning", what=what, why="a run stops when the disk is full",
        do="raise learn.checkpoint_every, train a LoRA (policies.NAME.lora), or set run.dir to another disk",
    )  # fmt: skip


async def _dry_rollouts(house: House) -> list[Finding]:
    """One task, tried as an evaluation would, but recorded as neither: what came back, and whether it is scored."""
    tasks = house.train_tasks or house.holdout_tasks
    sampling = house.config.policies[house.policy].sampling.model_dump()
    rollouts = [
        Rollout(
            id=new_id("rollout"), task=tasks[0], mode="val", run_id=house.run_id, seed=seed, sampling=sampling,
            policy_versions={house.policy: house.lead.backend.version}, metadata={"doctor": True},
        )
        for seed in range(NUM_DRY)
    ]  # fmt: skip
    limit_s = house.config.harness.timeout_s * house.config.harness.max_attempts + DRY_LIMIT_S
    started = time.monotonic()
    try:
        traces = await collect(house, "one task, tried twice", rollouts, limit_s)
    except LeydenError as error:
        return [Finding(
            name="dry rollout", level="problem", what=str(error), why="every rollout of a run would end like this",
            do="see docs/troubleshooting.md; run the harness by hand with a model of your own",
        )]  # fmt: skip
    took_s = time.monotonic() - started
    return [
        _outcome(traces, took_s),
        _captured(traces),
        _room(house, traces),
        await _determinism(house, tasks[0], traces[0]),
        _duration(house, traces, took_s),
    ]


def _outcome(traces: list[Trace], took_s: float) -> Finding:
    bad = [trace for trace in traces if trace.attempt.outcome != Outcome.COMPLETED]
    if not bad:
        rewards = ", ".join("none" if t.rollout.reward is None else f"{t.rollout.reward:.3f}" for t in traces)
        what = f"{len(traces)} completed in {took_s:.1f} s, rewards {rewards}"
        if all(trace.rollout.reward is None for trace in traces):
            return Finding(
                name="dry rollout", level="problem", what=what, why="without a reward nothing is learned",
                do="see what the verifier returns: leyden inspect ROLLOUT",
            )  # fmt: skip
        return Finding(name="dry rollout", level="ok", what=what)
    first = bad[0].attempt
    tail = first.stderr_tail.strip().rpartition("\n")[2]
    cause = f"{first.detail or first.diagnosis or ''} {tail}".strip()
    return Finding(
        name="dry rollout", level="problem",
        what=f"{len(bad)} of {len(traces)} ended as {first.outcome}: {cause}",
        why="such rollouts are excluded or count as failures", do=f"leyden inspect {bad[0].rollout.id}",
    )  # fmt: skip


def _captured(traces: list[Trace]) -> Finding:
    calls = [call for trace in traces for call in trace.calls]
    refused = sorted({call.refusal for call in calls if call.refusal})
    changed = sorted({name for call in calls for name in call.rewrites} - {"seed"})
    told = f"{len(calls)} calls, {sum(call.num_sampled for call in calls)} sampled tokens"
    if refused:
        return Finding(
            name="capture", level="problem", what=f"{told}; refused for training: {', '.join(refused)}",
            why="refused tokens are not trained", do="docs/token-truth.md says what each refusal means",
        )  # fmt: skip
    if changed:
        return Finding(
            name="capture", level="note", what=f"{told}; changed on the way to the engine: {', '.join(changed)}",
            why="sampling has one place, the policy's configuration; what the harness asked for is recorded",
            do="nothing, or set policies.NAME.respect_harness = true",
        )  # fmt: skip
    return Finding(name="capture", level="ok", what=f"{told}, every one with its id and log-probability")


def _room(house: House, traces: list[Trace]) -> Finding:
    settings = house.config.policies[house.policy]
    longest = max((len(call.prompt_ids) for trace in traces for call in trace.calls), default=0)
    cut = sum(choice.finish_reason == "length" for trace in traces for call in trace.calls for choice in call.choices)
    what = (
        f"prompts of up to {longest} of {settings.max_context} tokens, answers of up to {settings.sampling.max_tokens}"
    )
    if longest + settings.sampling.max_tokens > settings.max_context:
        return Finding(
            name="context", level="warning", what=what, why="answers are cut short, or calls refused as too long",
            do="raise policies.NAME.max_context, or lower sampling.max_tokens",
        )  # fmt: skip
    if cut:
        return Finding(
            name="context", level="note", what=f"{what}; {cut} answers ended at the limit",
            why="an answer that is cut is rarely right", do="raise sampling.max_tokens, if answers are that long",
        )  # fmt: skip
    return Finding(name="context", level="ok", what=what)


async def _determinism(house: House, task: Task, trace: Trace) -> Finding:
    """The verifier, asked twice about the same trace."""
    pool = open_verifier(house.config, num_workers=1)
    if pool is None:
        return Finding(name="same reward twice", level="note", what="rewards come from the agent; not examined")
    said: list[Mapping[str, float] | str | None] = []
    try:
        with tempfile.TemporaryDirectory() as folder:
            for _ in range(2):
                try:
                    said.append(await pool.verify(task, trace, Path(folder)))
                except LeydenError as error:
                    said.append(str(error))
    finally:
        await pool.close()
    if isinstance(said[0], str):
        return Finding(
            name="same reward twice", level="note", what=f"not examined, the workspace is gone: {said[0][:200]}"
        )
    if said[0] == said[1]:
        return Finding(name="same reward twice", level="ok", what="the verifier says the same about the same trace")
    return Finding(
        name="same reward twice", level="warning", what=f"first {said[0]}, then {said[1]}, about the same trace",
        why="noise in the reward is learned as if it were skill",
        do="fix its seed and its clock, or ask it several times",
    )  # fmt: skip


def _duration(house: House, traces: list[Trace], took_s: float) -> Finding:
    """A step's rollouts at the rate of the dry ones: an upper bound, for more at once share the engine."""
    learn = house.config.learn
    tokens = sum(call.num_sampled for trace in traces for call in trace.calls) / len(traces)
    num = learn.group_size * learn.tasks_per_step
    waves = -(-num // max(1, min(house.config.harness.concurrency, num)))
    return Finding(
        name="duration", level="ok",
        what=f"a step samples about {num * tokens:,.0f} tokens in {num} rollouts; {len(traces)} at once took "
        f"{took_s:.1f} s, so {waves * took_s:.0f} to {num / len(traces) * took_s:.0f} s a step, {learn.steps} steps",
    )  # fmt: skip

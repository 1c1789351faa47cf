"""One round of improvement, top to bottom. Start reading here.

    tasks -> rollouts -> calls -> rewards -> traces -> credit -> update -> evaluation -> verdict

`improve` is a whole run: evaluate, imitate approved demonstrations, reinforce, evaluate, judge. `reinforce_once` is
one step of it, one line per room. Gateway and runner are processes of their own: they meet this one in the
store. Whatever a step needs is derived from (run, step), so a run that was killed goes on by doing the same again:
rollouts that are in the store are not run twice, and the update they lead to is the one they led to before.
"""

import asyncio
import glob
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from sqlalchemy import Connection

from leyden import carry, imitation
from leyden.base.config import BudgetConfig, Config, LearnConfig
from leyden.base.errors import Interrupted
from leyden.base.records import Outcome, PolicyVersion, Rollout, Task, Trace, Verdict
from leyden.house import House, Learner, sft_steps
from leyden.learning import algorithms, batch, schedule
from leyden.learning.backends.base import Objective, UpdateReport
from leyden.learning.credit import Credit, apply_credit, credit_groups, drop_flat, drop_unpaired
from leyden.learning.evidence import gather
from leyden.learning.shaping import dull_groups, refuse_mismatch, shaped
from leyden.release import budget, evaluation, gate, holdout
from leyden.rewards import canary
from leyden.runner.outcome import policies
from leyden.step_report import policy_report, refuse_if_nothing_was_captured, step_report, unasked
from leyden.store import aio, ledger, queue
from leyden.store.attempts import TERMINAL
from leyden.traces.assemble import Assembly, OutcomePolicy, assemble
from leyden.traces.reader import Reader


@dataclass(frozen=True, kw_only=True)
class Improvement:
    """What a run ends with."""

    evaluations: Mapping[str, evaluation.Evaluation]
    """By label: `base`, `sft`, `final`; those that were made."""
    verdicts: Mapping[str, Verdict]
    """By the label of the incumbent."""


async def improve(house: House) -> Improvement:
    """A whole run. The incumbent stays what it was: a run makes versions and verdicts, it deploys nothing."""
    learn = house.config.learn
    judged: dict[str, evaluation.Evaluation] = {}
    if warning := budget.cannot_bind(house.config):
        house.progress.say(f"Note: {warning}.")
    await mind_budget(house)
    if house.holdout_tasks:
        judged["base"] = await evaluate_once(house, "base", house.lead.base_version)
    if house.config.sft:
        await imitate(house)
        if house.holdout_tasks and learn.steps:
            judged["sft"] = await evaluate_once(house, "sft", house.sft_version)
    for step in range(house.done_steps, learn.steps):
        await mind_budget(house, done_steps=step)
        await reinforce_once(house, step)
        if learn.eval_every and house.val_tasks and (step + 1) % learn.eval_every == 0:
            await evaluate(house, f"val-{step + 1}", house.lead.backend.version, house.val_tasks)
    await mind_budget(house, done_steps=learn.steps)
    if house.holdout_tasks and house.lead.backend.version != house.lead.base_version:
        judged["final"] = await evaluate_once(house, "final", house.lead.backend.version)
    verdicts: dict[str, Verdict] = {
        label: await judge(house, judged["final"], judged[label])
        for label in ("base", "sft")
        if label in judged and "final" in judged
    }
    return Improvement(evaluations=judged, verdicts=verdicts)


async def judge(house: House, candidate: evaluation.Evaluation, incumbent: evaluation.Evaluation) -> Verdict:
    """The verdict, at the error rate that this run's look at these tasks may spend."""
    seen = await aio.read(house.store, lambda c: ledger.evaluations(c, fingerprint=candidate.fingerprint))
    settings = house.config.eval
    level = holdout.level_at(holdout.look_of(seen, house.run_id), settings.level, settings.looks)
    return gate.compare(candidate, incumbent, level=level)


async def mind_budget(house: House, done_steps: int = 0) -> None:
    """Stop a run whose budget is spent: what it learned is saved first. Raises Interrupted."""
    if house.config.budget == BudgetConfig():
        return
    steps = await aio.read(house.store, lambda c: ledger.steps(c, house.run_id))
    stored = await aio.read(house.store, lambda c: ledger.evaluations(c, run_id=house.run_id))
    used = budget.spent([row.report for row in steps], [one.result for one in stored], house.config.costs)
    sentence = budget.exceeded(used, house.config.budget)
    if sentence is None:
        return
    every = house.config.learn.checkpoint_every
    if done_steps > house.done_steps and done_steps % every and done_steps < house.config.learn.steps:
        await checkpoint(house, stage="rl", step=done_steps, full=True)
    raise Interrupted(sentence)


async def reinforce_once(house: House, step: int) -> dict[str, Any]:
    """One step: whole groups are run, compared, and learned from. Returns (and records) the step report."""
    learn, before = house.config.learn, house.versions
    started = time.time()
    traces, sampled = await (carry.groups if learn.max_staleness else _sample)(house, step, before)
    collected = time.time()
    lessons = [await study(learner, step, traces) for learner in house.learners]
    house.progress.begin(f"step {step + 1}/{learn.steps}: update", 1)
    updates = await _update(house, lessons)
    house.progress.end()
    phases = Counter[str]()
    for update in updates:
        phases.update({f"update_{phase}": took_s for phase, took_s in update.seconds.items()})
    seconds = {"rollouts": collected - started, "update": time.time() - collected, **phases}
    parts = {one.learner.policy: one.report(traces, update) for one, update in zip(lessons, updates, strict=True)}
    report = step_report(house.config, step, traces, parts, seconds) | sampled
    for sentence in unasked(report):
        house.progress.say(sentence)
    if house.config.rewards.canary_verifier:
        report["canary"] = await _watch_canary(house, step, traces)
    await _record_step(house, "rl", step, before[house.policy], report)
    if (step + 1) % learn.checkpoint_every == 0 or step + 1 == learn.steps:
        await checkpoint(house, stage="rl", step=step + 1, full=True)
    return report


@dataclass(frozen=True, kw_only=True)
class Lesson:
    """What one policy learns from the rollouts of a step."""

    learner: Learner
    """The policy."""
    assembly: Assembly
    """Its calls, every sampled token kept or dropped by name; the calls of others are `not_trainable` here."""
    credit: Credit
    """What each rollout was worth to its algorithm."""
    batches: Sequence[batch.Batch]
    """One per optimizer step."""
    objective: Objective
    """What they minimise."""

    def report(self, traces: Sequence[Trace], update: UpdateReport) -> dict[str, Any]:
        """Its part of the step report."""
        of = self.learner
        return policy_report(
            of.config, of.backend.version, of.policy, traces, self.assembly, self.credit, self.batches, update
        )


async def study(learner: Learner, step: int, traces: Sequence[Trace]) -> Lesson:
    """The lesson of one policy: its own calls, the credit that its algorithm gives, and arrays of both.

    A rollout in which it was not asked is compared like the others and has nothing to train.
    """
    config, learn = learner.config, learner.config.learn
    algorithm = algorithms.make(learn, config.base_dir)
    oldest = learner.backend.version - learn.max_staleness
    assembly = shape(config, assemble_for(config, traces, min_version=oldest))
    refuse_mismatch(assembly, algorithm)
    evidence = await asyncio.to_thread(gather, traces, assembly, algorithm, learn, learner.backend, learner.teacher)
    credit = credit_groups(assembly, algorithm, evidence)
    assembly, credit = drop_untrained(learn, assembly, credit, algorithm)
    return Lesson(
        learner=learner,
        assembly=assembly,
        credit=credit,
        batches=batches_of(learn, config.run.seed, step, assembly, credit),
        objective=objective_of(learn, step, algorithm),
    )


async def _watch_canary(house: House, step: int, traces: Sequence[Trace]) -> dict[str, Any] | None:
    """How far the reward is from the hidden verifier in this step; says so when the gap grows."""
    rewards = house.config.rewards
    steps = await aio.read(house.store, lambda connection: ledger.steps(connection, house.run_id))
    history = [s.report["canary"] for s in steps if s.stage == "rl" and s.step < step and s.report.get("canary")]
    row = canary.watch(rewards, traces, history)
    if row and row["alarm"]:
        house.progress.say(canary.sentence(row, rewards.canary_limit))
    return row


async def _sample(house: House, step: int, versions: Mapping[str, int]) -> tuple[list[Trace], dict[str, Any]]:
    """(traces of the groups of a step, how many were asked for because others had no difference)."""
    learn = house.config.learn
    order = schedule.TaskOrder(house.train_tasks, learn.tasks_per_step, house.config.run.seed)
    tasks, placed = order.tasks_at(step), 0
    configs = [learner.config for learner in house.learners]
    traces: list[Trace] = []
    taken: set[str] = set()
    for number in range(learn.refills + 1):
        rollouts = schedule.plan_step(
            run_id=house.run_id,
            step=step,
            tasks=tasks,
            group_size=learn.group_size,
            policy_versions=versions,
            seed=house.config.run.seed,
            first_place=placed,
        )
        phase = f"step {step + 1}/{learn.steps}: rollouts" + (f", refill {number} of {learn.refills}" if number else "")
        traces += await collect(house, phase, rollouts, learn.step_timeout_s)
        placed += len(tasks)
        taken |= {task.id for task in tasks}
        if number < learn.refills:
            group_ids = sorted({t.rollout.group_id or t.rollout.id for t in traces})
            # With several policies, a group from which one of them can learn is kept.
            dull = [dull_groups(shape(c, assemble_for(c, traces)), group_ids) for c in configs]
            missing = learn.tasks_per_step - (placed - len(set.intersection(*dull)))
            tasks = order.refill_at(step, number, missing, taken) if missing > 0 else []
            if not tasks:
                break
    return traces, {"num_refilled": placed - learn.tasks_per_step}


def drop_untrained(
    learn: LearnConfig, assembly: Assembly, credit: Credit, algorithm: algorithms.Algorithm
) -> tuple[Assembly, Credit]:
    """What the algorithm does not train, once credit is given."""
    assembly = apply_credit(assembly, credit, algorithm)
    if learn.refills:
        assembly, credit = drop_flat(assembly, credit)
    if credit.details.pair:
        assembly, credit = drop_unpaired(assembly, credit)
    return assembly, credit


async def imitate(house: House) -> None:
    """The supervised stage: each policy learns the demonstrations that are for it, then all are checkpointed."""
    if house.sft_done:
        return
    lessons, num_steps = imitation.lessons(house), sft_steps(house.learners)
    house.progress.begin(f"imitating {sum(len(one.demos) for one in house.learners)} demonstrations", num_steps)
    await house.services.hold()
    try:
        for number in range(num_steps):
            house.stop_requested()
            before = house.lead.backend.version
            await _record_step(house, "sft", number, before, await imitation.step(house, lessons, number))
    finally:
        await house.services.resume()
    house.progress.end()
    await checkpoint(house, stage="sft", step=0, full=True)
    house.sft_done = True


async def evaluate_once(house: House, label: str, version: int) -> evaluation.Evaluation:
    """The holdout evaluation of this run under `label`: made now, or read back when a resumed run has it already."""
    stored = await aio.read(house.store, lambda c: ledger.evaluations(c, run_id=house.run_id))
    for one in stored:
        if one.label == label and one.version == version:
            return evaluation.Evaluation.from_json(one.result)
    return await evaluate(house, label, version, house.holdout_tasks)


async def evaluate(
    house: House, label: str, version: int, tasks: Sequence[Task], *, split: str | None = None
) -> evaluation.Evaluation:
    """Run `version`, which the backend holds now, at `tasks` and record what came out. Looks at a holdout count.

    Policies that are trained beside it answer with the versions that they have now: what is judged is all of them.
    """
    assert house.lead.backend.version == version, f"the backend holds {house.lead.backend.version}, not {version}"
    samples = house.config.eval.samples
    versions, names = house.versions, [learner.policy for learner in house.learners]
    settings = {name: house.config.policies[name].eval.model_dump() for name in versions}
    rollouts = evaluation.plan(
        run_id=house.run_id,
        label=label,
        tasks=tasks,
        samples=samples,
        policy_versions=versions,
        # By name where there are several: each then samples as its own section says.
        sampling=settings if len(settings) > 1 else settings[house.policy],
        seed=house.config.run.seed,
    )
    holdout.guard(rollouts)
    limit_s, begun = house.config.learn.step_timeout_s * max(1, len(rollouts) // 64), time.time()
    named = "+".join(f"{name}@{versions[name]}" for name in names)
    traces = await collect(house, f"evaluating {named} ({label})", rollouts, limit_s)
    result = evaluation.summarise(
        traces, house.config, policy=house.policy, others=names[1:], version=version, label=label, tasks=tasks
    )
    result = replace(result, wall_s=time.time() - begun)
    await aio.write(
        house.store,
        lambda connection: ledger.add_evaluation(
            connection,
            house.store,
            evaluation_id=f"{house.run_id}-{label}",
            run_id=house.run_id,
            split=split or tasks[0].split,
            fingerprint=result.fingerprint,
            policy=house.policy,
            version=version,
            label=label,
            result=result.to_json(),
        ),
    )
    house.progress.say(result.sentence())
    return result


async def collect(house: House, phase: str, rollouts: Sequence[Rollout], limit_s: float) -> list[Trace]:
    """Queue `rollouts` (those that exist already are not run again), wait for all of them, read their traces.

    Raises LearningError when the time is over, with what is still missing, or when nothing can be learned because
    the harness never reached the gateway.
    """
    await aio.write(house.store, lambda connection: queue.enqueue(connection, house.store, rollouts))
    ids = [rollout.id for rollout in rollouts]
    deadline = time.monotonic() + limit_s
    house.progress.begin(phase, len(ids))

    def late() -> str:
        missing = Counter(r.state.value for r in states if r not in finished)
        return (
            f"{phase}: {len(ids) - len(finished)} of {len(ids)} rollouts were not over after {limit_s:.0f} s "
            f"({dict(missing)}); raise learn.step_timeout_s, or see the logs in {house.folder / 'logs'}"
        )

    while True:
        seen = house.store.count(queue.TOPIC)
        states = await aio.read(house.store, lambda connection: queue.get_many(connection, ids))
        finished = [r for r in states if r.state in TERMINAL]
        rewards = [r.reward for r in finished if r.reward is not None]
        house.progress.advance(len(finished), f"mean reward {sum(rewards) / len(rewards):.3f}" if rewards else "")
        if len(finished) == len(ids):
            break
        await house.wait(seen, deadline, late)
    house.progress.end()
    traces = await asyncio.to_thread(Reader(house.store).traces, ids)
    refuse_if_nothing_was_captured(phase, traces)
    return traces


async def checkpoint(house: House, *, stage: str, step: int, full: bool) -> None:
    """Save the weights of every policy that is trained, each whole or not at all, and register them as versions.

    They are registered together, so that a run never goes on from policies of different steps.
    """
    versions = []
    for learner in house.learners:
        folder = house.folder / "checkpoints" / f"{learner.policy}@{learner.backend.version}"
        await asyncio.to_thread(learner.backend.save, folder, full=full)
        version = PolicyVersion(
            policy=learner.policy,
            version=learner.backend.version,
            parent=learner.base_version,
            path=str(folder),
            run_id=house.run_id,
            step=step,
            created_at=time.time(),
        )
        versions.append(version)

    def register(connection: Connection) -> None:
        for version in versions:
            ledger.add_policy_version(connection, house.store, version, stage=stage)

    await aio.write(house.store, register)
    _prune(house)


def _prune(house: House) -> None:
    """Drop optimizer states of all but the newest `keep_checkpoints`; weights of named versions stay."""
    for learner in house.learners:
        found = (house.folder / "checkpoints").glob(f"{glob.escape(learner.policy)}@*")
        numbered = [folder for folder in found if folder.name.rpartition("@")[2].isdigit()]
        numbered.sort(key=lambda folder: int(folder.name.rpartition("@")[2]))
        for folder in numbered[: -house.config.learn.keep_checkpoints]:
            learner.backend.forget_optimizer(folder)


async def _update(house: House, lessons: Sequence[Lesson]) -> list[UpdateReport]:
    """Every policy learns its lesson while calls wait: each is one version further afterwards, the set changes once."""
    await house.services.hold()
    try:
        reports = []
        for lesson in lessons:
            backend = lesson.learner.backend
            reports.append(
                await asyncio.to_thread(backend.update, lesson.batches, lesson.objective, backend.version + 1)
            )
        await carry.repin(house)
        return reports
    finally:
        await house.services.resume()


def assemble_for(config: Config, traces: Sequence[Trace], *, min_version: int | None = None) -> Assembly:
    """The actions of the policy that `config` trains, under its rules for outcomes and lengths."""
    return assemble(
        traces,
        policy=config.learn.policy,
        min_version=min_version,
        max_tokens=config.learn.max_sequence_tokens or config.policies[config.learn.policy].max_context,
        overlong=config.learn.overlong,
        trainable_outcomes=_trainable(config),
    )


def shape(config: Config, assembly: Assembly) -> Assembly:
    """The assembly with the punishment of answers that are nearly cut off, if `config` has one."""
    return shaped(
        assembly,
        max_tokens=config.policies[config.learn.policy].sampling.max_tokens,
        buffer=config.learn.overlong_buffer,
        penalty=config.learn.overlong_penalty,
    )


def _trainable(config: Config) -> Mapping[Outcome, OutcomePolicy]:
    """What is done with each outcome once retries are used up: `retry` then means `exclude`."""
    return {outcome: "exclude" if policy == "retry" else policy for outcome, policy in policies(config.rewards).items()}


def batches_of(learn: LearnConfig, seed: int, step: int, assembly: Assembly, credit: Credit) -> list[batch.Batch]:
    """One batch per optimizer step: `mini_batches` parts for each of `epochs` passes, cut anew in each pass."""
    return [
        replace(one, report={**one.report, "epoch": epoch})
        for epoch in range(learn.epochs)
        for one in batch.build(
            assembly.actions,
            credit.by_rollout,
            normalisation=learn.normalisation,
            constant_tokens=learn.constant_tokens,
            mini_batches=learn.mini_batches,
            seed=seed + step * learn.epochs + epoch,
            skip_zero_credit=learn.kl == 0 and learn.entropy == 0 and not credit.details.target,
            details=credit.details,
        )
    ]


def objective_of(learn: LearnConfig, step: int, algorithm: algorithms.Algorithm) -> Objective:
    """What the optimizer steps of a step minimise."""
    surrogate = algorithms.surrogate_of(learn, algorithm)
    return Objective(
        surrogate=surrogate,
        clip_low=learn.clip_low,
        clip_high=learn.clip_high,
        clip_dual=learn.clip_dual,
        old_logprobs=learn.old_logprobs,
        importance_cap=0.0 if surrogate in ("nll", "dpo") else learn.importance_cap,
        importance_level=learn.importance_level,
        importance_mask=learn.importance_mask,
        kl=learn.kl,
        entropy=learn.entropy,
        dpo_beta=learn.dpo_beta,
        value_coef=learn.value_coef if "values" in algorithm.needs else 0.0,
        value_clip=learn.value_clip,
        value_learning_rate=learn.value_learning_rate,
        learning_rate=schedule.learning_rate_at(
            step, learn.steps, learn.schedule, learn.warmup_steps, learn.learning_rate
        ),
        grad_clip=learn.grad_clip,
    )


async def _record_step(house: House, stage: str, step: int, version_before: int, report: dict[str, Any]) -> None:
    row = {"stage": stage, "step": step, **report}
    await aio.write(
        house.store,
        lambda connection: ledger.add_step(
            connection,
            house.store,
            run_id=house.run_id,
            step=step,
            stage=stage,
            policy=house.policy,
            version_before=version_before,
            version_after=house.lead.backend.version,
            report=row,
        ),
    )
    house.progress.metrics(row)

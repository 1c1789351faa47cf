"""A run that improves prompts, top to bottom: the same rollouts, evaluations and gate as for weights.

    base evaluation -> search (candidates scored by rollouts of the real harness) -> final evaluation -> verdict

`improve_prompts` is the run. A candidate is a policy version of its own: rollouts are pinned to it, and the gateway
puts its texts in place of the harness's. `HouseArena` is where an optimiser tries candidates. Nothing needs torch
unless the policy is served by the embedded sampler. Whatever the search does follows from the seed, the rollouts in the
store and the replies in the run's folder, so a run that was stopped goes through it again and pays for nothing twice.
"""

import asyncio
import difflib
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from sqlalchemy import Connection

from leyden.base.config import Config, PromptsConfig
from leyden.base.errors import ConfigError, LearningError
from leyden.base.prompt_file import as_text, read_slots, write_slots
from leyden.base.prompts import Slot, slots_from_json, slots_to_json
from leyden.base.records import PolicyVersion, Rollout, Task, Trace
from leyden.house import House
from leyden.learning.algorithms.prompts import OPTIMISERS, Candidate, Scored, Trial
from leyden.learning.algorithms.prompts.base import Exchange
from leyden.learning.algorithms.prompts.exchanges import approved_of, exchanges_of, feedback_of, shares_of
from leyden.learning.algorithms.prompts.reflection import Spent
from leyden.learning.backends.external import ExternalBackend
from leyden.learning.order import shuffled
from leyden.loop import Improvement, collect, evaluate_once, judge, mind_budget
from leyden.release import evaluation
from leyden.release.costs import Cost, total_of
from leyden.store import aio, ledger, lookups, numbering
from leyden.store.base import Store
from leyden.traces.reader import Reader

STAGE = "prompts"
"""Of the steps of such a run."""


class Reflection(Protocol):
    """The reflection model."""

    spent: Spent
    """So far."""

    async def ask(self, prompt: str) -> str | None:
        """Its reply; None when a budget is used up. Raises LearningError when it is down."""


def split_tasks(config: Config, train: Sequence[Task], val: Sequence[Task]) -> tuple[list[Task], list[Task]]:
    """(tasks to learn from, tasks to choose by): without `tasks.val`, half of the training tasks each.

    Raises ConfigError for bounds that contradict each other, before anything is run.
    """
    settings = config.prompts
    if config.sft is not None:
        raise ConfigError(
            f'[sft] trains weights and learn.algorithm = "{config.learn.algorithm}" improves prompts; keep one of them'
        )
    learned, chosen = list(train), list(val)
    if not chosen:
        mixed = shuffled(train, lambda task: task.id, "prompt split", config.run.seed)
        learned, chosen = mixed[: len(mixed) // 2], mixed[len(mixed) // 2 :]
    if not learned or not chosen:
        raise ConfigError(
            f"{len(train)} training and {len(val)} validation tasks are too few to improve prompts: some are needed to "
            "learn from and others to choose by; give tasks.train at least two, or set tasks.val"
        )
    first = len(chosen) * settings.samples
    if settings.max_rollouts < first:
        raise ConfigError(
            f"prompts.max_rollouts is {settings.max_rollouts}, but scoring one candidate takes {first} rollouts "
            f"({len(chosen)} validation tasks, prompts.samples = {settings.samples}); raise it, or give fewer tasks"
        )
    return learned, chosen


def check_reflection(config: Config) -> None:
    """Raises ConfigError where a reflection model is needed and none is named, none answers, or its budget of money
    could never be reached."""
    settings = config.prompts
    if not OPTIMISERS[config.learn.algorithm].reflects:
        return
    if not settings.reflection:
        raise ConfigError(
            f'learn.algorithm = "{config.learn.algorithm}" needs a reflection model; set prompts.reflection to an '
            "alias of [policies] that has a provider or an engine"
        )
    if settings.reflection not in config.policies:
        known = ", ".join(sorted(config.policies))
        raise ConfigError(f"prompts.reflection is {settings.reflection!r}, which is no policy; known: {known}")
    alias = config.policies[settings.reflection]
    if not alias.engine and not alias.provider and settings.reflection not in config.frozen:
        raise ConfigError(
            f"prompts.reflection is {settings.reflection!r}, which nothing serves beside the policy that is "
            f"improved; set policies.{settings.reflection}.provider or policies.{settings.reflection}.engine, or "
            "trainable = false for a model of your own"
        )
    if settings.max_reflection_usd is not None and config.price_of(settings.reflection) is None:
        raise ConfigError(
            f"prompts.max_reflection_usd is {settings.max_reflection_usd}, but {settings.reflection!r} has no price, "
            f"so it would never be reached; set policies.{settings.reflection}.usd_per_million"
        )


async def improve_prompts(house: House, reflection: Reflection | None = None) -> Improvement:
    """A whole run. As in `loop.improve`, the incumbent stays what it was."""
    slots = _start(house)
    train, val = split_tasks(house.config, house.train_tasks, house.val_tasks)
    judged: dict[str, evaluation.Evaluation] = {}
    if house.holdout_tasks:
        house.lead.backend.serve_as(house.lead.base_version)
        judged["base"] = await evaluate_once(house, "base", house.lead.base_version)
    approved = approved_of(house.lead.demos, {task.id for task in val})
    arena = HouseArena(house=house, train_tasks=train, val_tasks=val, approved=approved, reflection=reflection)
    await arena.recall()
    best = await OPTIMISERS[house.config.learn.algorithm].search(arena, Candidate(slots=slots))
    version = await arena.version_of(best.candidate)
    _write(house, best.candidate.slots)
    if all(slot.text == slot.original for slot in best.candidate.slots):
        house.progress.say("No other prompts did better than those of the harness; nothing is to be compared.")
        return Improvement(evaluations=judged, verdicts={})
    house.progress.say(f"Best prompts: {house.policy}@{version}, {100 * best.mean:.1f} % on validation tasks.")
    if not house.holdout_tasks:
        return Improvement(evaluations=judged, verdicts={})
    house.lead.backend.serve_as(version)
    judged["final"] = await evaluate_once(house, "final", version)
    await arena.check_final()
    return Improvement(evaluations=judged, verdicts={"base": await judge(house, judged["final"], judged["base"])})


def diff_of(before: Sequence[Slot], after: Sequence[Slot], names: tuple[str, str] = ("before", "after")) -> str:
    """A unified diff of the texts of two versions; empty where they are equal."""
    lines = difflib.unified_diff(as_text(before).splitlines(), as_text(after).splitlines(), *names, lineterm="", n=3)
    return "\n".join(lines)


def originals(slots: Sequence[Slot]) -> list[Slot]:
    """The slots with the texts that the harness sends."""
    return [slot.with_text(slot.original) for slot in slots]


def _start(house: House) -> tuple[Slot, ...]:
    """The slots that the run began with: a copy, because the file may be edited before the run is resumed."""
    copy = house.folder / "prompts" / "start.toml"
    if not copy.exists():
        copy.parent.mkdir(parents=True, exist_ok=True)
        write_slots(copy, read_slots(house.config.resolve(house.config.prompts.slots)))
    return read_slots(copy)


def _write(house: House, slots: Sequence[Slot]) -> None:
    """The best prompts as a file of slots, as text, and as a diff against what the harness sends."""
    folder = house.folder / "prompts"
    write_slots(folder / "final.toml", slots)
    (folder / "final.txt").write_text(as_text(slots), encoding="utf-8")
    (folder / "final.diff").write_text(diff_of(originals(slots), slots, ("harness", "final")) + "\n", encoding="utf-8")


@dataclass(kw_only=True)
class HouseArena:
    """See `leyden.learning.algorithms.prompts.base.Arena`."""

    house: House
    train_tasks: Sequence[Task]
    val_tasks: Sequence[Task]
    approved: Sequence[Exchange]
    reflection: Reflection | None
    num_garbage: int = 0
    _versions: dict[str, int] = field(default_factory=dict)
    _asked: set[str] = field(default_factory=set)
    _shares: dict[str, float] = field(default_factory=dict)
    _rounds: int = 0
    _counted: set[str] = field(default_factory=set)
    # Of the round that runs:
    _tried: dict[str, dict[str, float]] = field(default_factory=dict)
    _seconds: float = 0.0
    _cost: Cost = field(default_factory=Cost)

    @property
    def settings(self) -> PromptsConfig:
        """How to search."""
        return self.house.config.prompts

    @property
    def seed(self) -> int:
        """Of every draw."""
        return self.house.config.run.seed

    async def recall(self) -> None:
        """Versions that this run made before it was stopped."""
        house = self.house
        for version in await aio.read(house.store, lambda c: ledger.policy_versions(c, house.policy)):
            if version.run_id == house.run_id and version.prompts:
                self._versions[Candidate(slots=slots_from_json(version.prompts)).id] = version.version

    async def version_of(self, candidate: Candidate) -> int:
        """The policy version of a candidate, registered when it is new."""
        if candidate.id not in self._versions:
            house, slots = self.house, candidate.slots
            self._versions[candidate.id] = await aio.write(
                house.store, lambda connection: _register(connection, house.store, house, slots)
            )
        return self._versions[candidate.id]

    async def score(self, candidates: Sequence[Candidate], tasks: Sequence[Task], note: str) -> list[Scored] | None:
        """Run each candidate at each task, several candidates at once where weights need not be renamed."""
        sampling = self.house.config.policies[self.house.policy].eval.model_dump()
        plans = [
            self._plan("search", await self.version_of(c), tasks, self.settings.samples, sampling) for c in candidates
        ]
        if not self._affordable(plans):
            return None
        traces = await self._run(plans, note)
        scored = [Scored(candidate=c, trials=self._trials(t, tasks)) for c, t in zip(candidates, traces, strict=True)]
        for one in scored:
            name = f"{self.house.policy}@{await self.version_of(one.candidate)}"
            self._tried[name] = {"score": one.mean, "num_tasks": len(tasks)}
        return scored

    async def demonstrate(self, candidate: Candidate, tasks: Sequence[Task]) -> list[Trial] | None:
        """Rollouts with the sampling of training; one trial per rollout."""
        sampling = self.house.config.policies[self.house.policy].sampling.model_dump()
        version = await self.version_of(candidate)
        plan = self._plan("demonstrations", version, tasks, self.settings.bootstrap_samples, sampling)
        if not self._affordable([plan]):
            return None
        (traces,) = await self._run([plan], f"looking for demonstrations in {len(tasks)} tasks")
        return [trial for trace in traces for trial in self._trials([trace], [trace.rollout.task])]

    async def check_final(self) -> None:
        """The final evaluation is one of the new prompts only where its calls had the slots."""
        ids = await aio.read(self.house.store, lambda c: lookups.evaluation_ids(c, self.house.run_id))
        chosen = [rollout_id for (label, _), rollout_id in ids.items() if label == "final"]
        traces = await asyncio.to_thread(Reader(self.house.store).traces, chosen)
        self._check_found(traces)
        for name, share in shares_of(traces, self.house.policy).items():
            if share < 0.9 * self._shares.get(name, 0.0):
                self.house.progress.say(
                    f"Note: slot {name!r} was found in {100 * share:.0f} % of the calls of the final evaluation and in "
                    f"{100 * self._shares[name]:.0f} % of those of the search: its `original` does not fit all tasks."
                )

    async def reflect(self, prompt: str) -> str | None:
        """Ask the reflection model."""
        assert self.reflection is not None, "check_reflection lets no such search start"
        self.house.stop_requested()
        return await self.reflection.ask(prompt)

    def garbage(self, why: str) -> None:
        """Count it, and say it: a reader of the log sees what the model gets wrong."""
        self.num_garbage += 1
        self.house.progress.say(f"Reply {self.num_garbage} of no use: {why}")
        if self.num_garbage >= self.settings.max_garbage:
            raise LearningError(
                f"{self.num_garbage} replies of the reflection model were of no use, the last because of {why}; use a "
                "stronger model or other templates, or raise prompts.max_garbage"
            )

    async def report(self, row: Mapping[str, Any]) -> None:
        """Record a round as a step of the run. Raises Interrupted when the budget of the run is spent."""
        house, spent = self.house, self.reflection.spent if self.reflection else Spent()
        full = {
            **row,
            "stage": STAGE,
            "step": self._rounds,
            "num_versions": len(self._versions),
            "num_rollouts": len(self._asked),
            "num_reflections": spent.calls,
            "reflection_tokens": spent.tokens,
            "reflection_usd": spent.usd,
            "num_garbage": self.num_garbage,
            "tried": self._tried,
            "seconds": {"rollouts": self._seconds},
            "cost": self._cost.to_json(),
        }
        self._rounds += 1
        self._tried, self._seconds, self._cost = {}, 0.0, Cost()
        await aio.write(
            house.store,
            lambda connection: ledger.add_step(
                connection, house.store, run_id=house.run_id, step=full["step"], stage=STAGE, policy=house.policy,
                version_before=house.lead.base_version, version_after=max(self._versions.values()), report=full,
            ),
        )  # fmt: skip
        house.progress.metrics(full)
        await mind_budget(house)

    def _plan(
        self, label: str, version: int, tasks: Sequence[Task], samples: int, sampling: Mapping[str, Any]
    ) -> list[Rollout]:
        held = [task.id for task in tasks if task.split == "holdout"]
        assert not held, f"holdout tasks in a search: {held[:3]}"
        return evaluation.plan(
            run_id=self.house.run_id,
            label=label,
            tasks=tasks,
            policy_versions={self.house.policy: version},
            samples=samples,
            sampling=sampling,
            seed=self.seed,
        )

    def _affordable(self, plans: Sequence[Sequence[Rollout]]) -> bool:
        """Take the rollouts from the budget, if it has them; those that were asked for before are free."""
        ids = {rollout.id for plan in plans for rollout in plan} | self._asked
        if len(ids) > self.settings.max_rollouts:
            self.house.progress.say(
                f"The budget of {self.settings.max_rollouts} rollouts (prompts.max_rollouts) is used up."
            )
            return False
        self._asked = ids
        return True

    async def _run(self, plans: Sequence[Sequence[Rollout]], note: str) -> list[list[Trace]]:
        """The traces of each plan."""
        house = self.house
        together = [list(range(len(plans)))]
        if not isinstance(house.lead.backend, ExternalBackend):  # one set of weights answers to one name at a time
            together = [[number] for number in range(len(plans))]
        found: dict[str, Trace] = {}
        for numbers in together:
            rollouts = [rollout for number in numbers for rollout in plans[number]]
            house.lead.backend.serve_as(rollouts[0].policy_versions[house.policy])
            limit_s = house.config.learn.step_timeout_s * max(1, len(rollouts) // 64)
            collected = await collect(house, note, rollouts, limit_s)
            self._count([trace for trace in collected if trace.rollout.id not in self._counted])
            found |= {trace.rollout.id: trace for trace in collected}
        traces = [[found[rollout.id] for rollout in plan] for plan in plans]
        flat = [trace for plan in traces for trace in plan]
        self._check_found(flat)
        self._shares = self._shares or shares_of(flat, house.policy)
        return traces

    def _count(self, traces: Sequence[Trace]) -> None:
        """What rollouts took that no round has counted: a later rung has those of the earlier ones among its own."""
        if not traces:
            return
        # From the attempts, so that a search that is gone through again says what it took the first time.
        ended = [trace.attempt.ended_at or trace.attempt.started_at for trace in traces]
        self._seconds += max(ended) - min(trace.attempt.started_at for trace in traces)
        self._cost += total_of(traces, self.house.config)
        self._counted |= {trace.rollout.id for trace in traces}

    def _check_found(self, traces: Sequence[Trace]) -> None:
        """A slot that no call has is a mistake in the file: candidates would only seem to differ."""
        spans = [span for trace in traces for span in trace.spans if span.name == "gateway_refusal"]
        refused = [span.attributes.get("message") for span in spans if span.attributes.get("type") == "slot_conflict"]
        if refused:
            raise LearningError(f"the gateway refused {len(refused)} calls: {refused[0]}")
        missing = sorted(name for name, share in shares_of(traces, self.house.policy).items() if not share)
        if missing:
            raise LearningError(
                f"slot {missing[0]!r} was not found in any call of {len(traces)} rollouts; its `original` in "
                f"{self.settings.slots} is not what the harness sends: mend it, or write the file anew with "
                "`leyden prompts discover`"
            )

    def _trials(self, traces: Sequence[Trace], tasks: Sequence[Task]) -> list[Trial]:
        """One trial per task, over all its rollouts."""
        by_task: dict[str, list[Trace]] = defaultdict(list)
        for trace in traces:
            by_task[trace.rollout.task.id].append(trace)
        return [self._trial(task, by_task[task.id]) for task in tasks]

    def _trial(self, task: Task, traces: Sequence[Trace]) -> Trial:
        config = self.house.config
        solved = evaluation.successes(traces, config)
        score: float | None = None
        if solved and self.settings.metric == "success":
            score = sum(solved) / len(solved)
        elif solved:
            # Those that count, in the order in which `successes` has them; None is a failed agent's.
            score = sum(trace.rollout.reward or 0.0 for trace in traces) / len(solved)
        return Trial(
            task=task,
            score=score,
            solved=bool(solved) and all(solved),
            exchanges=exchanges_of(traces[0], self.house.policy),
            feedback=feedback_of(traces[0]),
        )


def _register(connection: Connection, store: Store, house: House, slots: Sequence[Slot]) -> int:
    """The next free number of the policy, under which these prompts are known from now on."""
    number = numbering.next_version(connection, store, house.policy)
    base = next(v for v in ledger.policy_versions(connection, house.policy) if v.version == house.lead.base_version)
    version = PolicyVersion(
        policy=house.policy, version=number, kind="prompt", parent=house.lead.base_version, path=base.path,
        run_id=house.run_id, created_at=time.time(), prompts=slots_to_json(slots),
    )  # fmt: skip
    ledger.add_policy_version(connection, store, version, stage=STAGE)
    return number

"""Demonstrations from the agent's own successes, and a search for the set that helps most.

The harness runs at the training tasks; what it did where it succeeded becomes demonstrations. Candidates are random
sets of them, appended to the text of one slot. They are compared on validation tasks: all candidates on all tasks
(`random`), or in rungs in which the better half goes on to twice as many tasks (`halving`; successive halving,
Jamieson and Talwalkar, arXiv 1502.07943). The idea of bootstrapped demonstrations is that of DSPy, arXiv 2310.03714.

Promises: a demonstration is text that the model itself wrote in a rollout that solved its task, or one that somebody
approved (`tasks.demos`); no validation task is ever demonstrated; needs no reflection model.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from leyden.base.errors import ConfigError, LearningError
from leyden.base.prompts import Slot
from leyden.base.templates import Template, escape
from leyden.learning.algorithms.prompts.base import Arena, Candidate, Finalists, Scored, Trial, fill, score_seed
from leyden.learning.order import draw, shuffled


@dataclass(frozen=True, slots=True)
class BootstrapDemos:
    """See the module."""

    name: str = "bootstrap_demos"
    """As the configuration calls it."""
    reflects: bool = False
    """It needs nobody else's words."""

    async def search(self, arena: Arena, seed: Candidate) -> Scored:
        """The best set of demonstrations, or the seed. Raises LearningError when no rollout succeeded."""
        slot = _demo_slot(arena, seed)
        start = await score_seed(arena, seed)
        finalists = Finalists([start])
        trials = await arena.demonstrate(seed, arena.train_tasks)
        if trials is None:
            return start
        demos = _demonstrations(arena, slot, trials)
        if not demos:
            raise LearningError(
                f"none of {len(trials)} rollouts gave a demonstration: none solved its task within "
                f"{arena.settings.max_demo_chars} characters; give easier tasks, raise prompts.bootstrap_samples, set "
                "tasks.demos, or use "
                'learn.algorithm = "apo" or "gepa"'
            )
        candidates = _candidates(arena, seed, slot, demos)
        await arena.report({"num_demos": len(demos), "num_candidates": len(candidates), "score": start.mean})
        finalists.add(await _survivors(arena, candidates))
        best = finalists.best()[0]
        await arena.report({"num_demos": len(demos), "num_candidates": len(candidates), "score": best.mean})
        return best


def _demo_slot(arena: Arena, seed: Candidate) -> Slot:
    """Where demonstrations go: the named slot, or the first that is a message."""
    wanted = arena.settings.demo_slot
    for slot in seed.slots:
        if slot.name == wanted or (not wanted and slot.where != "tool"):
            return slot
    known = ", ".join(slot.name for slot in seed.slots)
    if wanted:
        raise ConfigError(f"prompts.demo_slot is {wanted!r}, which is no slot; known: {known}")
    raise ConfigError(f"no slot is a message ({known}), so demonstrations have no place; set prompts.demo_slot")


def _demonstrations(arena: Arena, slot: Slot, trials: Sequence[Trial]) -> list[str]:
    """The text of each demonstration: one per solved rollout, and those that were approved."""
    template = arena.settings.demo_template
    chosen = list(arena.approved)
    for trial in trials:
        fitting = [e for e in trial.exchanges if slot.name in e.filled] or list(trial.exchanges)
        if trial.solved and fitting:
            chosen.append(fitting[-1])
    found = []
    for last in chosen:
        said = [m["content"] if m["role"] == "user" else f"[{m['role']}] {m['content']}" for m in last.messages]
        text = fill(template, input="\n".join(said).strip(), output=last.answer.strip())
        if last.answer.strip() and len(text) <= arena.settings.max_demo_chars:
            found.append(text)
    return list(dict.fromkeys(found))


def _candidates(arena: Arena, seed: Candidate, slot: Slot, demos: Sequence[str]) -> list[Candidate]:
    """Random sets of demonstrations, each once."""
    settings = arena.settings
    most = min(settings.max_demos, len(demos))
    fewest = min(settings.min_demos, most)
    found: dict[str, Candidate] = {}
    for number in range(4 * settings.candidates):  # small numbers of demonstrations have few sets
        size = fewest + draw("size", arena.seed, number) % (most - fewest + 1)
        chosen = shuffled(demos, str, "demos", arena.seed, number)[:size]
        text = slot.text.text + escape("\n\n" + "\n\n".join(chosen))
        try:
            candidate = seed.with_texts({slot.name: Template.parse(text)})
        except ConfigError:  # a demonstration that spells a placeholder of the slot
            continue
        found.setdefault(candidate.id, candidate)
        if len(found) == settings.candidates:
            break
    return list(found.values())


async def _survivors(arena: Arena, candidates: Sequence[Candidate]) -> list[Scored]:
    """Candidates scored on all validation tasks: all of them, or those that got there."""
    tasks = shuffled(arena.val_tasks, lambda task: task.id, "rungs", arena.seed)
    num_tasks = len(tasks)
    if arena.settings.search == "halving":
        num_tasks = min(num_tasks, arena.settings.first_rung)
    left = list(candidates)
    while left:
        rung = arena.val_tasks if num_tasks == len(tasks) else tasks[:num_tasks]
        scored = await arena.score(left, rung, f"{len(left)} sets of demonstrations at {num_tasks} tasks")
        if scored is None:
            return []
        if num_tasks == len(tasks):
            return scored
        keep = Finalists(scored).best((len(left) + 1) // 2)
        await arena.report({"num_candidates": len(left), "num_tasks": num_tasks, "score": keep[0].mean})
        left = [one.candidate for one in keep]
        num_tasks = min(2 * num_tasks, len(tasks))
    return []

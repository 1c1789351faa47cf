"""Reflective evolution with a Pareto front, by the `gepa` library (Agrawal et al., arXiv 2507.19457).

The library chooses parents, minibatches and survivors and asks for new texts; this file is its adapter: it runs its
candidates through the real harness, gives it what happened as feedback, and keeps it within the budgets. The library
works in a thread of its own and calls back into the loop.

Promises: the same seed and the same replies give the same search, so a search that was stopped is gone through again
from the store; a text that loses a placeholder is counted as garbage, scores 0 and is never run; the result is the
candidate with the best mean over all validation tasks. Needs the extra `prompts`.
"""

import asyncio
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from leyden.base.errors import ConfigError, LearningError, LeydenError
from leyden.base.prompts import Slot
from leyden.base.records import Task
from leyden.learning.algorithms.prompts.apo import show_trial
from leyden.learning.algorithms.prompts.base import Arena, Candidate, Finalists, Scored, Trial, read_text, score_seed

T = TypeVar("T")

KEEP = "Keep {names} exactly as they are written: they are filled in for each task."
"""Said before a template of a slot with placeholders."""


@dataclass(frozen=True, slots=True)
class Gepa:
    """See the module."""

    name: str = "gepa"
    """As the configuration calls it."""
    reflects: bool = True
    """New texts are written by another model."""

    async def search(self, arena: Arena, seed: Candidate) -> Scored:
        """The best prompts. Raises ConfigError where the library is not installed."""
        _library()
        start = await score_seed(arena, seed)
        bridge = _Bridge(arena, start, asyncio.get_running_loop())
        await asyncio.to_thread(_optimise, bridge, seed)
        if bridge.failed is not None:
            raise bridge.failed
        return bridge.finalists.best()[0]


def _library() -> Any:
    try:
        import gepa
    except ModuleNotFoundError:
        raise ConfigError(
            "learn.algorithm = \"gepa\" needs the library; install it with: pip install 'leyden[prompts]'"
        ) from None
    return gepa


def _optimise(bridge: "_Bridge", seed: Candidate) -> None:
    """Run the library until a budget is used up; what it found is in `bridge.finalists`."""
    settings = bridge.arena.settings
    try:
        _library().optimize(
            seed_candidate=seed.texts,
            trainset=list(bridge.arena.train_tasks),
            valset=list(bridge.arena.val_tasks),
            adapter=bridge,
            reflection_lm=bridge.reflect,
            reflection_minibatch_size=min(settings.minibatch, len(bridge.arena.train_tasks)),
            reflection_prompt_template={slot.name: _template(bridge, slot) for slot in seed.slots},
            module_selector="round_robin",
            max_metric_calls=settings.max_rollouts,
            stop_callbacks=[lambda state: bridge.over],
            logger=_Quiet(),
            skip_perfect_score=settings.metric == "success",
            seed=bridge.arena.seed,
            raise_on_exception=True,
            track_best_outputs=False,
        )
    except LeydenError as error:
        if not bridge.over:
            bridge.failed = error


def _template(bridge: "_Bridge", slot: Slot) -> str:
    """The reflection template of a slot, with a word about its placeholders."""
    from gepa.strategies.instruction_proposal import InstructionProposalSignature

    template: str = bridge.arena.settings.gepa_template or InstructionProposalSignature.default_prompt_template
    names = ", ".join(f"{{{name}}}" for name in slot.text.names)
    return f"{KEEP.format(names=names)}\n\n{template}" if names else template


class _Quiet:
    """The library's log is not ours: what matters is in the report and in the journal."""

    def log(self, message: str) -> None:
        """Nothing."""


class _Bridge:
    """The library's adapter, called from its thread."""

    propose_new_texts = None
    """The library writes the prompt for the reflection model and reads its reply."""

    def __init__(self, arena: Arena, start: Scored, loop: asyncio.AbstractEventLoop) -> None:
        self.arena = arena
        self.finalists = Finalists([start])
        self.failed: Exception | None = None
        """Why the search has to end, if it has to."""
        self.spent = False
        """Whether a budget is used up."""
        self._seed = start.candidate
        self._loop = loop

    @property
    def over(self) -> bool:
        """Whether nothing more is to be tried: asked before every iteration. A perfect prompt cannot be beaten."""
        perfect = self.arena.settings.metric == "success" and self.finalists.best()[0].mean >= 1
        return self.spent or self.failed is not None or perfect

    def evaluate(self, batch: list[Task], candidate: dict[str, str], capture_traces: bool = False) -> Any:
        """Scores of a candidate at some tasks."""
        from gepa.core.adapter import EvaluationBatch

        trials: Sequence[Trial] = ()
        try:
            slots = {slot.name: slot for slot in self._seed.slots}
            tried = self._seed.with_texts({name: read_text(slots[name], text) for name, text in candidate.items()})
        except ConfigError as error:
            self._guarded(self._counted(str(error)))
        else:
            trials = self._run(tried, batch)
        if not trials:
            empty = [Trial(task=task, score=0.0, solved=False, feedback="it could not be used") for task in batch]
            trials = empty
        return EvaluationBatch(
            outputs=[None] * len(batch),
            scores=[trial.score if trial.score is not None else _mean(trials) for trial in trials],
            trajectories=list(trials) if capture_traces else None,
        )

    def make_reflective_dataset(
        self, candidate: dict[str, str], eval_batch: Any, components_to_update: list[str]
    ) -> Mapping[str, Sequence[Mapping[str, Any]]]:
        """What the reflection model is shown for each slot."""
        trials: Sequence[Trial] = eval_batch.trajectories or ()
        answers = self.arena.settings.show_answers
        rows = [{"Conversation": show_trial(trial, answers), "Feedback": trial.feedback} for trial in trials]
        return dict.fromkeys(components_to_update, rows)

    def reflect(self, prompt: str | list[dict[str, Any]]) -> str:
        """The reflection model's reply. The library takes an error here for a failed proposal, so it is kept."""
        assert isinstance(prompt, str), "only images make it a list, and nothing here gives it one"
        reply = self._guarded(self.arena.reflect(prompt))
        if reply is None:
            self.spent = True
            raise LearningError("the budget of the reflection model is used up")
        if not reply.strip():
            self._guarded(self._counted("an empty reply"))
        return reply

    def _run(self, candidate: Candidate, batch: Sequence[Task]) -> Sequence[Trial]:
        scored = self._guarded(self.arena.score([candidate], batch, "gepa"))
        if scored is None:
            self.spent = True
            raise LearningError("the budget of rollouts is used up")
        if {task.id for task in batch} == {task.id for task in self.arena.val_tasks}:
            self.finalists.add(scored)
            row = {"num_candidates": len(self.finalists.found), "score": self.finalists.best()[0].mean}
            self._guarded(self.arena.report(row))
        return scored[0].trials

    async def _counted(self, why: str) -> None:
        self.arena.garbage(why)

    def _guarded(self, work: Coroutine[Any, Any, T]) -> T:
        """Run it on the loop's thread and keep what went wrong: the library tries once more what failed."""
        if self.failed is not None:
            work.close()
            raise self.failed
        try:
            return asyncio.run_coroutine_threadsafe(work, self._loop).result()
        except Exception as error:
            self.failed = error
            raise


def _mean(trials: Sequence[Trial]) -> float:
    """For a task that does not count: neither better nor worse than the others."""
    scores = [trial.score for trial in trials if trial.score is not None]
    return sum(scores) / len(scores) if scores else 0.0

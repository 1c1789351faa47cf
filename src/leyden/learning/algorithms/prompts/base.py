"""What an optimiser of prompts is: a search over texts of slots, scored by rollouts of the real harness.

An optimiser decides what to try; an `Arena` tries it (the loop provides one) and asks the reflection model. An
optimiser keeps no state of its own: everything it does follows from the seed, the scores and the replies, and the arena
remembers those. A search that was stopped is gone through again and finds its rollouts in the store and its replies in
the run's folder, so it stands where it stood. No torch.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from leyden.base.config import PromptsConfig
from leyden.base.errors import ConfigError
from leyden.base.prompts import Slot
from leyden.base.records import Task, to_json
from leyden.base.templates import Template
from leyden.learning.order import digest


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One set of texts."""

    slots: tuple[Slot, ...]
    """All slots, those with their original text included."""

    @property
    def id(self) -> str:
        """Equal for equal texts."""
        return digest("prompts", to_json({slot.name: slot.text.text for slot in self.slots}))

    @property
    def texts(self) -> dict[str, str]:
        """By slot, as people and models read them."""
        return {slot.name: slot.text.shown for slot in self.slots}

    def with_texts(self, texts: Mapping[str, Template]) -> "Candidate":
        """The same with other texts. Raises ConfigError for one that its slot cannot take."""
        slots = tuple(slot.with_text(texts[slot.name]) if slot.name in texts else slot for slot in self.slots)
        return Candidate(slots=slots)


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """One model call of a rollout, without the slots."""

    messages: Sequence[Mapping[str, str]]
    """What was said before, `role` and `content`; system messages left out."""
    answer: str
    """What the model said."""
    filled: Sequence[str] = ()
    """Slots that were found in it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """What became of one task under one candidate."""

    task: Task
    """What was asked."""
    score: float | None
    """Mean over its rollouts; None where none of them counts, because the infrastructure failed."""
    solved: bool
    """Whether every rollout that counts solved it."""
    exchanges: Sequence[Exchange] = ()
    """Model calls of its first rollout."""
    feedback: str = ""
    """How it ended, and what it earned."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """A candidate on some tasks."""

    candidate: Candidate
    """What was tried."""
    trials: Sequence[Trial]
    """In the order of the tasks."""

    @property
    def mean(self) -> float:
        """Mean score over the tasks that count; 0 without any."""
        scores = [trial.score for trial in self.trials if trial.score is not None]
        return sum(scores) / len(scores) if scores else 0.0


class Arena(Protocol):
    """Where candidates are tried."""

    @property
    def settings(self) -> PromptsConfig:
        """How to search."""

    @property
    def seed(self) -> int:
        """Of every draw."""

    @property
    def train_tasks(self) -> Sequence[Task]:
        """To learn from: demonstrations and failures come from here."""

    @property
    def val_tasks(self) -> Sequence[Task]:
        """To choose by: none of them is shown to anybody."""

    @property
    def approved(self) -> Sequence[Exchange]:
        """Demonstrations that somebody approved (`tasks.demos`), none of a validation task."""

    async def score(self, candidates: Sequence[Candidate], tasks: Sequence[Task], note: str) -> list[Scored] | None:
        """Run each candidate at each task; None (and nothing was run) if the budget of rollouts does not allow it."""

    async def demonstrate(self, candidate: Candidate, tasks: Sequence[Task]) -> list[Trial] | None:
        """Sampled rollouts (not greedy ones) from which demonstrations can be taken; None as in `score`."""

    async def reflect(self, prompt: str) -> str | None:
        """What the reflection model says; None if its budget is used up. Raises LearningError when it is down."""

    def garbage(self, why: str) -> None:
        """Count a reply that is of no use. Raises LearningError when there are too many."""

    async def report(self, row: Mapping[str, Any]) -> None:
        """A round is over; `row` are its numbers."""


class Optimiser(Protocol):
    """One member of the family."""

    @property
    def name(self) -> str:
        """As the configuration calls it."""

    @property
    def reflects(self) -> bool:
        """Whether it needs a reflection model."""

    async def search(self, arena: Arena, seed: Candidate) -> Scored:
        """The best candidate found, scored on the validation tasks; the seed if nothing was better."""


@dataclass(slots=True)
class Finalists:
    """Everything that was scored on all validation tasks; ties go to the earlier one."""

    found: list[Scored] = field(default_factory=list)
    """In the order of their scoring."""

    def add(self, scored: Sequence[Scored]) -> None:
        """Take more in."""
        self.found += scored

    def best(self, count: int = 1) -> list[Scored]:
        """The best ones, each set of texts once."""
        distinct = {one.candidate.id: one for one in reversed(self.found)}
        order = {one.candidate.id: place for place, one in reversed(list(enumerate(self.found)))}
        return sorted(distinct.values(), key=lambda one: (-one.mean, order[one.candidate.id]))[:count]


async def score_seed(arena: Arena, seed: Candidate) -> Scored:
    """The seed on all validation tasks. The bounds were checked before, so the budget allows it."""
    scored = await arena.score([seed], arena.val_tasks, "the prompts as they are")
    assert scored is not None, "check_bounds lets no search start that cannot score its seed"
    return scored[0]


def read_text(slot: Slot, text: str) -> Template:
    """What a model wrote for a slot, as a template. Raises ConfigError where it lost a placeholder."""
    template = Template.loose(text.strip("\n"), slot.original.names)
    lost = sorted(set(slot.text.names) - set(template.names))
    if lost:
        raise ConfigError(f"the new text of slot {slot.name!r} lost {{{lost[0]}}}")
    return template


def fill(template: str, **values: str) -> str:
    """`{name}` replaced by its value, in one pass, so that braces in values stay what they are."""
    return re.sub(r"\{(\w+)\}", lambda found: values.get(found[1], found[0]), template)

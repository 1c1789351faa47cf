"""What every optimiser of prompts promises, in an arena that is a function: no gateway, no store."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from leyden.base.config import PromptsConfig
from leyden.base.errors import Interrupted, LearningError
from leyden.base.prompts import make_slot
from leyden.base.records import Task
from leyden.learning.algorithms.prompts import OPTIMISERS, Candidate, Scored, Trial
from leyden.learning.algorithms.prompts.base import Exchange, Finalists

SEED = Candidate(slots=(make_slot("system", "Translate {word}."), make_slot("tool", "Looks.", where="tool")))
GOOD = "Translate {word}. Shout."


def tasks(split: Any, count: int) -> list[Task]:
    return [Task(id=f"{split}{i}", split=split, input={"word": f"{split} word {i}"}) for i in range(count)]


class FunctionArena:
    """Scores by a rule: a task is solved when the prompt says "Shout" or shows a demonstration, or by chance."""

    def __init__(self, *, rollouts: int = 10_000, replies: int = 100, **settings: Any) -> None:
        self.settings = PromptsConfig(**{"minibatch": 2, "rounds": 3, "candidates": 4, "first_rung": 2, **settings})
        self.seed = 7
        self.train_tasks, self.val_tasks = tasks("train", 4), tasks("val", 5)
        self.approved: list[Exchange] = []
        self.left, self.replies = rollouts, replies
        self.log: list[Any] = []
        self.rows: list[Mapping[str, Any]] = []
        self.stop_after = 10_000
        self.down = False

    async def score(self, candidates: Sequence[Candidate], some: Sequence[Task], note: str) -> list[Scored] | None:
        self.stop_after -= 1
        if self.stop_after < 0:
            raise Interrupted("stopped as asked")
        if self.left < len(candidates) * len(some):
            return None
        self.left -= len(candidates) * len(some)
        self.log.append(([c.id for c in candidates], [task.id for task in some]))
        return [Scored(candidate=c, trials=[self._trial(c, task) for task in some]) for c in candidates]

    async def demonstrate(self, candidate: Candidate, some: Sequence[Task]) -> list[Trial] | None:
        scored = await self.score([candidate], some, "")
        return None if scored is None else list(scored[0].trials)

    async def reflect(self, prompt: str) -> str | None:
        assert "val word" not in prompt, "a validation task was shown"
        if self.down:
            raise LearningError("the reflection model is down")
        if self.replies == 0:
            return None
        self.replies -= 1
        self.log.append(prompt)
        return f'<slot name="system">{GOOD}</slot>' if "Write better" in prompt else f"```\n{GOOD}\n```"

    def garbage(self, why: str) -> None:
        self.log.append(why)

    async def report(self, row: Mapping[str, Any]) -> None:
        self.rows.append(row)

    def _trial(self, candidate: Candidate, task: Task) -> Trial:
        text = candidate.texts["system"]
        solved = "Shout" in text or "Example" in text or task.id.endswith("3")
        said = Exchange(messages=[{"role": "user", "content": task.input["word"]}], answer="LOUD", filled=["system"])
        return Trial(task=task, score=float(solved), solved=solved, exchanges=[said], feedback=f"right = {solved:d}")


def search(name: str, arena: FunctionArena) -> Scored:
    return asyncio.run(OPTIMISERS[name].search(arena, SEED))


@pytest.fixture(params=sorted(OPTIMISERS))
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_a_better_prompt_is_found_and_keeps_its_placeholders(name: str) -> None:
    arena = FunctionArena()
    best = search(name, arena)
    assert best.mean == 1.0 and len(best.trials) == len(arena.val_tasks)
    assert {slot.name: slot.text.names for slot in best.candidate.slots} == {"system": ("word",), "tool": ()}
    assert arena.rows and all(0 <= row["score"] <= 1 for row in arena.rows)


def test_the_same_seed_and_replies_give_the_same_search(name: str) -> None:
    one, other = FunctionArena(), FunctionArena()
    assert search(name, one).candidate == search(name, other).candidate
    assert one.log == other.log


@pytest.mark.parametrize("rollouts", [5, 6, 9, 10, 14, 30])
def test_a_budget_of_rollouts_ends_it_with_the_best_so_far(name: str, rollouts: int) -> None:
    arena = FunctionArena(rollouts=rollouts)
    assert search(name, arena).mean >= 0.2
    assert arena.left >= 0


@pytest.mark.parametrize("replies", [0, 1, 2])
def test_a_budget_of_replies_ends_it_with_the_best_so_far(name: str, replies: int) -> None:
    arena = FunctionArena(replies=replies)
    assert search(name, arena).mean >= 0.2
    assert arena.replies >= 0


@pytest.mark.parametrize("after", [0, 1, 2])
def test_a_wish_to_stop_is_passed_on(name: str, after: int) -> None:
    arena = FunctionArena()
    arena.stop_after = after
    with pytest.raises(Interrupted):
        search(name, arena)


def test_a_reflection_model_that_is_down_stops_those_that_need_one(name: str) -> None:
    arena = FunctionArena()
    arena.down = True
    if not OPTIMISERS[name].reflects:
        assert search(name, arena).mean == 1.0
        return
    with pytest.raises(LearningError, match="is down"):
        search(name, arena)


def test_finalists_are_sorted_by_score_and_the_earlier_one_wins_a_tie() -> None:
    arena = FunctionArena()
    others = [SEED.with_texts({"tool": make_slot("t", text).text}) for text in ("a", "b")]
    scored = [Scored(candidate=c, trials=[arena._trial(c, arena.val_tasks[0])]) for c in (SEED, *others)]
    assert Finalists(scored).best(3) == scored
    assert Finalists([*scored, scored[0]]).best(1) == [scored[0]]


def test_halving_gives_more_tasks_to_fewer_candidates() -> None:
    arena = FunctionArena(candidates=4, first_rung=1, max_demos=1)
    arena.train_tasks = [Task(id=f"train{i}3", input={"word": f"w{i}"}) for i in range(4)]
    search("bootstrap_demos", arena)
    rungs = [(len(ids), len(some)) for ids, some in arena.log if ids != [SEED.id]]
    assert rungs == [(4, 1), (2, 2), (1, 4), (1, 5)]

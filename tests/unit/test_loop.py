"""The loop with a backend that has no weights and rollouts that end as a script says."""

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.unit.traces.making import OUTCOMES, make_call, make_trace

from leyden.base.config import Config, from_tree
from leyden.base.errors import HoldoutError, Interrupted, LearningError
from leyden.base.records import Rollout, Task
from leyden.base.tasks import Demo
from leyden.house import House, Learner
from leyden.learning.backends.base import Objective
from leyden.learning.credit import Credit
from leyden.learning.schedule import TaskOrder
from leyden.loop import batches_of, improve, reinforce_once
from leyden.step_report import off_policy
from leyden.store import Store, ledger, open_store
from leyden.testing.fake_backend import FakeBackend, Play, ScriptedServices
from leyden.traces.assemble import assemble

TRAIN = [Task(id=f"train-{i}", split="train", input={"i": i}) for i in range(4)]
HELD = [Task(id=f"held-{i}", split="holdout", input={"i": 100 + i}) for i in range(3)]


class Said:
    """Remembers what the loop said."""

    def __init__(self) -> None:
        self.sentences: list[str] = []
        self.phases: list[str] = []
        self.rows: list[Mapping[str, Any]] = []

    def say(self, text: str) -> None:
        self.sentences.append(text)

    def begin(self, phase: str, total: int) -> None:
        self.phases.append(phase)

    def advance(self, done: int, note: str = "") -> None:
        pass

    def end(self) -> None:
        pass

    def metrics(self, row: Mapping[str, Any]) -> None:
        self.rows.append(row)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    opened = open_store(f"sqlite:///{tmp_path / 'leyden.db'}")
    yield opened
    opened.close()


def alternating(rollout: Rollout) -> float:
    """Half of a group is right."""
    return float(rollout.seed % 2)


def config_of(folder: Path, **learn: Any) -> Config:
    sampling = {"sampling": {"max_tokens": 4}, "eval": {"max_tokens": 4, "temperature": 0.0}}
    tree = {
        "learn": {"group_size": 4, "tasks_per_step": 2, "steps": 2, **learn},
        "policies": {"main": {"model": "none", **sampling}},
        "eval": {"resamples": 100},
    }
    return from_tree(tree, base_dir=folder)


def house_of(
    store: Store,
    folder: Path,
    play: Play = alternating,
    config: Config | None = None,
    run_id: str = "run-1",
    version: int = 0,
    demos: Sequence[Demo] = (),
    **fields: Any,
) -> House:
    """A run whose rollouts end as `play` says."""
    config = config or config_of(folder)
    store.write(lambda connection: ledger.add_run(connection, store, run_id, {}, {})).result(20)
    values: dict[str, Any] = {"train_tasks": TRAIN, "holdout_tasks": HELD, **fields}
    return House(
        learners=[Learner(config=config, backend=FakeBackend(version=version), base_version=version, demos=demos)],
        run_id=run_id,
        folder=folder / run_id,
        store=store,
        services=ScriptedServices(store, play),
        progress=Said(),
        **values,
    )


def change_lead(house: House, **fields: Any) -> None:
    """Another configuration or backend for the policy that leads."""
    house.learners = [replace(house.lead, **fields), *house.learners[1:]]


def rows_of(house: House) -> list[Mapping[str, Any]]:
    assert isinstance(house.progress, Said)
    return house.progress.rows


def mixed(group: int = 4) -> Play:
    """In every group the first rollout is right and the others are not."""
    seen: dict[str, int] = {}

    def play(rollout: Rollout) -> float:
        number = seen[rollout.group_id or rollout.id] = seen.get(rollout.group_id or rollout.id, -1) + 1
        return float(number % group == 0)

    return play


def test_a_run_evaluates_learns_and_judges(store: Store, tmp_path: Path) -> None:
    house = house_of(store, tmp_path, mixed())
    done = asyncio.run(improve(house))
    assert list(done.evaluations) == ["base", "final"] and list(done.verdicts) == ["base"]
    assert done.verdicts["base"].candidate == "main@2" and done.verdicts["base"].answer == "not separable"
    assert [(row["step"], row["num_optimizer_steps"]) for row in rows_of(house)] == [(0, 1), (1, 1)]
    for row in rows_of(house):
        assert row["conservation"] == {"sampled": 24, "trained": 24, "dropped": {}}
    assert isinstance(house.services, ScriptedServices)
    assert house.services.num_held == 2 and not house.services.held
    recorded = store.read(lambda connection: ledger.steps(connection, "run-1"))
    assert [(s.stage, s.version_before, s.version_after) for s in recorded] == [("rl", 0, 1), ("rl", 1, 2)]


def test_without_a_holdout_a_run_learns_and_judges_nothing(store: Store, tmp_path: Path) -> None:
    house = house_of(store, tmp_path, mixed(), holdout_tasks=[])
    done = asyncio.run(improve(house))
    assert done.evaluations == {} and done.verdicts == {}
    assert house.lead.backend.version == 2


def test_a_run_of_no_steps_only_evaluates_what_it_started_from(store: Store, tmp_path: Path) -> None:
    house = house_of(store, tmp_path, mixed(), config_of(tmp_path, steps=0))
    done = asyncio.run(improve(house))
    assert list(done.evaluations) == ["base"] and done.verdicts == {} and rows_of(house) == []
    assert house.lead.backend.version == 0


def test_a_step_whose_rewards_are_all_equal_moves_no_weight_and_the_run_goes_on(store: Store, tmp_path: Path) -> None:
    house = house_of(store, tmp_path, lambda rollout: 1.0, holdout_tasks=[])
    asyncio.run(improve(house))
    assert isinstance(house.lead.backend, FakeBackend) and house.lead.backend.num_optimizer_steps == 0
    assert [row["num_optimizer_steps"] for row in rows_of(house)] == [0, 0]
    assert all(row["num_zero_variance"] == row["num_groups"] == 2 for row in rows_of(house))
    assert all(row["conservation"]["sampled"] == row["conservation"]["trained"] for row in rows_of(house))


def test_a_step_is_repeated_from_the_store_without_running_anything_again(store: Store, tmp_path: Path) -> None:
    house = house_of(store, tmp_path, mixed(), holdout_tasks=[])
    first = asyncio.run(reinforce_once(house, 0))
    assert isinstance(house.services, ScriptedServices)
    num_played = len(house.services.played)
    change_lead(house, backend=FakeBackend())
    again = asyncio.run(reinforce_once(house, 0))
    assert len(house.services.played) == num_played == 8
    assert {k: v for k, v in again.items() if k != "seconds"} == {k: v for k, v in first.items() if k != "seconds"}


def test_an_evaluation_that_a_resumed_run_left_behind_is_read_back(store: Store, tmp_path: Path) -> None:
    house = house_of(store, tmp_path, mixed())
    before = asyncio.run(improve(house))
    house.done_steps = 2
    change_lead(house, backend=FakeBackend(version=2))
    after = asyncio.run(improve(house))
    assert after.evaluations == before.evaluations and after.verdicts == before.verdicts


def test_demonstrations_come_first_and_each_batch_makes_a_version(store: Store, tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "bcd"}]
    demos = [Demo(task=f"demo-{i}", messages=messages) for i in range(5)]
    config = config_of(tmp_path, steps=1).model_copy()
    config = from_tree(
        {**config.model_dump(exclude={"base_dir"}), "sft": {"epochs": 2, "batch_size": 2}}, base_dir=tmp_path
    )
    house = house_of(store, tmp_path, mixed(), config, demos=demos)
    done = asyncio.run(improve(house))
    assert [row["stage"] for row in rows_of(house)] == ["sft"] * 6 + ["rl"]
    assert [e.policy_version for e in done.evaluations.values()] == ["main@0", "main@6", "main@7"]
    assert list(done.verdicts) == ["base", "sft"]
    assert isinstance(house.services, ScriptedServices) and not house.services.held


def test_waiting_ends_with_what_is_missing_and_what_to_change(store: Store, tmp_path: Path) -> None:
    house = house_of(store, tmp_path, config=config_of(tmp_path, step_timeout_s=0.3))
    assert isinstance(house.services, ScriptedServices)
    house.services.check = lambda: None  # type: ignore[method-assign] # nobody runs anything
    with pytest.raises(LearningError, match=r"3 of 3 rollouts were not over.*'queuing': 3.*learn\.step_timeout_s"):
        asyncio.run(improve(house))


def test_a_harness_that_never_calls_stops_the_run_with_its_diagnosis(store: Store, tmp_path: Path) -> None:
    house = house_of(store, tmp_path, lambda rollout: None)
    with pytest.raises(LearningError, match=r"none of 3 rollouts made a model call.*no_calls") as caught:
        asyncio.run(improve(house))
    assert "where is everybody?" in str(caught.value)


def test_a_wish_to_stop_is_heard_between_two_looks(store: Store, tmp_path: Path) -> None:
    def stop() -> None:
        raise Interrupted("stopped as asked")

    house = house_of(store, tmp_path, stop_requested=stop)
    with pytest.raises(Interrupted):
        asyncio.run(improve(house))
    assert rows_of(house) == []


def with_budget(folder: Path, **budget: Any) -> Config:
    config = config_of(folder, steps=4, checkpoint_every=3)
    return from_tree({**config.model_dump(exclude={"base_dir"}), "budget": budget}, base_dir=folder)


def test_a_spent_budget_stops_with_a_checkpoint_and_a_sentence_and_more_of_it_goes_on(
    store: Store, tmp_path: Path
) -> None:
    # A rollout reads 3 tokens and samples 3: the evaluation takes 18, a step of 8 rollouts 48.
    house = house_of(store, tmp_path, mixed(), with_budget(tmp_path, tokens=100))
    said = r"114 of 100 tokens are used \(budget\.tokens\).*--resume.*budget\.tokens=MORE"
    with pytest.raises(Interrupted, match=said):
        asyncio.run(improve(house))
    assert house.lead.backend.version == 2
    assert isinstance(house.lead.backend, FakeBackend)
    assert [folder.name for folder in house.lead.backend.saved] == ["main@2"], (
        "step 2 is no multiple of checkpoint_every"
    )
    assert isinstance(house.services, ScriptedServices) and not house.services.held
    with pytest.raises(Interrupted, match="114 of 110 tokens"):
        change_lead(house, config=with_budget(tmp_path, tokens=110))
        house.done_steps = 2
        asyncio.run(improve(house))
    num_played = len(house.services.played)
    change_lead(house, config=with_budget(tmp_path, tokens=10_000))
    done = asyncio.run(improve(house))
    assert house.lead.backend.version == 4 and list(done.evaluations) == ["base", "final"]
    assert len(house.services.played) == num_played + 2 * 8 + 3, "only what was missing ran"


def test_a_budget_of_minutes_counts_recorded_work_and_one_of_money_says_when_it_cannot_bind(
    store: Store, tmp_path: Path
) -> None:
    house = house_of(store, tmp_path, mixed(), with_budget(tmp_path, minutes=1e-9, usd=5.0))
    with pytest.raises(Interrupted, match=r"of 1e-09 minutes are used"):
        asyncio.run(improve(house))
    assert house.lead.backend.version == 0, "the evaluation alone spent it"
    assert isinstance(house.progress, Said)
    assert any(
        "budget.usd counts nothing: no policy or provider has a price" in said for said in house.progress.sentences
    )


def test_the_second_run_on_a_holdout_judges_with_a_smaller_error_rate(store: Store, tmp_path: Path) -> None:
    first = asyncio.run(improve(house_of(store, tmp_path, mixed())))
    second = house_of(store, tmp_path, mixed(), run_id="run-2", version=7)
    levels = [first.verdicts["base"].level, asyncio.run(improve(second)).verdicts["base"].level]
    assert levels == pytest.approx([1 - 0.05 / 2, 1 - 0.05 / 6])


def test_a_demonstration_of_a_holdout_task_is_refused_when_the_data_set_is_made(store: Store, tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    config = from_tree({**config_of(tmp_path).model_dump(exclude={"base_dir"}), "sft": {}}, base_dir=tmp_path)
    house = house_of(store, tmp_path, mixed(), config, demos=[Demo(task="held-1", messages=messages)])
    with pytest.raises(HoldoutError, match="'held-1' is 'held-1'"):
        asyncio.run(improve(house))


def test_groups_without_a_difference_are_replaced_by_further_tasks_and_counted(store: Store, tmp_path: Path) -> None:
    right = mixed()

    def play(rollout: Rollout) -> float | None:
        return 1.0 if rollout.task.id in dull else right(rollout)

    config = config_of(tmp_path, algorithm="dapo", overlong_buffer=0.0)
    house = house_of(store, tmp_path, play, config, holdout_tasks=[])
    order = TaskOrder(TRAIN, 2, config.run.seed)
    dull = {order.tasks_at(0)[0].id}
    report = asyncio.run(reinforce_once(house, 0))
    assert (report["num_refilled"], report["num_groups"], report["num_zero_variance"]) == (1, 3, 1)
    assert report["zero_variance_tasks"] == sorted(dull)
    assert report["conservation"] == {"sampled": 36, "trained": 24, "dropped": {"flat_group": 12}}
    assert isinstance(house.services, ScriptedServices)
    num_played = len(house.services.played)
    change_lead(house, backend=FakeBackend())
    again = asyncio.run(reinforce_once(house, 0))
    assert len(house.services.played) == num_played == 12, "a repeated step asks for the same groups"
    assert {k: v for k, v in again.items() if k != "seconds"} == {k: v for k, v in report.items() if k != "seconds"}


def test_refills_end_at_their_bound_and_a_step_without_a_difference_moves_no_weight(
    store: Store, tmp_path: Path
) -> None:
    tasks = [*TRAIN, *(Task(id=f"more-{i}", split="train") for i in range(8))]
    config = config_of(tmp_path, algorithm="dapo", steps=1, refills=2)
    house = house_of(store, tmp_path, lambda rollout: 1.0, config, holdout_tasks=[], train_tasks=tasks)
    report = asyncio.run(reinforce_once(house, 0))
    assert (report["num_refilled"], report["num_rollouts"], report["num_optimizer_steps"]) == (4, 24, 0)
    assert report["conservation"]["dropped"] == {"flat_group": 72} and report["conservation"]["trained"] == 0


@pytest.mark.parametrize("name", ["dpo", "ppo"])
def test_pairs_and_a_critic_go_through_the_loop(store: Store, tmp_path: Path, name: str) -> None:
    house = house_of(store, tmp_path, mixed(), config_of(tmp_path, algorithm=name), holdout_tasks=[])
    report = asyncio.run(reinforce_once(house, 0))
    books = report["conservation"]
    assert books["sampled"] == 24 == books["trained"] + sum(books["dropped"].values())
    assert books["dropped"] == ({"unpaired": 12} if name == "dpo" else {})
    assert (report["explained_variance"] is None) == (name == "dpo") and report["staleness"] == 0


def test_masked_tokens_leave_the_books_of_the_trained_by_name_and_once() -> None:
    config = from_tree({"learn": {"epochs": 2}}, base_dir=Path())
    actions = assemble(
        [make_trace(f"r{r}", calls=[make_call(f"c{r}")]) for r in range(2)], policy="main", trainable_outcomes=OUTCOMES
    )
    credit = Credit(by_rollout={"r0": 1.0, "r1": -1.0}, groups=[])
    batches = batches_of(config.learn, 0, 0, actions, credit)
    update = replace(FakeBackend().update(batches, Objective(), 1), num_masked=[3, 3])
    books = {"conservation": {"sampled": 4, "trained": 4, "dropped": {}}}
    assert off_policy(books, batches, update) == {
        "conservation": {"sampled": 4, "trained": 1, "dropped": {"off_policy": 3}}
    }
    assert off_policy(books, batches, replace(update, num_masked=[0, 0])) == {}

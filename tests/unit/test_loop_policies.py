"""The loop with several policies: each learns from its own calls, and what is recorded and judged names all of them."""

import asyncio
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.test_carry import Slow
from tests.unit.test_loop import Said, house_of, mixed, rows_of, store
from tests.unit.traces.making import make_call, make_trace

from leyden.base.config import Config, from_tree
from leyden.base.records import Outcome, Rollout, Trace
from leyden.base.tasks import Demo
from leyden.house import House, Learner
from leyden.learning.backends.base import Objective, UpdateReport
from leyden.learning.batch import Batch
from leyden.loop import Lesson, improve, study
from leyden.step_report import step_report
from leyden.store import Store, ledger
from leyden.testing.fake_backend import FakeBackend, Play, ScriptedServices

__all__ = ["store"]  # the fixture


class Recording(FakeBackend):
    """Remembers what it was given."""

    def __init__(self, policy: str, version: int = 0) -> None:
        super().__init__(policy, version)
        self.given: list[Sequence[Batch]] = []
        self.objectives: list[Objective] = []

    def update(self, batches: Sequence[Batch], objective: Objective, version: int) -> UpdateReport:
        self.given.append(batches)
        self.objectives.append(objective)
        return super().update(batches, objective, version)


def config_of(
    folder: Path, writer: Mapping[str, Any] | None = None, sft: Mapping[str, Any] | None = None, **learn: Any
) -> Config:
    one = {"model": "none", "sampling": {"max_tokens": 4}}
    tree: dict[str, Any] = {
        "learn": {"group_size": 4, "tasks_per_step": 2, "steps": 2, **learn},
        "policies": {
            "planner": one,
            "writer": {**one, "learn": dict(writer or {})},
            "judge": {"model": "none", "trainable": False},
        },
        "eval": {"resamples": 100},
        "sft": sft,
    }
    return from_tree(tree, base_dir=folder)


def asked(rollout: Rollout) -> Sequence[str]:
    """The planner always, the judge always, the writer in half of the rollouts and then twice."""
    return ("planner", "judge", "writer", "writer") if rollout.seed % 2 else ("planner", "judge")


def team_of(
    store: Store,
    folder: Path,
    config: Config | None = None,
    services: Any = None,
    play: Play | None = None,
    **more: Any,
) -> House:
    """A run of `planner` and `writer` beside a frozen `judge`."""
    config = config or config_of(folder)
    house = house_of(store, folder, play or mixed(), config, **more)
    house.learners = [
        Learner(config=config.of("planner"), backend=Recording("planner")),
        Learner(config=config.of("writer"), backend=Recording("writer", 10), base_version=10),
    ]
    house.frozen = ("judge",)
    house.services = services or ScriptedServices(store, play or mixed(), asked=asked)
    return house


def given_to(house: House) -> dict[str, Recording]:
    found = {learner.policy: learner.backend for learner in house.learners}
    assert all(isinstance(backend, Recording) for backend in found.values())
    return found  # type: ignore[return-value]


def test_each_policy_is_trained_on_its_own_calls_and_the_frozen_one_on_none(store: Store, tmp_path: Path) -> None:
    house = team_of(store, tmp_path)
    done = asyncio.run(improve(house))
    assert done.verdicts["base"].candidate == "planner@2+writer@12" and done.verdicts["base"].incumbent.count("@") == 2
    assert isinstance(house.services, ScriptedServices)
    played = [r for r in house.services.played if r.mode == "train"]
    assert [dict(r.policy_versions) for r in played[::8]] == [
        {"planner": 0, "writer": 10, "judge": 0}, {"planner": 1, "writer": 11, "judge": 0},
    ]  # fmt: skip
    for number, row in enumerate(rows_of(house)):
        busy = sum(r.seed % 2 for r in played[8 * number : 8 * number + 8])
        planner, writer = row["policies"]["planner"], row["policies"]["writer"]
        sampled = 3 * (16 + 2 * busy)
        assert planner["conservation"]["trained"] == 24 and writer["conservation"]["trained"] == 6 * busy
        assert planner["conservation"]["dropped"] == {"not_trainable": sampled - 24}
        assert row["conservation"] == {
            "sampled": sampled, "trained": 24 + 6 * busy, "dropped": {"not_trainable": 24},
        }, "the judge's tokens are the only ones that nobody trains"  # fmt: skip
        assert (planner["version"], writer["version"], row["version"]) == (number + 1, number + 11, number + 1)
        assert (planner["num_without_calls"], writer["num_without_calls"]) == (0, 8 - busy)
        assert planner["num_groups"] == writer["num_groups"] == 2, "all rollouts are compared for both"
        assert "loss" not in row and {"loss", "grad_norm", "kl"} <= planner.keys()
        assert row["num_labels"] == planner["num_labels"] + writer["num_labels"]
    assert [s.num_held for s in [house.services]] == [2], "both learn while calls wait once"


def test_a_policy_that_nobody_asks_is_named_and_its_weights_stay(store: Store, tmp_path: Path) -> None:
    services = ScriptedServices(store, mixed(), asked=lambda _: ("planner",))
    house = team_of(store, tmp_path, services=services, holdout_tasks=[])
    asyncio.run(improve(house))
    assert isinstance(house.progress, Said)
    told = [sentence for sentence in house.progress.sentences if "asked policy" in sentence]
    assert len(told) == 2 and all("'writer'" in s and "policies.writer.trainable = false" in s for s in told)
    writer = given_to(house)["writer"]
    assert writer.given == [[], []] and writer.num_optimizer_steps == 0
    assert [row["policies"]["writer"]["num_without_calls"] for row in rows_of(house)] == [8, 8]


def test_checkpoints_of_all_policies_are_registered_together(store: Store, tmp_path: Path) -> None:
    house = team_of(store, tmp_path, config_of(tmp_path, steps=3, checkpoint_every=2), holdout_tasks=[])
    asyncio.run(improve(house))
    known = store.read(lambda connection: ledger.policy_versions(connection))
    assert [(v.name, v.step, v.parent) for v in known] == [
        ("planner@2", 2, 0), ("planner@3", 3, 0), ("writer@12", 2, 10), ("writer@13", 3, 10),
    ]  # fmt: skip
    assert all(v.path is not None and Path(v.path).is_dir() for v in known)


def test_each_policy_has_its_own_algorithm_and_rates(store: Store, tmp_path: Path) -> None:
    own = {"algorithm": "reinforce_pp", "learning_rate": 0.5, "surrogate": "ppo_clip", "clip_high": 0.4}
    house = team_of(store, tmp_path, config_of(tmp_path, writer=own, learning_rate=0.25), holdout_tasks=[])
    asyncio.run(improve(house))
    planner, writer = (given_to(house)[name].objectives[0] for name in ("planner", "writer"))
    assert (planner.surrogate, planner.learning_rate) == ("policy_gradient", 0.25)
    assert (writer.surrogate, writer.learning_rate, writer.clip_high) == ("ppo_clip", 0.5, 0.4)
    first = {name: {b.rollout_A.size for b in backend.given[0]} for name, backend in given_to(house).items()}
    assert first["planner"] and first["writer"]


def test_a_group_is_refilled_only_where_no_policy_can_learn_from_it(store: Store, tmp_path: Path) -> None:
    flat = team_of(store, tmp_path, config_of(tmp_path, refills=1, steps=1), play=lambda _: 1.0, holdout_tasks=[])
    asyncio.run(improve(flat))
    assert rows_of(flat)[0]["num_refilled"] == 2


def test_a_group_that_teaches_one_policy_is_kept_for_it_and_dropped_for_the_other(store: Store, tmp_path: Path) -> None:
    config = config_of(tmp_path, writer={"overlong_buffer": 0.75}, refills=1, steps=1)
    some = team_of(store, tmp_path, config, play=lambda _: 1.0, holdout_tasks=[])
    asyncio.run(improve(some))
    row = rows_of(some)[0]
    # The writer's answers are long, so rollouts that asked it lost reward: its groups differ, the planner's do not.
    assert row["num_refilled"] < 2
    assert row["policies"]["planner"]["conservation"]["trained"] == 0
    assert row["policies"]["writer"]["conservation"]["trained"] > 0


def demos_of(policy: str, *answers: str) -> list[Demo]:
    asked = {"role": "user", "content": "a"}
    said = [[asked, {"role": "assistant", "content": answer}] for answer in answers]
    return [Demo(task=f"demo-{i}", messages=messages, policy=policy) for i, messages in enumerate(said)]


def test_each_policy_imitates_its_own_demonstrations_and_versions_go_together(store: Store, tmp_path: Path) -> None:
    config = config_of(tmp_path, sft={"epochs": 2, "batch_size": 2}, steps=1)
    house = team_of(store, tmp_path, config)
    planner, writer = house.learners
    house.learners = [
        replace(planner, demos=demos_of("planner", "bc", "d", "ef")), replace(writer, demos=demos_of("writer", "WXYZ"))
    ]  # fmt: skip
    done = asyncio.run(improve(house))
    assert [e.policy_version for e in done.evaluations.values()] == [
        "planner@0+writer@10", "planner@4+writer@14", "planner@5+writer@15",
    ]  # fmt: skip
    assert list(done.verdicts) == ["base", "sft"]
    steps = [row for row in rows_of(house) if row["stage"] == "sft"]
    assert [{name: part["version"] for name, part in row["policies"].items()} for row in steps] == [
        {"planner": 1, "writer": 11}, {"planner": 2, "writer": 12}, {"planner": 3}, {"planner": 4},
    ]  # fmt: skip
    assert [row["num_labels"] for row in steps[:2]] == [
        sum(p["num_labels"] for p in r["policies"].values()) for r in steps[:2]
    ]
    lengths = {
        name: sorted(len(s) for batches in backend.given[:-1] for one in batches for s in one.sequences)
        for name, backend in given_to(house).items()
    }
    assert lengths == {"planner": [2, 2, 3, 3, 3, 3], "writer": [5, 5]}, "a byte is a token, and one is asked"
    known = store.read(lambda connection: ledger.policy_versions(connection))
    assert [(v.name, v.step, v.parent) for v in known] == [
        ("planner@4", 0, 0), ("planner@5", 1, 0), ("writer@14", 0, 10), ("writer@15", 1, 10),
    ]  # fmt: skip


def test_a_policy_without_a_demonstration_keeps_its_weights_while_another_imitates(
    store: Store, tmp_path: Path
) -> None:
    house = team_of(store, tmp_path, config_of(tmp_path, sft={"batch_size": 1}, steps=0), holdout_tasks=[])
    planner, writer = house.learners
    house.learners = [planner, replace(writer, demos=demos_of("writer", "W"))]
    asyncio.run(improve(house))
    found = given_to(house)
    assert found["planner"].given == [] and found["planner"].version == 2
    assert len(found["writer"].given) == 2 and found["writer"].version == 12
    assert [folder.name for folder in found["planner"].saved] == ["planner@2"]


@pytest.mark.parametrize("seed", range(2))
def test_rollouts_that_run_on_are_pinned_to_the_versions_of_all_policies(
    store: Store, tmp_path: Path, seed: int
) -> None:
    config = config_of(tmp_path, steps=4, max_staleness=2)
    services = Slow(store, mixed(), asked=asked)
    Slow.draw = random.Random(seed)
    house = team_of(store, tmp_path, config, services, holdout_tasks=[])
    asyncio.run(improve(house))
    pinned = [(r.policy_versions["planner"], r.policy_versions["writer"]) for r in services.played]
    assert all(writer == planner + 10 for planner, writer in pinned), "the set of versions is one thing"
    assert len(set(pinned)) > 2
    for row in rows_of(house):
        assert max(part["staleness"] for part in row["policies"].values()) <= 2
        assert row["conservation"]["dropped"].get("stale", 0) == 0


def test_a_resumed_run_gives_every_policy_the_same_batches_again(store: Store, tmp_path: Path) -> None:
    first = team_of(store, tmp_path, config_of(tmp_path, steps=3), holdout_tasks=[])
    asyncio.run(improve(first))
    longer = config_of(tmp_path, steps=4, checkpoint_every=100)
    again = replace(
        first, services=ScriptedServices(store, mixed(), asked=asked), progress=Said(), done_steps=1,
        folder=tmp_path / "again", carried=None,
        learners=[
            replace(one, config=longer.of(one.policy), backend=Recording(one.policy, one.base_version + 1))
            for one in first.learners
        ],
    )  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("leyden.loop.checkpoint", _nothing)
        asyncio.run(improve(again))
    assert isinstance(again.services, ScriptedServices)
    assert {r.step for r in again.services.played} == {3}, "recorded rollouts are not run again"
    for name, backend in given_to(again).items():
        for old, new in zip(given_to(first)[name].given[1:], backend.given, strict=False):
            assert [b.rollout_ids for b in old] == [b.rollout_ids for b in new]
            assert all(np.array_equal(a.credit_N, b.credit_N) for a, b in zip(old, new, strict=True))
            assert all(np.array_equal(a.weight_N, b.weight_N) for a, b in zip(old, new, strict=True))


async def _nothing(*args: Any, **kwargs: Any) -> None:
    """In place of a checkpoint."""


# The split of one rollout's calls among policies, as mathematics.

NAMES = ("planner", "writer", "judge")
_ROLLOUT = st.tuples(
    st.lists(st.tuples(st.sampled_from(NAMES), st.integers(1, 4), st.booleans()), max_size=5),
    st.sampled_from([0.0, 0.5, 1.0]),
    st.sampled_from([Outcome.COMPLETED, Outcome.COMPLETED, Outcome.AGENT_ERROR, Outcome.INFRA_ERROR]),
)


def traces_of(rollouts: Sequence[Any]) -> list[Trace]:
    made = []
    for r, (calls, reward, outcome) in enumerate(rollouts):
        own = [
            make_call(
                f"r{r}-c{c}", seq=c, policy=policy, completions=[tuple(range(40, 40 + num_tokens))],
                delivered=delivered, prompt=(1, 2, c + 3),
            )
            for c, (policy, num_tokens, delivered) in enumerate(calls)
        ]  # fmt: skip
        made.append(make_trace(f"r{r}", calls=own, reward=reward, outcome=outcome, group_id=f"g{r // 3}"))
    return made


def lessons_of(traces: Sequence[Trace], **learn: Any) -> list[Lesson]:
    config = config_of(Path(), **learn)
    learners = [Learner(config=config.of(name), backend=FakeBackend(name)) for name in ("planner", "writer")]
    return [asyncio.run(study(learner, 0, traces)) for learner in learners]


@given(rollouts=st.lists(_ROLLOUT, min_size=1, max_size=7))
@settings(max_examples=60, deadline=None)
def test_a_rollout_has_mass_one_for_every_policy_that_has_a_trained_token_in_it(rollouts: Sequence[Any]) -> None:
    traces = traces_of(rollouts)
    for lesson in lessons_of(traces, kl=0.1):  # with a KL term no token is left out for having no credit
        name = lesson.learner.policy
        tokens = {
            trace.rollout.id: sum(c.num_sampled for c in trace.calls if c.policy == name and c.delivered)
            for trace in traces
            if trace.rollout.outcome is not Outcome.INFRA_ERROR
        }
        assert set(lesson.credit.by_rollout) == set(tokens), "rollouts without a call of it are compared too"
        mass = dict.fromkeys(tokens, 0.0)
        labels = dict.fromkeys(tokens, 0)
        for one in lesson.batches:
            assert one.num_rollouts == len(tokens)
            rollout_N = one.rollout_A[one.action_N]
            for p, rollout_id in enumerate(one.rollout_ids):
                mass[rollout_id] += one.num_rollouts * float(one.weight_N[rollout_N == p].astype(np.float64).sum())
                labels[rollout_id] += int((rollout_N == p).sum())
        assert labels == tokens, "every token of its own calls, once"
        for rollout_id, num_tokens in tokens.items():
            assert mass[rollout_id] == pytest.approx(1.0 if num_tokens else 0.0, abs=1e-5)


@given(rollouts=st.lists(_ROLLOUT, min_size=1, max_size=7))
@settings(max_examples=40, deadline=None)
def test_the_books_of_all_policies_together_count_every_sampled_token_once(rollouts: Sequence[Any]) -> None:
    traces = traces_of(rollouts)
    lessons = lessons_of(traces)
    parts = {
        one.learner.policy: one.report(traces, one.learner.backend.update(one.batches, one.objective, 1))
        for one in lessons
    }
    books = step_report(config_of(Path()), 0, traces, parts, {"rollouts": 1.0})["conservation"]
    every = [(trace, call) for trace in traces for call in trace.calls]
    ours = [(t, c) for t, c in every if c.policy != "judge"]
    alive = [(t, c) for t, c in ours if c.delivered and t.rollout.outcome is not Outcome.INFRA_ERROR]
    assert books["sampled"] == sum(c.num_sampled for _, c in every)
    assert books["trained"] == sum(c.num_sampled for _, c in alive)
    wanted = {
        "not_trainable": sum(c.num_sampled for _, c in every if c.policy == "judge"),
        "undelivered": sum(c.num_sampled for _, c in ours if not c.delivered),
        "outcome": sum(c.num_sampled for t, c in ours if c.delivered and t.rollout.outcome is Outcome.INFRA_ERROR),
    }
    assert books["dropped"] == {reason: n for reason, n in wanted.items() if n}

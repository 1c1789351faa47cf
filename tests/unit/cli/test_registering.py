"""Where a run of several policies stands in the store."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.unit.test_loop import Said

from leyden.base.config import Config, from_tree
from leyden.base.errors import ConfigError
from leyden.base.records import PolicyVersion
from leyden.base.tasks import Demo
from leyden.cli.registering import Standing, load_version, register, take_up
from leyden.house import House, Learner, sft_steps
from leyden.store import Store, ledger, open_store
from leyden.testing.fake_backend import FakeBackend, ScriptedServices


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    opened = open_store(f"sqlite:///{tmp_path / 'leyden.db'}")
    yield opened
    opened.close()


def config_of(folder: Path) -> Config:
    policies = {"planner": {"model": "m"}, "writer": {"model": "m"}}
    return from_tree({"policies": policies, "learn": {"steps": 4}}, base_dir=folder)


def checkpoint(store: Store, folder: Path, run_id: str, name: str, step: int, *, whole: bool = True) -> None:
    policy, _, number = name.rpartition("@")
    path = folder / "checkpoints" / name
    path.mkdir(parents=True)
    (path / "leyden.json").write_text(json.dumps({"num_steps": step if whole else None}), encoding="utf-8")
    version = PolicyVersion(policy=policy, version=int(number), path=str(path), run_id=run_id, step=step)
    store.write(lambda connection: ledger.add_policy_version(connection, store, version)).result(10)


def start(store: Store, folder: Path, run_id: str) -> Standing:
    (folder / run_id).mkdir()
    return register(config_of(folder), store, run_id, folder / run_id, 0, False, {})


def resume(store: Store, folder: Path, run_id: str) -> Standing:
    return register(config_of(folder), store, run_id, folder / run_id, 0, True, {})


def test_a_run_sets_numbers_aside_for_every_policy(store: Store, tmp_path: Path) -> None:
    first, second = start(store, tmp_path, "run-1"), start(store, tmp_path, "run-2")
    assert set(first.bases) == set(second.bases) == {"planner", "writer"}
    assert all(second.bases[name] > first.bases[name] + 4 for name in first.bases)


def test_a_run_goes_on_from_the_last_step_that_every_policy_has_whole(store: Store, tmp_path: Path) -> None:
    bases = start(store, tmp_path, "run-1").bases
    assert resume(store, tmp_path, "run-1") == Standing(bases=bases)
    folder = tmp_path / "run-1"
    for step, whole in ((1, True), (2, True), (3, False)):
        checkpoint(store, folder, "run-1", f"planner@{bases['planner'] + step}", step)
        checkpoint(store, folder, "run-1", f"writer@{bases['writer'] + step}", step, whole=whole)
    checkpoint(store, folder, "run-1", f"planner@{bases['planner'] + 4}", 4)
    found = resume(store, tmp_path, "run-1")
    assert found == Standing(bases=bases, done_steps=2)
    learners = [Learner(config=config_of(tmp_path).of(n), backend=FakeBackend(n), base_version=bases[n]) for n in bases]
    assert [one.base_version for one in take_up(learners, found, folder)] == [bases["planner"], bases["writer"]]
    assert [one.backend.version - one.base_version for one in learners] == [2, 2]
    take_up(learners, Standing(bases=bases), folder)
    assert [one.backend.version - one.base_version for one in learners] == [0, 0]


def test_the_steps_of_the_policy_that_imitates_longest_stand_before_those_of_reinforcement(
    store: Store, tmp_path: Path
) -> None:
    policies = {"planner": {"model": "m"}, "writer": {"model": "m", "sft": {"batch_size": 1}}}
    tree = {"policies": policies, "sft": {"epochs": 1, "batch_size": 2}, "learn": {"steps": 4}}
    config, folder = from_tree(tree, base_dir=tmp_path), tmp_path / "run-1"
    folder.mkdir()
    demos = [Demo(task="t", messages=[], policy=name) for name in ("planner", "writer") for _ in range(3)]
    alone = [
        Learner(config=config.of(n), backend=FakeBackend(n), demos=[d for d in demos if d.policy == n])
        for n in policies
    ]
    assert [one.sft_steps for one in alone] == [2, 3] and sft_steps(alone) == 3
    bases = register(config, store, "run-1", folder, sft_steps(alone), False, {}).bases
    for name in policies:
        checkpoint(store, folder, "run-1", f"{name}@{bases[name] + 3}", 0)
    found = register(config, store, "run-1", folder, sft_steps(alone), True, {})
    assert found == Standing(bases=bases, sft_done=True, done_steps=0)
    assert [one.backend.version - bases[one.policy] for one in take_up(alone, found, folder)] == [3, 3]


def test_a_run_that_is_not_in_the_store_is_named(store: Store, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="run run-9 is not in the store"):
        resume(store, tmp_path, "run-9")


def house_of(store: Store, folder: Path) -> House:
    config = config_of(folder)
    learners = [Learner(config=config.of(name), backend=FakeBackend(name)) for name in config.trained]
    return House(
        learners=learners, run_id="eval", folder=folder, store=store,
        services=ScriptedServices(store, lambda _: 1.0), progress=Said(), train_tasks=[], holdout_tasks=[],
    )  # fmt: skip


def test_a_version_is_loaded_with_those_that_were_made_beside_it(store: Store, tmp_path: Path) -> None:
    bases = start(store, tmp_path, "run-1").bases
    for step in (1, 2):
        for name in bases:
            checkpoint(store, tmp_path / "run-1", "run-1", f"{name}@{bases[name] + step}", step)
    later = start(store, tmp_path, "run-2").bases
    house = house_of(store, tmp_path)
    for moment in (bases, {name: base + 2 for name, base in bases.items()}, later):
        load_version(house, moment["planner"])
        assert house.versions == moment


def test_a_version_without_one_beside_it_says_what_to_do(store: Store, tmp_path: Path) -> None:
    bases = start(store, tmp_path, "run-1").bases
    checkpoint(store, tmp_path / "run-1", "run-1", f"planner@{bases['planner'] + 1}", 1)
    with pytest.raises(ConfigError, match=r"made without policy 'writer'.*policies\.writer\.trainable = false"):
        load_version(house_of(store, tmp_path), bases["planner"] + 1)

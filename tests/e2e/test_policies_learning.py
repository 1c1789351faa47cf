"""Two policies with an adapter each and one that is frozen learn over one base model: no other process, no wire."""

import asyncio
import threading
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.e2e.team import build_loud_model
from tests.unit.test_loop import Said

from leyden.base.config import Config, from_tree
from leyden.base.records import FloatArray, IntArray, Rollout, RolloutState, Task
from leyden.house import House, Learner
from leyden.learning.backends.embedded import shared
from leyden.learning.backends.embedded.backend import EmbeddedBackend
from leyden.learning.backends.embedded.model import parameter_fingerprint
from leyden.learning.backends.embedded.requests import Delta, SamplingRequest
from leyden.loop import improve
from leyden.store import ledger, open_store, selections
from leyden.testing.fake_backend import ScriptedServices

NAMES = ("planner", "writer", "critic")
TASKS = [Task(id=f"t{i}", split="train", input={"word": f"{chr(97 + i)}{i}"}) for i in range(4)]


def share(text: str, low: str, high: str) -> float:
    return sum(low <= letter <= high for letter in text) / max(1, len(text))


class Direct(ScriptedServices):
    """A harness that asks the samplers directly: each policy once per rollout, all rollouts at once."""

    def __init__(self, store: Any, backends: Mapping[str, EmbeddedBackend]) -> None:
        super().__init__(store, self.reward, asked=lambda _: NAMES)
        self.backends = backends
        self.said: dict[tuple[str, str], tuple[IntArray, IntArray, FloatArray, str]] = {}
        self.shares: list[tuple[int, float, float]] = []

    def check(self) -> None:
        waiting = self._store.read(lambda c: selections.select_by_state(c, [RolloutState.QUEUING], 10_000))
        calls = [(rollout, name, *self._ask(rollout, name)) for rollout in waiting for name in NAMES]
        for rollout, name, prompt, found, done in calls:
            assert done.wait(60) and found[-1].error is None, found
            ids = np.asarray([i for delta in found for i in delta.ids], np.int32)
            logprobs = np.asarray([p for delta in found for p in delta.logprobs], np.float32)
            text = self.backends[name].loaded.decode(ids.tolist(), skip_special=True)
            self.said[rollout.id, name] = np.asarray(prompt, np.int32), ids, logprobs, text
        super().check()

    def _ask(self, rollout: Rollout, name: str) -> tuple[list[int], list[Delta], threading.Event]:
        backend, done = self.backends[name], threading.Event()
        found: list[Delta] = []

        def sink(delta: Delta) -> None:
            found.append(delta)
            if delta.finish_reason or delta.error:
                done.set()

        messages = [{"role": "system", "content": name}, {"role": "user", "content": rollout.task.input["word"]}]
        prompt = list(backend.chat.encode(messages).ids)
        wanted = rollout.policy_versions[name]
        backend.sampler.submit(
            SamplingRequest(prompt_ids=prompt, max_tokens=8, temperature=1.0, seed=rollout.seed, version=wanted), sink
        )
        return prompt, found, done

    def _said(self, rollout: Rollout, policy: str) -> tuple[IntArray, IntArray, FloatArray, str]:
        return self.said[rollout.id, policy]

    def reward(self, rollout: Rollout) -> float:
        letters = share(self.said[rollout.id, "planner"][3], "a", "z")
        capitals = share(self.said[rollout.id, "writer"][3], "A", "Z")
        self.shares.append((rollout.step or 0, letters, capitals))
        return 0.5 * letters + 0.5 * capitals


def config_of(folder: Path, **learn: Any) -> Config:
    one = {"model": "model", "dtype": "float32", "max_context": 128, "lora": {"rank": 8, "alpha": 16.0}}
    tree = {
        "policies": {
            "planner": one,
            "writer": {**one, "learn": {"algorithm": "reinforce_pp"}},
            "critic": {**one, "lora": None, "trainable": False},
        },
        "learn": {"group_size": 16, "tasks_per_step": 2, "steps": 12, "learning_rate": 6e-2, "grad_clip": 0.0,
                  "algorithm": "grpo", "checkpoint_every": 100, **learn},
        "eval": {"resamples": 100},
    }  # fmt: skip
    return from_tree(tree, base_dir=folder)


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_loud_model(tmp_path_factory.mktemp("policies") / "model").parent


@pytest.fixture
def backends(project: Path) -> Iterator[dict[str, EmbeddedBackend]]:
    config = config_of(project)
    policies = {name: one.model_copy(update={"model": str(project / "model")}) for name, one in config.policies.items()}
    made = shared.backends_of(policies, {name: config.of(name).learn for name in NAMES}, seed=0)
    yield made
    for backend in made.values():
        backend.close()


def house_of(config: Config, folder: Path, backends: Mapping[str, EmbeddedBackend]) -> House:
    store = open_store(f"sqlite:///{folder / 'leyden.db'}")
    learners = [Learner(config=config.of(name), backend=backends[name]) for name in config.trained]
    store.write(lambda connection: ledger.add_run(connection, store, "run-1", {}, {})).result(20)
    return House(
        learners=learners, run_id="run-1", folder=folder, store=store, frozen=config.frozen,
        services=Direct(store, backends), progress=Said(), train_tasks=TASKS, holdout_tasks=[],
    )  # fmt: skip


@pytest.mark.timeout(300)
def test_each_policy_learns_its_own_part_and_the_frozen_one_stays_bit_equal(
    project: Path, tmp_path: Path, backends: dict[str, EmbeddedBackend]
) -> None:
    config = config_of(project)
    assert config.trained == ("planner", "writer") and config.frozen == ("critic",)
    before = parameter_fingerprint(backends["critic"].loaded.model)
    house = house_of(config, tmp_path, backends)
    asyncio.run(improve(house))
    house.store.close()
    assert isinstance(house.services, Direct)

    def mean(column: int, steps: range) -> float:
        return float(np.mean([row[column] for row in house.services.shares if row[0] in steps]))  # type: ignore[attr-defined]

    for name, column in (("planner", 1), ("writer", 2)):
        start, end = mean(column, range(2)), mean(column, range(10, 12))
        assert end > start + 0.2, f"{name}: {start:.2f} at first, {end:.2f} in the end"
    assert parameter_fingerprint(backends["critic"].loaded.model) == before
    assert parameter_fingerprint(backends["planner"].loaded.causal.get_input_embeddings()) == parameter_fingerprint(
        backends["critic"].loaded.causal.get_input_embeddings()
    )
    assert {name: backend.version for name, backend in backends.items()} == {"planner": 12, "writer": 12, "critic": 0}


@pytest.mark.timeout(300)
def test_a_resumed_run_of_several_policies_is_bit_identical(
    project: Path, tmp_path: Path, backends: dict[str, EmbeddedBackend]
) -> None:
    config = config_of(project, steps=3, group_size=4, checkpoint_every=1, keep_checkpoints=3, kl=0.01)
    house = house_of(config, tmp_path, backends)
    asyncio.run(improve(house))
    assert isinstance(house.progress, Said)
    rows = {row["step"]: row for row in house.progress.rows}
    wanted = {name: parameter_fingerprint(backends[name].loaded.model) for name in NAMES}
    for name in config.trained:
        backends[name].load(tmp_path / "checkpoints" / f"{name}@1", 1, full=True)
        assert parameter_fingerprint(backends[name].loaded.model) != wanted[name]
    again = house_of_again(house)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("leyden.loop.checkpoint", _nothing)
        asyncio.run(improve(again))
    house.store.close()
    assert {name: parameter_fingerprint(backends[name].loaded.model) for name in NAMES} == wanted
    assert isinstance(again.progress, Said) and isinstance(again.services, Direct)
    assert again.services.said == {}, "nothing was sampled again"
    for row in again.progress.rows:
        for name in config.trained:
            old, new = rows[row["step"]]["policies"][name], row["policies"][name]
            assert {k: old[k] for k in ("loss", "grad_norm", "kl", "version")} == {
                k: new[k] for k in ("loss", "grad_norm", "kl", "version")
            }


def house_of_again(house: House) -> House:
    """The same run, gone on with after its first step."""
    assert isinstance(house.services, Direct)
    return replace(house, services=Direct(house.store, house.services.backends), progress=Said(), done_steps=1)


async def _nothing(*args: Any, **kwargs: Any) -> None:
    """In place of a checkpoint: those of the first process are registered already."""

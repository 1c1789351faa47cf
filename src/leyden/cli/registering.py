"""Where a run stands in the store: the versions that it starts from, and what it has done already."""

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from sqlalchemy import Connection

from leyden.base.config import Config, dump
from leyden.base.errors import ConfigError
from leyden.base.records import PolicyVersion
from leyden.house import House, Learner, sft_steps
from leyden.store import ledger, numbering
from leyden.store.base import Store


@dataclass(frozen=True, kw_only=True)
class Standing:
    """What of a run is behind it; nothing by default."""

    bases: Mapping[str, int] = field(default_factory=dict)
    """Version that each policy started from."""
    sft_done: bool = False
    """Whether the supervised stage is over."""
    done_steps: int = 0
    """Reinforcement steps that every policy has a checkpoint of."""


def start_version(connection: Connection, store: Store, policy: str, run_id: str, model: str, num_versions: int) -> int:
    """The number of the version that a new run starts from: names are never reused, whatever ran before.

    The `num_versions` that the run may make after it are set aside, so a run that starts while this one is stopped
    does not take them.
    """
    number = numbering.next_version(connection, store, policy, num_after=num_versions)
    version = PolicyVersion(policy=policy, version=number, path=model, run_id=run_id, created_at=time.time())
    ledger.add_policy_version(connection, store, version, stage="base")
    return number


def register(
    config: Config, store: Store, run_id: str, folder: Path, num_sft: int, resumed: bool, made_with: Mapping[str, str]
) -> Standing:
    """Write down a new run, or find where an old one stood. `num_sft`: versions that its supervised stage makes."""
    if resumed:
        return _where(config, store, run_id, folder, num_sft)
    (folder / "config.json").write_text(dump(config), encoding="utf-8")
    (folder / "versions.json").write_text(json.dumps(made_with, indent=2), encoding="utf-8")

    def start(connection: Connection) -> dict[str, int]:
        ledger.add_run(connection, store, run_id, json.loads(dump(config)), made_with, now=time.time())
        num_versions = 0 if config.learn.improves_prompts else num_sft + config.learn.steps
        return {
            policy: start_version(connection, store, policy, run_id, config.policies[policy].model, num_versions)
            for policy in config.trained
        }

    return Standing(bases=store.write(start).result(30))


def _where(config: Config, store: Store, run_id: str, folder: Path, num_sft: int) -> Standing:
    """The last step of which every policy of the run has a whole checkpoint."""
    bases: dict[str, int] = {}
    complete: list[set[int]] = []
    for policy in config.trained:
        known = store.read(lambda connection, name=policy: ledger.policy_versions(connection, name))  # type: ignore[misc]
        mine = [v for v in known if v.run_id == run_id]
        if not mine:
            raise ConfigError(f"run {run_id} is not in the store {store.url}; give the --config it was started with")
        base = bases[policy] = min(v.version for v in mine)
        complete.append(
            {v.version - base for v in mine if v.version > base and _can_resume(folder / "checkpoints" / v.name)}
        )
    # Versions of all policies advance together, one for each step.
    latest = max(set.intersection(*complete), default=0)
    if latest == 0:
        return Standing(bases=bases)
    return Standing(bases=bases, sft_done=config.sft is not None, done_steps=latest - num_sft)


def _can_resume(checkpoint: Path) -> bool:
    """Whether a checkpoint has the state of the optimizer; the manifest names it only while it is whole."""
    manifest = checkpoint / "leyden.json"
    return manifest.exists() and json.loads(manifest.read_text(encoding="utf-8")).get("num_steps") is not None


def take_up(learners: Sequence[Learner], standing: Standing, folder: Path) -> list[Learner]:
    """The policies with the versions they start from, every backend holding what it held when the run stood there."""
    num_sft = sft_steps(learners)
    begun = [replace(one, base_version=standing.bases[one.policy]) for one in learners]
    for learner in begun:
        version = learner.base_version + (num_sft if standing.sft_done else 0) + standing.done_steps
        if version == learner.base_version:
            learner.backend.serve_as(version)
        else:
            learner.backend.load(folder / "checkpoints" / f"{learner.policy}@{version}", version, full=True)
    return begun


def load_version(house: House, number: int) -> None:
    """Make the backend hold a registered version, and the policies trained beside it those of the same moment.

    Raises ConfigError when weights are gone, or when another policy has no version of that moment.
    """
    known = house.store.read(lambda connection: ledger.policy_versions(connection))
    rows: dict[str, dict[int, PolicyVersion]] = {}
    for one in known:
        rows.setdefault(one.policy, {})[one.version] = one
    wanted = rows.get(house.policy, {}).get(number)
    for learner in house.learners:
        mine = rows.get(learner.policy, {})
        version = number if learner.policy == house.policy else _of_moment(learner, mine, wanted)
        _load(learner, mine.get(version), version)


def _of_moment(learner: Learner, mine: Mapping[int, PolicyVersion], wanted: PolicyVersion | None) -> int:
    """The version of another policy that was made together with `wanted`."""
    if wanted is None:
        return 0
    found = [v for v in mine.values() if (v.run_id, v.step) == (wanted.run_id, wanted.step)]
    if not found:
        raise ConfigError(
            f"{wanted.name} was made without policy {learner.policy!r}, so there is no version to answer beside it; "
            f"set policies.{learner.policy}.trainable = false to use its model as it is"
        )
    return found[0].version


def _load(learner: Learner, row: PolicyVersion | None, number: int) -> None:
    if learner.backend.version == number and number != 0:
        return
    path: Any = row.path if row is not None else None
    if path is None or path == learner.config.policies[learner.policy].model:
        learner.backend.load_base(number)
    elif Path(path).is_dir():
        learner.backend.load(Path(path), number, full=False)
    else:
        raise ConfigError(f"the weights of {learner.policy}@{number} are gone: {path} is no folder")

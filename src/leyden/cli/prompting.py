"""What a prompt run needs beside a house: checks before anything starts, and the reflection model."""

import os
from collections.abc import Sequence
from typing import Any

from leyden.base.config import Config
from leyden.base.errors import ConfigError
from leyden.base.prompt_file import described, read_slots
from leyden.base.prompts import slots_from_json
from leyden.cli.wiring import LocalServices, tasks_of
from leyden.house import House
from leyden.learning.algorithms.prompts import OPTIMISERS
from leyden.learning.algorithms.prompts.reflection import Reflector
from leyden.prompt_loop import STAGE, check_reflection, diff_of, originals, split_tasks
from leyden.store import ledger

JOURNAL = "reflections.jsonl"
"""Replies of the reflection model, in the run folder."""


def check_prompts(config: Config) -> None:
    """ConfigError for what could never work, before a process is started."""
    read_slots(config.resolve(config.prompts.slots))
    train, val, _, _ = tasks_of(config)
    split_tasks(config, train, val)
    check_reflection(config)
    _key(config)


def reflection_of(house: House) -> Reflector | None:
    """The reflection model of a run, None where the algorithm needs none."""
    config = house.config
    if not OPTIMISERS[config.learn.algorithm].reflects:
        return None
    settings, services = config.prompts, house.services
    assert isinstance(services, LocalServices), "a run has the services that wiring gave it"
    own = bool(settings.reflection_base_url)
    return Reflector(
        settings,
        house.folder / JOURNAL,
        base_url=lambda: settings.reflection_base_url if own else services.client.url + "/v1",
        key=_key(config) if own else services.admin_key,
        model=settings.reflection_model if own else settings.reflection,
        stop_requested=house.stop_requested,
        check=lambda: None if own else services.check(),
    )


def _key(config: Config) -> str:
    name = config.prompts.reflection_key_env
    key = os.environ.get(name, "") if name else ""
    if name and not key:
        raise ConfigError(f"prompts.reflection_key_env names {name}, which is not set; export it, or remove the key")
    return key


def prompt_data(house: House, steps: Sequence[ledger.Step]) -> Any:
    """What the report shows of the search: its rounds, and the prompts before and after."""
    final = house.folder / "prompts" / "final.toml"
    slots = read_slots(final)
    versions = house.store.read(lambda connection: ledger.policy_versions(connection, house.policy))
    same = [v.name for v in versions if v.run_id == house.run_id and slots_from_json(v.prompts) == slots]
    return {
        "version": same[0] if same else "",
        "rounds": [{**step.report, "step": step.step + 1} for step in steps if step.stage == STAGE],
        "slots": [
            {"name": s.name, "where": described(s), "before": s.original.shown, "after": s.text.shown} for s in slots
        ],
        "diff": diff_of(originals(slots), slots, ("harness", "final")),
    }

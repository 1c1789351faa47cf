"""What a prompt run needs beside a house: checks before anything starts, and the reflection model."""

from collections.abc import Sequence
from typing import Any

from leyden.base.config import Config
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


def reflection_of(house: House) -> Reflector | None:
    """The reflection model of a run, None where the algorithm needs none."""
    config = house.config
    if not OPTIMISERS[config.learn.algorithm].reflects:
        return None
    settings, services = config.prompts, house.services
    assert isinstance(services, LocalServices), "a run has the services that wiring gave it"
    return Reflector(
        settings,
        house.folder / JOURNAL,
        base_url=lambda: services.client.url + "/v1",
        key=services.admin_key,
        model=settings.reflection,
        price=config.price_of(settings.reflection),
        stop_requested=house.stop_requested,
        check=services.check,
    )


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

"""`leyden eval`: a policy version on a split, with intervals; two versions, with a verdict."""

import asyncio
import dataclasses
import json
from typing import Any

import typer
from rich.console import Console

from leyden.base.errors import ConfigError, TaskError
from leyden.base.records import Verdict
from leyden.cli import wiring
from leyden.cli.progress import JsonProgress, TextProgress
from leyden.cli.verbs.options import DEFAULT_CONFIG, ConfigOption, JsonOption, SetOption, read_config
from leyden.house import House
from leyden.loop import evaluate
from leyden.release import evaluation, gate, holdout
from leyden.step_report import finite
from leyden.store import ledger

HELP = "Evaluate a policy version on a split; with --against, compare two on the same tasks and give a verdict."


def command(
    config: ConfigOption = DEFAULT_CONFIG,
    override: SetOption = None,
    version: str = typer.Option(
        "", "--version-of", metavar="POLICY@N", help="What to evaluate; the newest by default."
    ),
    against: str = typer.Option("", "--against", metavar="POLICY@N", help="Compare with this version."),
    split: str = typer.Option("holdout", "--split", help="holdout or val."),
    json_output: JsonOption = False,
) -> None:
    """Print pass@1 and mean reward with intervals, per domain, and the verdict."""
    settings = read_config(config, override)
    _, val, held, _ = wiring.tasks_of(settings)
    if not {"holdout": held, "val": val}.get(split):
        raise TaskError(f"there are no {split} tasks; set tasks.{split} in the configuration, or choose holdout or val")
    progress = JsonProgress() if json_output else TextProgress()
    stop = wiring.StopSignal()
    stop.install()
    with wiring.open_house(settings, progress, stop=stop, training=False) as house:
        policy = house.policy
        known = [v.version for v in house.store.read(lambda c: ledger.policy_versions(c, policy))]
        number = parse_version(version, policy, known) if version else max(known, default=0)
        numbers = [number] + ([parse_version(against, policy, known)] if against else [])
        results = asyncio.run(_evaluate(house, numbers, split))
        verdict = gate.compare(results[0], results[1]) if against else None
        looks = holdout.looks(house.store.read(lambda c: ledger.evaluations(c, fingerprint=results[0].fingerprint)))
    if json_output:
        print(
            json.dumps(
                {
                    "evaluations": [r.to_json() for r in results],
                    "verdict": None if verdict is None else _as_json(verdict),
                    "looks": looks,
                }
            )
        )
        return
    console = Console(highlight=False)
    for result in results:
        console.print(evaluation.table(result))
    if verdict:
        console.print(gate.explain(verdict), markup=False, soft_wrap=True)
    if split == "holdout":
        console.print(holdout.sentence(looks), markup=False, soft_wrap=True)


def _as_json(verdict: Verdict) -> dict[str, Any]:
    """Every field; an interval without an end has None there."""
    ends = {"low": finite(verdict.low), "high": finite(verdict.high)}
    return {**dataclasses.asdict(verdict), **ends}


def parse_version(text: str, policy: str, known: list[int]) -> int:
    """The number of `policy@N`. Raises ConfigError when it is not known."""
    name, _, number = text.rpartition("@")
    if name != policy or not number.isdigit() or int(number) not in known:
        listed = ", ".join(f"{policy}@{n}" for n in sorted(known)) or "none"
        raise ConfigError(f"no policy version {text!r}; known: {listed}")
    return int(number)


async def _evaluate(house: House, numbers: list[int], split: str) -> list[evaluation.Evaluation]:
    results = []
    for number in numbers:
        await house.services.hold()
        await asyncio.to_thread(wiring.load_version, house, number)
        await house.services.resume()
        tasks = house.holdout_tasks if split == "holdout" else house.val_tasks
        results.append(await evaluate(house, f"{split}-{number}", number, tasks, split=split))
    return results

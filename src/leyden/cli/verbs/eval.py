"""`leyden eval`: a policy version on a split, with intervals; two versions, with a verdict."""

import asyncio
import dataclasses
import json
import sys
from collections.abc import Sequence
from typing import Any

import typer
from rich.console import Console

from leyden.base.config import Config
from leyden.base.errors import ConfigError, StoreUnusable, TaskError
from leyden.base.records import Task, Verdict
from leyden.base.tasks import fingerprint
from leyden.cli import wiring
from leyden.cli.holdouts import plan_of
from leyden.cli.progress import JsonProgress, TextProgress
from leyden.cli.registering import load_version
from leyden.cli.verbs.options import DEFAULT_CONFIG, ConfigOption, JsonOption, SetOption, read_config
from leyden.house import House
from leyden.loop import evaluate, judge
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
    plan: bool = typer.Option(False, "--plan", help="Run nothing: say what these tasks can show."),
    effect: float = typer.Option(0.05, "--effect", help="With --plan: the difference of success rates hoped for."),
    json_output: JsonOption = False,
) -> None:
    """Print pass@1 and mean reward with intervals, per domain, and the verdict."""
    settings = read_config(config, override)
    tasks = tasks_to_judge(settings, split)
    if plan:
        show_plan(settings, tasks, effect, json_output)
        return
    progress = JsonProgress() if json_output else TextProgress()
    stop = wiring.StopSignal()
    stop.install()
    with wiring.open_house(settings, progress, stop=stop, training=False) as house:
        policy = house.policy
        known = [v.version for v in house.store.read(lambda c: ledger.policy_versions(c, policy))]
        number = parse_version(version, policy, known) if version else max(known, default=0)
        numbers = [number] + ([parse_version(against, policy, known)] if against else [])
        results = asyncio.run(evaluate_versions(house, numbers, split))
        seen = house.store.read(lambda c: ledger.evaluations(c, fingerprint=results[0].fingerprint))
        looks, rates = holdout.look_of(seen, house.run_id), settings.eval
        verdict = asyncio.run(judge(house, results[0], results[1])) if against else None
    if json_output:
        judged = None if verdict is None else _as_json(verdict)
        print(json.dumps({"evaluations": [r.to_json() for r in results], "verdict": judged, "looks": looks}))
        return
    console = Console(highlight=False)
    for result in results:
        console.print(evaluation.table(result))
        for line in evaluation.details(result):
            console.print(line, markup=False, soft_wrap=True)
    if verdict:
        console.print(gate.explain(verdict), markup=False, soft_wrap=True)
    if split == "holdout":
        console.print(holdout.sentence(looks, rates.level, rates.looks), markup=False, soft_wrap=True)


def tasks_to_judge(settings: Config, split: str) -> list[Task]:
    """The tasks of `split`. Raises TaskError when there are none, or it is not one to evaluate on."""
    _, val, held, _ = wiring.tasks_of(settings)
    tasks = {"holdout": held, "val": val}.get(split)
    if not tasks:
        raise TaskError(f"there are no {split} tasks; set tasks.{split} in the configuration, or choose holdout or val")
    return tasks


def show_plan(settings: Config, tasks: Sequence[Task], effect: float, json_output: bool) -> None:
    """What `tasks` can show at the error rate of the next look, and how many would be needed."""
    seen: list[ledger.StoredEvaluation] = []
    try:
        store = wiring.store_of(settings, create=False)
    except StoreUnusable as error:  # before the first run there is none
        print(f"Note: looks cannot be counted, so this is taken for the first: {error}", file=sys.stderr)
    else:
        seen = store.read(lambda connection: ledger.evaluations(connection, fingerprint=fingerprint(tasks)))
        store.close()
    look = holdout.look_of(seen, None)
    found = plan_of(settings, len(tasks), look, effect)
    if json_output:
        tree = None if found is None else {**dataclasses.asdict(found), "hopeless": found.hopeless}
        print(json.dumps({"look": look, "plan": tree}))
        return
    lines = [] if found is None else found.sentences()
    for line in [*lines, holdout.sentence(look, settings.eval.level, settings.eval.looks)]:
        print(line)


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


async def evaluate_versions(house: House, numbers: list[int], split: str) -> list[evaluation.Evaluation]:
    """Each version on the split, one after the other, through the house as in a run."""
    results = []
    for number in numbers:
        await house.services.hold()
        await asyncio.to_thread(load_version, house, number)
        await house.services.resume()
        tasks = house.holdout_tasks if split == "holdout" else house.val_tasks
        results.append(await evaluate(house, f"{split}-{number}", number, tasks, split=split))
    return results

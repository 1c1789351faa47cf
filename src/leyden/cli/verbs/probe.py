"""`leyden probe`: try to earn the reward without doing the task."""

import dataclasses
import json

import typer
from rich.console import Console
from rich.table import Table

from leyden.base.errors import ConfigError, TaskError
from leyden.cli import wiring
from leyden.cli.progress import JsonProgress, TextProgress
from leyden.cli.verbs.options import DEFAULT_CONFIG, ConfigOption, JsonOption, SetOption, read_config
from leyden.rewards.probes import probes_of
from leyden.rewards.probes.base import Probe, ProbeResult

HELP = "Try to earn the reward without doing the task: empty and constant answers, forged results, tampered tests."


def command(
    config: ConfigOption = DEFAULT_CONFIG,
    override: SetOption = None,
    only: list[str] = typer.Option([], "--only", metavar="PROBE", help="Run this probe; may be given more than once."),
    quick: bool = typer.Option(False, "--quick", help="Only the probes that run before training."),
    tasks: int = typer.Option(0, "--tasks", min=0, help="Tasks per probe; 0 is probes.tasks of the configuration."),
    listing: bool = typer.Option(False, "--list", help="Show the probes and run none."),
    json_output: JsonOption = False,
) -> None:
    """Print what each probe earned. Exit status 1 when one won more than its bound."""
    settings = read_config(config, override)
    probes = probes_of(settings, only, quick=quick)
    if listing:
        _list(probes, json_output)
        return
    if not settings.rewards.verifier and not settings.rewards.judge.policy:
        raise ConfigError("there is nothing to probe: rewards.verifier is not set")
    train, val, _, _ = wiring.tasks_of(settings)
    if not train and not val:
        raise TaskError("probes need tasks; set tasks.train (holdout tasks are not used for this)")
    if tasks:
        settings = settings.model_copy(update={"probes": settings.probes.model_copy(update={"tasks": tasks})})
    progress = JsonProgress() if json_output else TextProgress()
    wiring.raise_open_files()
    from leyden.cli import probing

    results = probing.run_probes(settings, train or val, probes, progress)
    _show(results, json_output)
    if any(result.won for result in results):
        raise typer.Exit(1)


def _list(probes: list[Probe], json_output: bool) -> None:
    if json_output:
        print(json.dumps([{"probe": p.name, "says": p.says, "kind": p.kind, "quick": p.quick} for p in probes]))
        return
    table = Table("probe", "what it does", "kind", "before training", box=None)
    for probe in probes:
        table.add_row(probe.name, probe.says, probe.kind, "yes" if probe.quick else "no")
    Console(highlight=False).print(table)


def _show(results: list[ProbeResult], json_output: bool) -> None:
    if json_output:
        print(
            json.dumps({"won": [r.name for r in results if r.won], "probes": [dataclasses.asdict(r) for r in results]})
        )
        return
    console = Console(highlight=False)
    table = Table("probe", "what it did", "earned", "bound", "tries", "", box=None)
    for result in results:
        earned = "not judged" if result.score is None else f"{result.score:.0%}"
        table.add_row(
            result.name,
            result.says,
            earned,
            f"{result.bound:.0%}",
            str(result.num_judged),
            "WON" if result.won else "",
            style="red" if result.won else None,
        )
    console.print(table)
    for result in results:
        if result.won or result.score is None:
            console.print(f"{result.name}: {result.why}", markup=False, soft_wrap=True)
    num_won = sum(result.won for result in results)
    console.print(
        f"{num_won} of {len(results)} probes won: the reward can be had without doing the task."
        if num_won
        else f"None of {len(results)} probes won.",
        soft_wrap=True,
    )

"""`leyden train`: the whole loop on this machine."""

import asyncio
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import typer

from leyden.base.config import Config, load, origins
from leyden.base.errors import ConfigError
from leyden.base.tasks import fingerprint
from leyden.cli import wiring
from leyden.cli.external import is_external
from leyden.cli.finish import finish
from leyden.cli.holdouts import plan_of
from leyden.cli.models import source_of
from leyden.cli.progress import JsonProgress, TextProgress
from leyden.cli.prompting import check_prompts, reflection_of
from leyden.cli.trackers import MetricsWriter
from leyden.cli.verbs.options import DEFAULT_CONFIG, ConfigOption, JsonOption, SetOption, read_config
from leyden.house import House
from leyden.learning import algorithms
from leyden.learning.explain import explain as explained
from leyden.learning.explain import text
from leyden.loop import improve
from leyden.prompt_loop import improve_prompts
from leyden.release import holdout
from leyden.store import ledger

HELP = "Improve a policy (its weights, or its prompts): evaluate, learn, evaluate again, judge, report."


def command(
    config: ConfigOption = DEFAULT_CONFIG,
    override: SetOption = None,
    resume: Path = typer.Option(
        None, "--resume", metavar="RUN_FOLDER", help="Go on with a run that was stopped.", file_okay=False
    ),
    explain: bool = typer.Option(
        False, "--explain", help="Print what would be minimised and where each number comes from; train nothing."
    ),
    json_output: JsonOption = False,
) -> None:
    """Print progress, the verdict and the path of the report."""
    settings = resumed_config(resume, override or []) if resume else read_config(config, override)
    if explain:
        path = resume / "config.json" if resume else config
        found = explanations(settings, origins(path, override or []))
        if json_output:
            typer.echo(json.dumps(found if len(found) > 1 else found[settings.learn.policy]))
            return
        for name, one in found.items():
            typer.echo((f"== policy {name} ==\n\n" if len(found) > 1 else "") + text(one))
        return
    progress = JsonProgress() if json_output else TextProgress()
    progress.done(train(settings, progress, resume=resume))


def explanations(settings: Config, origin_of: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """What is minimised for each policy that is trained, and where its numbers come from."""
    found = {}
    for name in settings.trained:
        own = settings.of(name)
        prefix = f"policies.{name}.learn."
        mine = {k.removeprefix(f"policies.{name}."): v for k, v in origin_of.items() if k.startswith(prefix)}
        surrogate = algorithms.surrogate_of(own.learn, algorithms.make(own.learn, own.base_dir))
        found[name] = explained(own, {**origin_of, **mine}, surrogate)
    return found


def say_plan(house: House) -> None:
    """Say before the run what its holdout can show."""
    if not house.holdout_tasks:
        return
    tasks = house.holdout_tasks
    seen = house.store.read(lambda c: ledger.evaluations(c, fingerprint=fingerprint(tasks)))
    found = plan_of(house.config, len(tasks), holdout.look_of(seen, house.run_id))
    for line in found.sentences()[:2] if found else ("The planned looks at this holdout are used up (eval.looks).",):
        house.progress.say(f"Holdout: {line}")


def resumed_config(folder: Path, overrides: Sequence[str] = ()) -> Config:
    """The configuration that a run was started with; only its budget may be changed.

    Raises ConfigError when the folder is no run, or for another override.
    """
    if foreign := [one for one in overrides if not one.strip().startswith("budget.")]:
        raise ConfigError(
            f"--resume goes on with the configuration of the run; --set can change its budget only, not {foreign[0]!r}"
        )
    path = folder / "config.json"
    if not path.exists():
        raise ConfigError(f"{folder} is not the folder of a run: it has no config.json")
    return load(path, overrides)


def train(settings: Config, progress: TextProgress | JsonProgress, *, resume: Path | None = None) -> dict[str, Any]:
    """Run the loop, write the report and say the verdict; returns the summary."""
    stop = wiring.StopSignal(
        on_first=lambda: progress.say("Stopping after the work in hand; Ctrl-C again ends at once.")
    )
    stop.install()
    wiring.raise_open_files()
    if settings.learn.improves_prompts:
        check_prompts(settings)
    for name in (*settings.trained, *settings.frozen):
        if name in settings.policies and not is_external(settings, name):
            source_of(settings, name)  # before anything is run that a wrong path would make vain
    tasks = None
    if resume is None and settings.learn.steps:
        from leyden.cli import probing  # gateway and runner at once: only a run that probes waits for their import

        tasks = wiring.tasks_of(settings)
        probing.before_training(settings, tasks[0], progress, stop.check)
    folder = resume.resolve() if resume else None
    with wiring.open_house(settings, progress, resume=folder, stop=stop, tasks=tasks) as house:
        progress.say(f"Run {house.run_id}: everything about it is in {house.folder}")
        say_plan(house)
        writer = MetricsWriter(house.folder)
        progress.sink = writer.write
        try:
            if settings.learn.improves_prompts:
                improvement = asyncio.run(improve_prompts(house, reflection_of(house)))
            else:
                improvement = asyncio.run(improve(house))
        finally:
            writer.close()
        return finish(house, improvement)

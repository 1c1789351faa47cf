"""`leyden train`: the whole loop on this machine."""

import asyncio
from pathlib import Path

import typer

from leyden.base.config import Config, load
from leyden.base.errors import ConfigError
from leyden.cli import wiring
from leyden.cli.finish import finish
from leyden.cli.progress import JsonProgress, TextProgress
from leyden.cli.trackers import MetricsWriter
from leyden.cli.verbs.options import DEFAULT_CONFIG, ConfigOption, JsonOption, SetOption, read_config
from leyden.loop import Improvement, improve

HELP = "Improve a policy: evaluate, imitate demonstrations, reinforce, evaluate again, judge, report."


def command(
    config: ConfigOption = DEFAULT_CONFIG,
    override: SetOption = None,
    resume: Path = typer.Option(
        None, "--resume", metavar="RUN_FOLDER", help="Go on with a run that was stopped.", file_okay=False
    ),
    json_output: JsonOption = False,
) -> None:
    """Print progress, the verdict and the path of the report."""
    settings = resumed_config(resume) if resume else read_config(config, override)
    if resume and override:
        raise ConfigError("--resume goes on with the configuration of the run; --set cannot change it")
    progress = JsonProgress() if json_output else TextProgress()
    train(settings, progress, resume=resume)


def resumed_config(folder: Path) -> Config:
    """The configuration that a run was started with. Raises ConfigError when the folder is no run."""
    path = folder / "config.json"
    if not path.exists():
        raise ConfigError(f"{folder} is not the folder of a run: it has no config.json")
    return load(path)


def train(
    settings: Config, progress: TextProgress | JsonProgress, *, resume: Path | None = None
) -> tuple[Improvement, Path]:
    """Run the loop and write the report; (what came out, path of the report)."""
    stop = wiring.StopSignal(
        on_first=lambda: progress.say("Stopping after the work in hand; Ctrl-C again ends at once.")
    )
    stop.install()
    wiring.raise_open_files()
    if resume is None and settings.learn.steps:
        from leyden.cli import probing  # gateway and runner at once: only a run that probes waits for their import

        probing.before_training(settings, wiring.tasks_of(settings)[0], progress, stop.check)
    with wiring.open_house(settings, progress, resume=resume.resolve() if resume else None, stop=stop) as house:
        progress.say(f"Run {house.run_id}: everything about it is in {house.folder}")
        writer = MetricsWriter(house.folder)
        progress.sink = writer.write
        try:
            improvement = asyncio.run(improve(house))
        finally:
            writer.close()
        return improvement, finish(house, improvement)

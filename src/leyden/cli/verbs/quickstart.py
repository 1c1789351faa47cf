"""`leyden quickstart`: the flagship example, small, from nothing to a verdict."""

import shutil
import time
from pathlib import Path

import typer

from leyden.base.config import load
from leyden.base.errors import ConfigError
from leyden.cli import models
from leyden.cli.progress import JsonProgress, TextProgress
from leyden.cli.verbs.options import JsonOption, SetOption
from leyden.cli.verbs.train import train

HELP = "See it work: an unmodified agent learns SQL on a real small model on this machine, and the gain is proved."

INTRODUCTION = """\
Leyden quickstart: an agent that it does not know learns to write SQL.

The agent (harness.py) is an ordinary script that uses the openai package. It asks a model for a query, runs it,
and shows an error back once. Leyden stands at the model API, records every token, checks each answer on two
databases, trains the model behind the API, and then asks questions about databases that were never seen.

What happens now, and about how long it takes on two cores:
  1. tasks are generated                                       a few seconds
  2. the model, SmolLM2-135M-Instruct, is fetched              under a minute, the first time only
     the reward is probed: can it be had without SQL?          under half a minute
  3. the untrained model is tried on the holdout tasks         a minute
  4. it imitates 64 approved demonstrations                    half a minute
  5. and is tried again                                        half a minute
  6. it tries tasks, is rewarded, and learns                   two to three minutes
  7. it is tried a last time, and the verdict is given         half a minute
"""


def command(
    folder: Path = typer.Option(Path("leyden-quickstart"), "--dir", help="Working folder.", file_okay=False),
    model: str = typer.Option("", "--model", help="Use this model folder, hub id or GGUF file instead."),
    override: SetOption = None,
    json_output: JsonOption = False,
) -> None:
    """Print what happens at each moment, the verdict, and the path of the report."""
    progress = JsonProgress() if json_output else TextProgress()
    progress.say(INTRODUCTION)
    started = time.monotonic()
    folder = folder.resolve()
    copy_example("text_to_sql", folder)
    generate(folder)
    path = model or str(models.smollm2(progress))
    settings = load(folder / "quickstart.toml", [f'policies.main.model="{path}"', *(override or [])])
    summary = train(settings, progress)
    progress.say(f"The whole quickstart took {(time.monotonic() - started) / 60:.1f} minutes.")
    progress.say(f"To go further: leyden train -c {folder / 'full.toml'} -s policies.main.model={path}")
    progress.done(summary)


def example_folder(name: str) -> Path:
    """Where a shipped example lies: inside the installed package, or in a checkout. Raises ConfigError."""
    package = Path(__file__).resolve().parents[2]
    for candidate in (package / "examples" / name, package.parents[1] / "examples" / name):
        if candidate.is_dir():
            return candidate
    raise ConfigError(f"the example {name!r} is not part of this installation; clone the project to get it")


def copy_example(name: str, folder: Path) -> None:
    """Copy the example's own files; what a reader changed in the copy is kept."""
    source = example_folder(name)
    folder.mkdir(parents=True, exist_ok=True)
    for item in sorted(source.rglob("*")):
        relative = item.relative_to(source)
        if item.is_file() and item.suffix in {".py", ".toml", ".md"} and not (folder / relative).exists():
            (folder / relative).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(item, folder / relative)


def generate(folder: Path) -> None:
    """Make the tasks with the example's own generator, in a process of its own."""
    import subprocess
    import sys

    if (folder / "data" / "tasks" / "holdout.jsonl").exists():
        return
    made = subprocess.run(
        [sys.executable, "generate.py", "--out", "data"], cwd=folder, capture_output=True, text=True, timeout=300
    )
    if made.returncode:
        raise ConfigError(f"{folder / 'generate.py'} failed: {made.stderr.strip()[-800:]}")

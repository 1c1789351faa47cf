"""`leyden doctor`: is everything as it should be, before money is spent?"""

import dataclasses
import json

import typer
from rich.console import Console
from rich.text import Text

from leyden.base.findings import ORDER, Finding, worst
from leyden.cli import doctor
from leyden.cli.progress import JsonProgress, TextProgress
from leyden.cli.verbs.options import DEFAULT_CONFIG, ConfigOption, JsonOption, SetOption, read_config

HELP = "Examine tasks, harness, verifier, store, model and one dry rollout; each finding says why and what to do."
STYLE = {"ok": "green", "note": "cyan", "warning": "yellow", "problem": "bold red"}


def command(
    config: ConfigOption = DEFAULT_CONFIG,
    override: SetOption = None,
    model: bool = typer.Option(True, "--model/--no-model", help="Load the model and try one task; else files only."),
    json_output: JsonOption = False,
) -> None:
    """Print one finding after another; exit status 1 when one of them is a problem."""
    settings = read_config(config, override)
    console = Console(highlight=False, soft_wrap=True)
    found: list[Finding] = []
    for finding in doctor.examine(settings, JsonProgress() if json_output else TextProgress(), model=model):
        found.append(finding)
        if not json_output:
            _show(console, finding)
    counts = {level: sum(finding.level == level for finding in found) for level in ORDER}
    if json_output:
        print(json.dumps({"event": "done", "findings": [dataclasses.asdict(f) for f in found], "counts": counts}))
    else:
        console.print(", ".join(f"{number} {level}" for level, number in counts.items() if number))
    if worst(found) == "problem":
        raise typer.Exit(1)


def _show(console: Console, finding: Finding) -> None:
    console.print(Text.assemble((f"{finding.level:>8}", STYLE[finding.level]), f"  {finding.name}: {finding.what}"))
    for word, text in (("why", finding.why), ("do", finding.do)):
        if text and finding.level != "ok":
            console.print(Text(f"          {word}: {text}"))

"""`leyden VERB`: the words of the loop on the command line.

Each verb lives in a file of its own; this one only collects them and turns errors into one clear message. The
import of a verb is light: torch is loaded by the verbs that train or sample, when they start to.
"""

import importlib
import os
import sys

import typer
from rich.console import Console

import leyden
from leyden.base.errors import ConfigError, Interrupted, LeydenError, TaskError

VERBS = (
    "init",
    "quickstart",
    "doctor",
    "serve",
    "run",
    "probe",
    "train",
    "eval",
    "compare",
    "diagnose",
    "costs",
    "prompts",
    "tasks",
    "inspect",
    "label",
    "judge",
    "export",
)
"""Order of `leyden --help`: the order in which a newcomer meets them."""

app = typer.Typer(
    name="leyden",
    help="Improve AI agents you already run: record their model calls, train the policy behind them, prove the gain.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


@app.callback(invoke_without_command=True)
def _root(version: bool = typer.Option(False, "--version", help="Print the version and exit.")) -> None:
    if version:
        typer.echo(leyden.__version__)
        raise typer.Exit


for _verb in VERBS:
    _module = importlib.import_module(f"leyden.cli.verbs.{_verb}")
    app.command(_verb, help=_module.HELP)(_module.command)
importlib.import_module("leyden.cli.verbs.engine").register(app)


def main() -> None:
    """Entry point. Exit status: 0 done, 1 failed, 2 wrong usage or configuration, 130 stopped by the user."""
    console = Console(stderr=True, highlight=False)
    try:
        app(standalone_mode=True)
    except (ConfigError, TaskError) as error:
        console.print(f"leyden: {error}", style="red", markup=False, soft_wrap=True)
        sys.exit(2)
    except (Interrupted, KeyboardInterrupt) as error:
        console.print(f"leyden: {error or 'stopped'}", markup=False, soft_wrap=True)
        sys.exit(130)
    except LeydenError as error:
        if os.environ.get("LEYDEN_DEBUG"):
            raise
        console.print(f"leyden: {error}", style="red", markup=False, soft_wrap=True)
        sys.exit(1)


if __name__ == "__main__":
    main()

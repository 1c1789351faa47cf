"""Options that several verbs share, declared once so that they read the same everywhere."""

from pathlib import Path
from typing import Annotated

import typer

from leyden.base.config import Config, load

ConfigOption = Annotated[
    Path, typer.Option("--config", "-c", help="Configuration file.", show_default=True, dir_okay=False)
]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", "-s", metavar="SECTION.KEY=VALUE", help="Override a key; may be given more than once."),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON for programs instead of text for people.")]
ReadyFile = Annotated[Path | None, typer.Option("--ready-file", hidden=True)]

DEFAULT_CONFIG = Path("leyden.toml")


def read_config(path: Path, overrides: list[str] | None) -> Config:
    """The configuration with its overrides. Raises ConfigError."""
    return load(path, overrides or [])

"""Writes docs/configuration.md and docs/cli.md from the code. A test fails when they differ from it.

    .venv/bin/python scripts/docs.py            write
    .venv/bin/python scripts/docs.py --check    exit with 1 and the name of the file that is out of date
"""

import sys
from pathlib import Path

import click
import typer.main

from leyden.base import config
from leyden.cli.main import VERBS, app

DOCS = Path(__file__).resolve().parents[1] / "docs"


def configuration() -> str:
    """Every key with its type, default and meaning, from the docstrings of `base/config.py`."""
    lines = [
        "# Configuration",
        "",
        "One TOML file, by default `leyden.toml`. Unknown keys are errors. `--set section.key=value` overrides a key for one",
        "call; paths are relative to the file. This page is made from `src/leyden/base/config.py` by `scripts/docs.py`.",
        "",
    ]
    section = ""
    for key, meaning in config.known_keys().items():
        head, _, name = key.rpartition(".")
        if head != section:
            section = head
            lines += ["", f"## `[{head}]`", "", "| key | default | meaning |", "|---|---|---|"]
        default = config.default_of(key)
        text = " ".join(meaning.split()).replace("|", "\\|")
        lines.append(f"| `{name}` | {f'`{default}`' if default != '' else ''} | {text} |")
    return "\n".join(lines) + "\n"


def cli() -> str:
    """Every verb with its options, from the help that it prints."""
    lines = [
        "# Command line",
        "",
        "`leyden VERB --help` prints the same. Exit status: 0 done, 1 failed, 2 wrong usage or configuration, 130 stopped by the",
        "user. This page is made from `src/leyden/cli/verbs` by `scripts/docs.py`.",
    ]
    group = typer.main.get_command(app)
    assert isinstance(group, click.Group)
    for verb in VERBS:
        command = group.commands[verb]
        context = click.Context(command, info_name=verb, parent=click.Context(group, info_name="leyden"))
        lines += ["", f"## `leyden {verb}`", "", command.help or "", "", "| option | meaning |", "|---|---|"]
        for parameter in command.params:
            record = parameter.get_help_record(context)
            if record:
                lines.append(f"| `{record[0].replace('|', '/')}` | {record[1].replace('|', '/')} |")
            elif isinstance(parameter, click.Argument):
                lines.append(f"| `{parameter.human_readable_name}` | {getattr(parameter, 'help', '') or ''} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    """Write, or check with `--check`."""
    pages = {"configuration.md": configuration(), "cli.md": cli()}
    if "--check" in sys.argv:
        stale = [n for n, text in pages.items() if not (DOCS / n).exists() or (DOCS / n).read_text("utf-8") != text]
        if stale:
            print(f"out of date: {', '.join(stale)}; run scripts/docs.py")
        return bool(stale)
    for name, text in pages.items():
        (DOCS / name).write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())

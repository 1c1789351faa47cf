"""Writes docs/configuration.md and docs/cli.md from the code. A test fails when they differ from it.

.venv/bin/python scripts/docs.py            write
.venv/bin/python scripts/docs.py --check    exit with 1 and the name of the file that is out of date
"""

import importlib
import inspect
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, get_args, get_origin

import typer.models

from leyden.base import config
from leyden.cli.main import VERBS

DOCS = Path(__file__).resolve().parents[1] / "docs"


def configuration() -> str:
    """Every key with its type, default and meaning, from the docstrings of `base/config.py`."""
    lines = [
        "# Configuration",
        "",
        "One TOML file, by default `leyden.toml`. Unknown keys are errors. `--set section.key=value`",
        "overrides a key for one call; the value is read as TOML, and as a plain string where that fails.",
        "Paths are relative to the file.",
        "",
        "This page is made from `src/leyden/base/config.py` by `scripts/docs.py`.",
    ]
    sections: dict[str, list[tuple[str, str]]] = {}  # a table may stand between the keys of another one
    for key, meaning in config.known_keys().items():
        head = key.rpartition(".")[0]
        sections.setdefault(head, []).append((key, meaning))
    for head, keys in sections.items():
        lines += ["", f"## `[{head}]`", "", "| key | default | meaning |", "|---|---|---|"]
        for key, meaning in keys:
            default = config.default_of(key)
            text = " ".join(meaning.split()).replace("|", "\\|")
            shown = f"`{default}`" if default != "" else ""
            lines.append(f"| `{key.rpartition('.')[2]}` | {shown} | {text} |")
    return "\n".join(lines) + "\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One argument or option of a verb, as its function declares it."""

    names: tuple[str, ...]
    """`--config`, `-c`; for an argument its name in capitals."""
    value: str
    """What stands for its value; empty for a flag."""
    default: object
    """As declared; `...` where a value is needed."""
    meaning: str
    """Its help."""


def options(verb: str) -> list[Option]:
    """Every argument and shown option of a verb, in its order, from the signature of its function.

    Not from the command object that typer makes of it: that belongs to click or to typer's copy of click,
    depending on typer's version.
    """
    function = importlib.import_module(f"leyden.cli.verbs.{verb}").command
    found = []
    for parameter in inspect.signature(function).parameters.values():
        annotation, default = parameter.annotation, parameter.default
        info = default
        declared: tuple[str, ...] = ()
        if get_origin(annotation) is Annotated:
            annotation, info = get_args(annotation)[:2]
            # typer keeps the first name where a default would stand
            declared = (info.default,) if isinstance(info.default, str) else ()
        elif isinstance(info, typer.models.ParameterInfo):
            default = info.default
        assert isinstance(info, typer.models.ParameterInfo), f"{verb}: {parameter.name} is no typer option"
        if info.hidden:
            continue
        if isinstance(info, typer.models.ArgumentInfo):
            names: tuple[str, ...] = ((info.metavar or parameter.name.upper()).strip("[]"),)
            value = ""
        else:
            given = (*declared, *(info.param_decls or ()))
            names = tuple(name for one in given for name in one.split("/"))
            kind = {str: "TEXT", int: "N"}.get(annotation, "PATH")
            value = "" if annotation is bool else info.metavar or kind
        found.append(Option(names=names, value=value, default=default, meaning=info.help or ""))
    return found


def _row(option: Option) -> str:
    names = ", ".join(option.names) + (f" {option.value}" if option.value else "")
    default = option.default
    if default is ...:
        said = " Needed."
    elif default in (None, "", False) or (default is True and len(option.names) == 1):
        said = ""
    else:
        said = f" Default: `{option.names[0] if default is True else default}`."
    return f"| `{names}` | {option.meaning.replace('|', '/')}{said} |"


def cli() -> str:
    """Every verb with its options, from the declarations that its help is printed from."""
    lines = [
        "# Command line",
        "",
        "`leyden VERB --help` says the same. Exit status: 0 done, 1 failed, 2 wrong usage or configuration,",
        "130 stopped by the user. `LEYDEN_DEBUG=1` shows the traceback of an error that ends with 1.",
        "This page is made from `src/leyden/cli/verbs` by `scripts/docs.py`.",
    ]
    for verb in VERBS:
        module = importlib.import_module(f"leyden.cli.verbs.{verb}")
        lines += ["", f"## `leyden {verb}`", "", module.HELP, "", "| option | meaning |", "|---|---|"]
        lines += [_row(option) for option in options(verb)]
    return "\n".join(lines) + "\n"


def pages() -> dict[str, str]:
    """Name of each made page, and what it must hold."""
    return {"configuration.md": configuration(), "cli.md": cli()}


def stale() -> list[str]:
    """Made pages that differ from the code or are not there."""
    return [
        name
        for name, text in pages().items()
        if not (DOCS / name).exists() or (DOCS / name).read_text(encoding="utf-8") != text
    ]


def main() -> int:
    """Write, or check with `--check`."""
    if "--check" in sys.argv:
        found = stale()
        if found:
            print(f"out of date: {', '.join(found)}; run scripts/docs.py")
        return bool(found)
    DOCS.mkdir(exist_ok=True)
    for name, text in pages().items():
        (DOCS / name).write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())

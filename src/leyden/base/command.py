"""How a command line from the configuration is read, what of our own environment it may see, and how `file.py:name`
is loaded.

Needs the standard library only: it is imported by the processes of a harness and of a verifier. Pure but for looking
which files exist and for importing the user's file. The rules, exactly:

- The line is split into words as a POSIX shell splits it and started directly, without a shell. If it holds,
  outside single quotes, any of the characters ``| & ; < > ( ) $ ` * ? [ ~ #`` or a line break, or begins with
  ``NAME=value``, it is given to ``/bin/sh -c`` instead.
- ``{input.field}`` (deeper: ``{input.a.b}``) is replaced by that field of the task: a string as it is,
  anything else as JSON. It is always one word, or part of one, whatever it contains. For a shell it is
  quoted, so there it must not stand inside quotes of the line.
- ``python`` or ``python3`` as the program is the interpreter that runs Leyden.
- A word that names an existing file relative to the folder (`harness.cwd`) becomes its absolute path; a word
  with a ``/`` may also name a folder. The part after ``=`` of ``--option=path`` is treated the same way.
  Options, other words and everything from a task stay as they are.
- A program with a ``/`` is looked for relative to the folder, another one on PATH and then in the folder.
"""

import importlib.util
import json
import os
import re
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from leyden.base.errors import HarnessError

if TYPE_CHECKING:
    from leyden.base.config import Config

_PLACEHOLDER = re.compile(r"\{input((?:\.[A-Za-z0-9_-]+)+)\}")
_SHELL_CHARS = frozenset("|&;<>()$`*?[~#\n")
_ASSIGNMENT = re.compile(r"\s*[A-Za-z_]\w*=")
# A word of a shell line outside quotes, and whether it stands where a program is expected.
_SHELL_WORD = re.compile(
    r"""(?P<skip>'[^']*'|"(?:\\.|[^"\\])*"|\\.)|(?P<word>[^\s|&;<>()$`"'\\*?\[{}#~]+)""", re.DOTALL
)
_PYTHON = ("python", "python3")


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A checked command line; `argv(input)` makes the words for one task."""

    template: str
    """The line of the configuration."""
    words: Sequence[str]
    """Words with paths resolved and placeholders left; for a shell: `/bin/sh`, `-c` and the line."""
    shell: bool
    """Whether a shell reads it."""

    def argv(self, task_input: Mapping[str, Any]) -> list[str]:
        """The words to start. Raises HarnessError when a field is missing."""
        if not self.shell:
            return [fill(word, task_input, self.template) for word in self.words]
        line = _PLACEHOLDER.sub(lambda match: shlex.quote(_field(match, task_input, self.template)), self.words[2])
        return [*self.words[:2], line]


def parse_command(template: str, folder: Path, key: str = "harness.command") -> Command:
    """Read a command line by the rules above. Raises HarnessError that names `key` and the command."""
    if not template.strip():
        raise HarnessError(f"{key} is empty; set it to the command line that starts the program")
    if "\0" in template:
        raise HarnessError(f"{key} = {template!r} holds a NUL character")
    if _needs_shell(template, key):
        return Command(template=template, words=("/bin/sh", "-c", _shell_line(template, folder)), shell=True)
    try:
        words = shlex.split(template)
    except ValueError as error:
        raise HarnessError(f"{key} = {template!r} cannot be split into words: {error}") from None
    program = _program(words[0], folder, key, template)
    return Command(template=template, words=(program, *(_resolve(word, folder) for word in words[1:])), shell=False)


def fill(text: str, task_input: Mapping[str, Any], where: str) -> str:
    """`text` with `{input.field}` replaced, unquoted. Raises HarnessError when a field is missing."""
    return _PLACEHOLDER.sub(lambda match: _field(match, task_input, where), text)


def has_placeholder(text: str) -> bool:
    """Whether `text` depends on the task."""
    return _PLACEHOLDER.search(text) is not None


def clean_environment(config: "Config", environ: Mapping[str, str]) -> dict[str, str]:
    """`environ` without what is ours: LEYDEN_*, AGL_*, the administrator's key and the keys of engines."""
    secret = {config.gateway.admin_key_env} | {p.engine_key_env for p in config.policies.values()}
    return {
        name: value
        for name, value in environ.items()
        if name not in secret and not name.startswith(("LEYDEN_", "AGL_"))
    }


def load_named(file: str, name: str) -> Any:
    """`name` of the Python file `file`, a function or a class, with the file's folder first on the path.

    The file becomes a module under its own name. What it raises while it is imported goes through; ImportError when
    it is no Python file or has nothing to call under that name.
    """
    folder = str(Path(file).parent)
    if sys.path[:1] != [folder]:
        sys.path.insert(0, folder)
    spec = importlib.util.spec_from_file_location(Path(file).stem, file)
    if spec is None or spec.loader is None:
        raise ImportError(f"{file} cannot be imported as Python")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    found = getattr(module, name, None)
    if not callable(found):
        own = [
            n
            for n, value in vars(module).items()
            if callable(value) and getattr(value, "__module__", None) == spec.name and not n.startswith("_")
        ]
        raise ImportError(f"{file} has no function {name!r}; it has: {', '.join(own) or 'none'}")
    return found


def _field(match: re.Match[str], task_input: Mapping[str, Any], where: str) -> str:
    value: Any = task_input
    for part in match.group(1)[1:].split("."):
        if not isinstance(value, Mapping) or part not in value:
            known = ", ".join(map(str, value)) if isinstance(value, Mapping) else f"no fields in {value!r}"
            raise HarnessError(
                f"{where!r} asks for {match.group(0)}, but the task's input has no {part!r}; it has: {known}"
            )
        value = value[part]
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    if "\0" in text:
        raise HarnessError(f"{match.group(0)} of the task holds a NUL character, which no command line can carry")
    return text


def _needs_shell(template: str, key: str) -> bool:
    bare = _PLACEHOLDER.sub("x", template)
    if any(char in _SHELL_CHARS for char in re.sub(r"'[^']*'", "", bare)):
        quoted = "".join(m.group("skip") for m in _SHELL_WORD.finditer(template) if m.group("skip"))
        if has_placeholder(quoted):
            raise HarnessError(
                f"{key} = {template!r} needs a shell and has {{input...}} inside quotes; "
                "take the quotes away: the value is quoted for the shell anyway"
            )
        return True
    return _ASSIGNMENT.match(bare) is not None


def _program(word: str, folder: Path, key: str, template: str) -> str:
    if word in _PYTHON:
        return sys.executable
    if has_placeholder(word):
        raise HarnessError(f"{key} = {template!r}: the program itself cannot come from the task")
    if "/" not in word:
        found = shutil.which(word)
        if found is not None:
            return os.path.abspath(found)
        if not (folder / word).is_file():
            raise HarnessError(
                f"{key} = {template!r}: no program {word!r} on PATH and no such file in {folder}; "
                "install it or mend the command"
            )
    path = (folder / Path(word).expanduser()).absolute()
    if not path.is_file():
        raise HarnessError(f"{key} = {template!r}: no file {path}; relative paths are read from {folder}")
    if not os.access(path, os.X_OK):
        hint = f"write `python {word}`" if word.endswith(".py") else f"run `chmod +x {path}`"
        raise HarnessError(f"{key} = {template!r}: {path} is not executable; {hint}")
    return str(path)


def _resolve(word: str, folder: Path) -> str:
    if word.startswith("-"):
        option, equals, value = word.partition("=")
        return f"{option}={_resolve(value, folder)}" if equals and value and not value.startswith("-") else word
    if not word or has_placeholder(word) or len(word) > 4096:
        return word
    path = folder / word
    try:
        known = path.is_file() or ("/" in word and path.is_dir())
    except OSError:  # a word that cannot be a path, for example a name that is too long
        return word
    return str(path.absolute()) if known else word


def _shell_line(template: str, folder: Path) -> str:
    pieces: list[str] = []
    end = 0
    program_next = True
    for match in _SHELL_WORD.finditer(template):
        between = template[end : match.start()]
        program_next = program_next or any(char in "|&;(\n" for char in between)
        pieces.append(between)
        word = match.group("word")
        joined = bool(end) and not between  # part of a longer word, such as a quoted one
        if word is None or joined or template[match.end() : match.end() + 1] in ("'", '"', "{", "$"):
            pieces.append(match.group(0))
            program_next = False
        elif program_next and word in _PYTHON:
            pieces.append(shlex.quote(sys.executable))
            program_next = False
        else:
            resolved = _resolve(word, folder)
            pieces.append(word if resolved == word else shlex.quote(resolved))
            program_next = program_next and _ASSIGNMENT.match(word) is not None
        end = match.end()
    return "".join(pieces) + template[end:]

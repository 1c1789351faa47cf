"""The file of slots that people read and edit: TOML, one table per slot; JSON is read too.

Promises: what `write_slots` wrote, `read_slots` reads back to equal slots, character by character. Texts stand as
multi-line strings that begin on the line after the quotes.
"""

import json
import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from leyden.base.errors import ConfigError
from leyden.base.prompts import Slot, slots_from_json

HEADER = """\
# Slots of a prompt policy. `original` is how Leyden recognises the text in the harness's calls; `text` is what the
# model reads instead (without it, the original). {name} is a part that varies; {{ and }} are literal braces. `where` is
# system, user, tool or prompt; with `part = true` the original is a part of the message and not all of it.
"""

_ESCAPED = re.compile(r'["\\]|[\x00-\x08\x0b-\x1f\x7f]')


def read_slots(path: Path) -> tuple[Slot, ...]:
    """The slots of a file, in its order. Raises ConfigError."""
    try:
        text = path.read_text(encoding="utf-8")
        tree = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except FileNotFoundError:
        raise ConfigError(
            f"there is no file of slots {path}; write one with `leyden prompts discover`, or set prompts.slots"
        ) from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    slots = tree.get("slots") if isinstance(tree, dict) else None
    if not isinstance(slots, Mapping) or not slots or set(tree) != {"slots"}:
        raise ConfigError(f"{path} holds no slots; write a table [slots.NAME] with `original` for each")
    return slots_from_json(slots)


def write_slots(path: Path, slots: Sequence[Slot], notes: Mapping[str, str] | None = None) -> None:
    """Write slots; `notes` by name become comments. Raises ConfigError for text that no file can hold."""
    parts = [HEADER]
    for slot in slots:
        lines = [f"[slots.{slot.name}]", f"where = {_short(slot.where)}"]
        if notes and slot.name in notes:
            lines.insert(0, f"# {notes[slot.name]}")
        if slot.tool:
            lines.append(f"tool = {_short(slot.tool)}")
        if slot.part:
            lines.append("part = true")
        lines.append(f"original = {_long(slot.original.text)}")
        if slot.text != slot.original:
            lines.append(f"text = {_long(slot.text.text)}")
        parts.append("\n".join(lines) + "\n")
    try:
        path.write_text("\n".join(parts), encoding="utf-8")
    except UnicodeEncodeError as error:
        raise ConfigError(f"{path}: a text holds half a character ({error}) and cannot be written") from error


def as_text(slots: Sequence[Slot]) -> str:
    """Slots as plain text for people: literal braces single, one heading per slot."""
    return "\n".join(f"## {slot.name} ({described(slot)})\n\n{slot.text.shown}\n" for slot in slots)


def described(slot: Slot) -> str:
    """Where a slot stands, in words."""
    names = {"system": "system message", "user": "user message", "prompt": "prompt"}
    place = f"description of tool {slot.tool or 'any'}" if slot.where == "tool" else names[slot.where]
    return f"part of a {place}" if slot.part else place


def _short(text: str) -> str:
    return json.dumps(text)


def _long(text: str) -> str:
    """A multi-line basic string; the newline after the quotes does not count."""
    escaped = _ESCAPED.sub(_escape, text)
    return f'"""\n{escaped}"""'


def _escape(found: "re.Match[str]") -> str:
    character: Any = found[0]
    return f"\\{character}" if character in '"\\' else f"\\u{ord(character):04x}"

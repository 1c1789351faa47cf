"""Slots of a prompt policy: texts recognised in the traffic of a harness, and other texts put in their place. Pure.

A slot is known by its original text, a template (`leyden.base.templates`). It stands in one kind of place: a system or
developer message (`system`), a user message (`user`), the description of a tool (`tool`), or the text of a Completions
call (`prompt`). It is all of that text, or a part of it. Its new text is put there, with the placeholders filled from
what was matched.

Promises: `substitute` changes nothing but what a slot matched, and never its argument; with the original texts it
changes nothing at all; a slot that fits twice and two slots that fit one text are conflicts, by name, never guessed.
Knows every wire shape by its fields: messages, top-level `system` and `instructions`, text blocks, both forms of tools.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Literal, get_args

from leyden.base.errors import ConfigError
from leyden.base.templates import Match, Template

Where = Literal["system", "user", "tool", "prompt"]
Path = tuple[str | int, ...]

_ROLES: Mapping[str, Where] = {"system": "system", "developer": "system", "user": "user"}


@dataclass(frozen=True, slots=True)
class Place:
    """A text of a request."""

    path: Path
    """Keys that lead to it."""
    where: Where
    """Kind of the place."""
    text: str
    """What stands there."""
    tool: str = ""
    """Name of the tool that it describes."""

    @property
    def name(self) -> str:
        """For example `messages[0].content`."""
        return name_of(self.path)


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """One text that may be replaced. Made by `make_slot`."""

    name: str
    """Letters, digits, `_` and `-`."""
    original: Template
    """What the harness sends."""
    text: Template
    """What the engine reads instead."""
    where: Where = "system"
    """Kind of place."""
    tool: str = ""
    """With `where = "tool"`: name of the tool; empty is any."""
    part: bool = False
    """Whether the original is a part of the text and not all of it."""

    def with_text(self, text: Template) -> "Slot":
        """The same slot with another text. Raises ConfigError for one that cannot be filled."""
        _check_text(self, text)
        return replace(self, text=text)


@dataclass(frozen=True, slots=True, kw_only=True)
class Substitution:
    """What slots do to one request."""

    texts: Mapping[Path, str]
    """The new text of every place that changes."""
    filled: Sequence[str]
    """Slots that were found."""
    changed: Sequence[str]
    """Those of them whose text differs from what was there."""
    unmatched: Sequence[str]
    """Slots that were not found; a harness that makes several kinds of calls has some in each."""
    conflicts: Sequence[str]
    """What could not be decided, one sentence each; then nothing may be replaced."""


def make_slot(
    name: str, original: str, text: str | None = None, *, where: str = "system", tool: str = "", part: bool = False
) -> Slot:
    """A checked slot from texts as `Template.parse` reads them. Raises ConfigError."""
    if not name or not name.replace("_", "").replace("-", "").isalnum() or not name.isascii():
        raise ConfigError(f"slot name {name!r} cannot be used; take letters, digits, '_' and '-'")
    if where not in get_args(Where):
        raise ConfigError(f"slots.{name}.where is {where!r}; it is one of {', '.join(get_args(Where))}")
    if tool and where != "tool":
        raise ConfigError(f'slots.{name}.tool is {tool!r} with where = "{where}"; only a tool description has a tool')
    known = Template.parse(original, f"slots.{name}.original")
    new = known if text is None else Template.parse(text, f"slots.{name}.text")
    slot = Slot(name=name, original=known, text=known, where=where, tool=tool, part=part)  # type: ignore[arg-type]
    _check_original(slot)
    return slot.with_text(new)


def slots_to_json(slots: Sequence[Slot]) -> dict[str, Any]:
    """The form in which a policy version keeps its slots."""
    return {
        slot.name: {
            "original": slot.original.text,
            "text": slot.text.text,
            "where": slot.where,
            "tool": slot.tool,
            "part": slot.part,
        }
        for slot in slots
    }


def slots_from_json(tree: Mapping[str, Any]) -> tuple[Slot, ...]:
    """Back from `slots_to_json`. Raises ConfigError for an unknown key or a value of the wrong type."""
    found = []
    for name, fields in tree.items():
        if not isinstance(fields, Mapping):
            raise ConfigError(f"slots.{name} is {fields!r}; it must be a table with `original`")
        unknown = sorted(set(fields) - {"original", "text", "where", "tool", "part"})
        if unknown:
            raise ConfigError(f"slots.{name} has unknown keys {unknown}; known: original, text, where, tool, part")
        for key, kind in (("original", str), ("text", str), ("where", str), ("tool", str), ("part", bool)):
            if not isinstance(fields.get(key, kind()), kind):
                raise ConfigError(f"slots.{name}.{key} is {fields[key]!r}; it must be a {kind.__name__}")
        if not fields.get("original"):
            raise ConfigError(f"slots.{name}.original is missing; it is the text by which the slot is recognised")
        found.append(make_slot(name, **fields))
    return tuple(found)


def places(body: Mapping[str, Any]) -> Iterator[Place]:
    """Every text of a request that a slot could stand in, in order."""
    for key in ("system", "instructions"):
        yield from _texts((key,), body.get(key), "system")
    prompt = body.get("prompt")
    if isinstance(prompt, str):
        yield Place(("prompt",), "prompt", prompt)
    for key in ("messages", "input"):
        messages = body.get(key)
        for index, message in enumerate(messages if isinstance(messages, list) else ()):
            role = message.get("role") if isinstance(message, dict) else None
            if isinstance(role, str) and role in _ROLES:
                yield from _texts((key, index, "content"), message.get("content"), _ROLES[role])
    tools = body.get("tools")
    for index, tool in enumerate(tools if isinstance(tools, list) else ()):
        if not isinstance(tool, dict):
            continue
        inner = tool.get("function")
        at: Path = ("tools", index)
        at, tool = ((*at, "function"), inner) if isinstance(inner, dict) else (at, tool)
        if isinstance(tool.get("description"), str):
            yield Place((*at, "description"), "tool", tool["description"], str(tool.get("name") or ""))


def substitute(body: Mapping[str, Any], slots: Sequence[Slot]) -> Substitution:
    """Find every slot in a request and say what it becomes."""
    found: list[tuple[Slot, Place, Match]] = []
    unmatched, conflicts = [], []
    seen = list(places(body))
    for slot in slots:
        hits = [
            (place, match)
            for place in seen
            if place.where == slot.where and slot.tool in ("", place.tool)
            for match in slot.original.matches(place.text, whole=not slot.part)
        ]
        if not hits:
            unmatched.append(slot.name)
        elif len(hits) == 1:
            found.append((slot, *hits[0]))
        else:
            named = " and ".join(dict.fromkeys(place.name for place, _ in hits))
            twice = "in two ways" if " and " not in named else "each"
            conflicts.append(f"slot {slot.name!r} matches {named} {twice}")
    found.sort(key=lambda hit: (hit[1].name, hit[2].start, hit[2].end))
    for (one, place, match), (other, next_place, next_match) in pairwise(found):
        if place.path == next_place.path and next_match.start < match.end:
            conflicts.append(f"slots {one.name!r} and {other.name!r} match the same text of {place.name}")
    texts: dict[Path, str] = {}
    changed = []
    for slot, place, match in reversed(found):  # from the right, so that earlier indices stay true
        before = texts.get(place.path, place.text)
        new = slot.text.fill(match.values)
        if new != before[match.start : match.end]:
            changed.append(slot.name)
            texts[place.path] = before[: match.start] + new + before[match.end :]
    return Substitution(
        texts={} if conflicts else texts,
        filled=sorted(slot.name for slot, _, _ in found),
        changed=[] if conflicts else sorted(changed),
        unmatched=unmatched,
        conflicts=conflicts,
    )


def put(body: Mapping[str, Any], texts: Mapping[Path, str]) -> dict[str, Any]:
    """A request with other texts at some places; `body` stays as it is."""
    new = dict(body)
    for path, text in texts.items():
        inside: Any = new
        for key in path[:-1]:
            inside[key] = inside[key].copy()
            inside = inside[key]
        inside[path[-1]] = text
    return new


def name_of(path: Path) -> str:
    """A path as text, for example `tools[0].function.description`."""
    return "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in path).lstrip(".")


def as_read(request: Mapping[str, Any], texts: Mapping[str, str]) -> dict[str, Any]:
    """A recorded request with the recorded texts (by the name of their place) that the engine read instead."""
    return put(request, {place.path: texts[place.name] for place in places(request) if place.name in texts})


def _texts(path: Path, content: object, where: Where) -> Iterator[Place]:
    """A content that is text, or a list of blocks with text."""
    if isinstance(content, str):
        yield Place(path, where, content)
    for index, block in enumerate(content if isinstance(content, list) else ()):
        if isinstance(block, dict) and isinstance(block.get("text"), str):
            yield Place((*path, index, "text"), where, block["text"])


def _check_original(slot: Slot) -> None:
    what, known = f"slots.{slot.name}.original", slot.original
    if len(set(known.names)) < len(known.names):
        twice = next(name for name in known.names if known.names.count(name) > 1)
        raise ConfigError(f"{what} has {{{twice}}} twice; give each varying part its own name")
    if any(not between for between in known.literals[1:-1]):
        raise ConfigError(f"{what} has two placeholders side by side, which cannot be told apart; make them one")
    if not any(literal.strip() for literal in known.literals):
        raise ConfigError(f"{what} has no text of its own and would match everything; write what stays the same")
    if slot.part and not (known.literals[0] and known.literals[-1]):
        raise ConfigError(
            f"{what} is a part of a text, so it has to begin and end with text and not with a placeholder"
        )
    _check_braces(slot, known, what)


def _check_text(slot: Slot, text: Template) -> None:
    unknown = sorted(set(text.names) - set(slot.original.names))
    if unknown:
        known = ", ".join(f"{{{name}}}" for name in slot.original.names) or "none"
        raise ConfigError(
            f"slots.{slot.name}.text uses {{{unknown[0]}}}, which its original does not have (known: {known}); "
            "double the braces if they are meant literally"
        )
    _check_braces(slot, text, f"slots.{slot.name}.text")
    if not text.fill(dict.fromkeys(text.names, "x")).strip():
        raise ConfigError(f"slots.{slot.name}.text is empty; a model would read nothing there")


def _check_braces(slot: Slot, text: Template, what: str) -> None:
    """A text that is shown with single braces has to be readable again."""
    for name in slot.original.names:
        if any(f"{{{name}}}" in literal for literal in text.literals):
            raise ConfigError(
                f"{what} has {{{name}}} both as a placeholder and as literal text; rename the placeholder"
            )

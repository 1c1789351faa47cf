"""Slots found in recorded requests: texts that stay the same, and templates of texts that nearly do. Pure.

Where a text repeats a field of its task's input, that is a placeholder named after the field. Texts of one kind of
place (system messages; descriptions of one tool) that differ are then aligned word by word: what all of them share
stays, what differs becomes a placeholder. Two texts that occur in one attempt belong to different agents of the harness
and are not aligned unless they are almost equal.

Promises: a slot that is found matches, in exactly one way, every text it was made from, and fits once into every
request; what could not be decided is said in `left_out`.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from typing import Any

from leyden.base.prompts import Place, Slot, make_slot, places, substitute
from leyden.base.templates import Template

MAX_TEXTS = 300
"""Distinct texts of one kind that are aligned; alignment is quadratic, and more show nothing new."""
MAX_ALIGNED = 4000
"""Words of a text up to which the middle of two texts is aligned; longer ones share their ends only."""
MIN_RUN = 12
"""Characters (without spaces) that texts must share in one piece to be one slot: less is chance, like "You are a"."""
MIN_BETWEEN = 4
"""Characters between two placeholders; less is found in the values as well and says nothing about where they end."""
ALMOST = 0.8
"""Share of the shorter text that two texts of one attempt must have in common to be one slot."""
MIN_FIELD = 4
"""Characters of an input field that is looked for in texts; a shorter one occurs by chance."""
MAX_INPUTS = 50
"""Inputs that are kept per distinct text."""
_WORD = re.compile(r"\w+|\s+|[^\w\s]")

Tokens = list[str | None]
"""Words of a template; None is a placeholder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sighting:
    """One recorded request."""

    body: Mapping[str, Any]
    """As an engine would read it."""
    attempt: str
    """Whose it is."""
    input: Mapping[str, Any] = field(default_factory=dict)
    """Of the task."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Discovery:
    """What was found."""

    slots: Sequence[Slot]
    """Ready for a file."""
    notes: Mapping[str, str]
    """By slot: where and how often it was seen, and what varies."""
    left_out: Sequence[str]
    """What looked like a slot and is none, and why."""


@dataclass(slots=True)
class _Text:
    """One distinct text."""

    text: str
    calls: int = 0
    attempts: set[str] = field(default_factory=set)
    inputs: list[Mapping[str, Any]] = field(default_factory=list)

    def fields(self) -> dict[str, str]:
        """Input fields that the text repeats, once each, for every task that sent it."""
        found = {}
        for key in self.inputs[0] if self.inputs else ():
            values = {str(given.get(key, "")).strip() for given in self.inputs}
            value = min(values)
            if len(values) == 1 and _size(value) >= MIN_FIELD and self.text.count(value) == 1:
                found[key] = value
        return found

    def tokens(self) -> Tokens:
        """Its words, with a placeholder for each such field."""
        pieces: list[str | None] = [self.text]
        for value in sorted(self.fields().values(), key=lambda value: (-len(value), value)):
            for number, piece in enumerate(pieces):
                if piece is not None and value in piece:
                    before, _, after = piece.partition(value)
                    pieces[number : number + 1] = [before, None, after]
                    break
        words = [[None] if piece is None else _WORD.findall(piece) for piece in pieces]
        return _tidy([word for some in words for word in some])


@dataclass(slots=True)
class _Cluster:
    """Texts that are one slot."""

    tokens: Tokens
    members: list[_Text]

    @property
    def attempts(self) -> set[str]:
        return set().union(*(member.attempts for member in self.members))


def discover(sightings: Sequence[Sighting]) -> Discovery:
    """The slots of the system messages and tool descriptions in recorded requests."""
    left_out: list[str] = []
    slots: list[Slot] = []
    notes: dict[str, str] = {}
    for (where, tool), texts in _collected(sightings, left_out).items():
        if len(texts) > MAX_TEXTS:
            left_out.append(f"{len(texts) - MAX_TEXTS} of {len(texts)} distinct {where} texts were not looked at")
        clusters = _clusters(sorted(texts.values(), key=lambda one: -one.calls)[:MAX_TEXTS])
        for number, cluster in enumerate(clusters, 1):
            base = "tool_" + re.sub(r"\W", "_", tool, flags=re.ASCII) if tool else where
            name = base if len(clusters) == 1 else f"{base}_{number}"
            template = _template(cluster)
            if not any(literal.strip() for literal in template.literals):
                left_out.append(f"{sum(m.calls for m in cluster.members)} {where} texts are wholly the task's own")
                continue
            slots.append(make_slot(name, template.text, where=where, tool=tool))
            notes[name] = _note(cluster, template)
    kept = _without_conflicts(slots, sightings, left_out)
    return Discovery(slots=kept, notes={slot.name: notes[slot.name] for slot in kept}, left_out=left_out)


def _collected(sightings: Iterable[Sighting], left_out: list[str]) -> dict[tuple[str, str], dict[str, _Text]]:
    """Distinct texts by kind of place and tool."""
    found: dict[tuple[str, str], dict[str, _Text]] = {}
    broken = 0
    for sighting in sightings:
        for place in places(sighting.body):
            if place.where not in ("system", "tool") or not place.text.strip():
                continue
            if not _is_utf8(place):
                broken += 1
                continue
            kind = found.setdefault((place.where, place.tool), {})
            text = kind.setdefault(place.text, _Text(place.text))
            text.calls += 1
            if len(text.inputs) < MAX_INPUTS:
                text.inputs.append(sighting.input)
            text.attempts.add(sighting.attempt)
    if broken:
        left_out.append(f"{broken} texts hold half a character and cannot be written to a file")
    return found


def _is_utf8(place: Place) -> bool:
    try:
        place.text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _clusters(texts: Sequence[_Text]) -> list[_Cluster]:
    """Texts that belong together, the most frequent first."""
    clusters: list[_Cluster] = []
    for text in texts:
        words = text.tokens()
        for cluster in clusters:
            merged = _aligned(cluster.tokens, words)
            if _is_one_slot(cluster, text, merged):
                cluster.tokens = merged
                cluster.members.append(text)
                break
        else:
            clusters.append(_Cluster(words, [text]))
    return clusters


def _is_one_slot(cluster: _Cluster, text: _Text, merged: Tokens) -> bool:
    if max((_size(run) for run in _runs(merged)), default=0) < MIN_RUN:
        return False
    if cluster.attempts.isdisjoint(text.attempts):
        return True
    shorter = min(_size(text.text), *(_size(member.text) for member in cluster.members))
    return _size("".join(word or "" for word in merged)) >= ALMOST * shorter


def _aligned(one: Tokens, other: Tokens) -> Tokens:
    """What both share, in order, with a placeholder where they differ."""
    start = 0
    while start < min(len(one), len(other)) and one[start] == other[start] and one[start] is not None:
        start += 1
    end = 0
    while end < min(len(one), len(other)) - start and one[-1 - end] == other[-1 - end] and one[-1 - end] is not None:
        end += 1
    left, right = one[start : len(one) - end], other[start : len(other) - end]
    middle: Tokens = []
    if left or right:
        middle = _middle(left, right) if max(len(left), len(right)) <= MAX_ALIGNED else [None]
    return _tidy([*one[:start], *middle, *one[len(one) - end :]])


def _middle(left: Tokens, right: Tokens) -> Tokens:
    shared: Tokens = []
    done_left = done_right = 0
    for block in SequenceMatcher(None, left, right, autojunk=False).get_matching_blocks():
        if block.a > done_left or block.b > done_right:
            shared.append(None)
        shared += left[block.a : block.a + block.size]
        done_left, done_right = block.a + block.size, block.b + block.size
    return shared


def _tidy(tokens: Tokens) -> Tokens:
    """Placeholders side by side, or with next to nothing between them, become one."""
    tidy: Tokens = []
    last = -1  # place of the last placeholder
    for word in tokens:
        if word is None and last >= 0 and _size("".join(w or "" for w in tidy[last + 1 :])) < MIN_BETWEEN:
            del tidy[last + 1 :]
            continue
        tidy.append(word)
        if word is None:
            last = len(tidy) - 1
    return tidy


def _runs(tokens: Tokens) -> list[str]:
    """Literal pieces between placeholders."""
    runs = [""]
    for word in tokens:
        if word is None:
            runs.append("")
        else:
            runs[-1] += word
    return runs


def _size(text: str) -> int:
    return sum(not character.isspace() for character in text)


def _template(cluster: _Cluster) -> Template:
    """A template that fits every member in exactly one way."""
    literals = _runs(cluster.tokens)
    while True:
        template = Template(tuple(literals), tuple(f"part_{i + 1}" for i in range(len(literals) - 1)))
        if len(literals) <= 2 or all(len(template.matches(m.text, whole=True)) == 1 for m in cluster.members):
            break
        # A short literal is the likeliest to be found inside a value as well.
        shortest = min(range(1, len(literals) - 1), key=lambda i: len(literals[i]))
        del literals[shortest]
    return _named(cluster, template)


def _named(cluster: _Cluster, template: Template) -> Template:
    """Placeholders named after the input fields that they repeat."""
    names: list[str] = []
    for name in template.names:
        fields = None
        for member in cluster.members:
            value = template.matches(member.text, whole=True)[0].values[name].strip()
            given = member.inputs[0] if member.inputs else {}
            same = {key for key in given if str(given[key]).strip() == value and key.isidentifier()}
            fields = same if fields is None else fields & same
        free = sorted((fields or set()) - set(names))
        literal = "".join(template.literals)
        names.append(next((key for key in free if key.isascii() and f"{{{key}}}" not in literal), name))
    taken = "".join(template.literals)
    return Template(template.literals, tuple(n if f"{{{n}}}" not in taken else f"{n}_" for n in names))


def _note(cluster: _Cluster, template: Template) -> str:
    calls = sum(member.calls for member in cluster.members)
    said = f"seen in {calls} calls of {len(cluster.attempts)} attempts"
    for name in template.names:
        values = {template.matches(member.text, whole=True)[0].values[name] for member in cluster.members}
        example = " ".join(min(values, key=len).split())[:40]
        said += f"; {{{name}}} has {len(values)} values, for example {example!r}"
    return said


def _without_conflicts(slots: Sequence[Slot], sightings: Sequence[Sighting], left_out: list[str]) -> list[Slot]:
    """Slots that fit at most once into every request."""
    kept = list(slots)
    for sighting in sightings:
        while conflicts := substitute(sighting.body, kept).conflicts:
            # Of two that fit one text the later one goes: the other was made from more frequent texts and fits too.
            bad = [slot for slot in kept if f"{slot.name!r}" in conflicts[0]][-1]
            kept.remove(bad)
            left_out.append(f"{conflicts[0]}, so {bad.name!r} is left out: {bad.original.shown[:60]!r}")
    return kept

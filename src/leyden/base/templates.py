"""Texts with `{placeholders}`: read, recognised in other texts, and filled. Pure.

The rule of braces, the same wherever a template is written: `{name}` is a placeholder, `{{` and `}}` are one literal
brace each, and anything else with a brace is an error that says where. A name is a letter or `_`, then letters, digits
or `_`.

Promises: a template is recognised only where there is exactly one way to place it; matching takes time linear in the
text, whatever the text; filling what was matched gives the matched text back, character by character.
"""

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from leyden.base.errors import ConfigError

_PIECE = re.compile(r"\{\{|\}\}|\{([A-Za-z_][A-Za-z0-9_]*)\}|[{}]")


@dataclass(frozen=True, slots=True)
class Match:
    """Where a template stands in a text."""

    start: int
    """Index of its first character."""
    end: int
    """Index after its last one."""
    values: Mapping[str, str]
    """What stands for each placeholder."""


@dataclass(frozen=True, slots=True)
class Template:
    """Literal pieces with a placeholder between each two of them."""

    literals: tuple[str, ...]
    """One more than there are placeholders."""
    names: tuple[str, ...] = ()
    """Of the placeholders, in their order."""

    @classmethod
    def parse(cls, text: str, what: str = "the text") -> "Template":
        """Read a template. Raises ConfigError for a brace that is neither a placeholder nor doubled."""
        literals, names = [""], []
        after = 0
        for piece in _PIECE.finditer(text):
            literals[-1] += text[after : piece.start()]
            after = piece.end()
            if piece[1]:
                names.append(piece[1])
                literals.append("")
            elif len(piece[0]) == 2:
                literals[-1] += piece[0][0]
            else:
                shown = text[max(0, piece.start() - 15) : piece.end() + 15]
                raise ConfigError(
                    f"{what} has a single {piece[0]!r} at character {piece.start() + 1} (near {shown!r}); a "
                    "placeholder is written {name}, and a brace that is meant literally is doubled: {{ or }}"
                )
        literals[-1] += text[after:]
        return cls(tuple(literals), tuple(names))

    @classmethod
    def loose(cls, text: str, names: Collection[str]) -> "Template":
        """Read a text in which only `{name}` of the given names is a placeholder and every other brace is literal.

        What a model writes is read so: it does not know the rule of braces.
        """
        literals, found = [""], []
        after = 0
        for piece in re.finditer(r"\{([A-Za-z_][A-Za-z0-9_]*)\}", text):
            if piece[1] not in names:
                continue
            literals[-1] += text[after : piece.start()]
            after = piece.end()
            found.append(piece[1])
            literals.append("")
        literals[-1] += text[after:]
        return cls(tuple(literals), tuple(found))

    @property
    def text(self) -> str:
        """As `parse` reads it."""
        return self._join(escape, lambda name: f"{{{name}}}")

    @property
    def shown(self) -> str:
        """As `loose` reads it: literal braces are single."""
        return self._join(str, lambda name: f"{{{name}}}")

    def fill(self, values: Mapping[str, str]) -> str:
        """The text with `values` in place of the placeholders; each name needs one."""
        return self._join(str, values.__getitem__)

    def matches(self, text: str, *, whole: bool) -> tuple[Match, ...]:
        """No match, the only one, or (where there are several) the leftmost and the rightmost one.

        `whole`: the template is all of the text; otherwise it may stand anywhere in it, and has to begin and end with
        literal text.
        """
        assert whole or (self.literals[0] and self.literals[-1]), self
        left = _leftmost(self.literals, text, whole)
        if left is None:
            return ()
        right = _rightmost(self.literals, text, whole)
        assert right is not None, (self, text)
        # Every placement lies between the two, literal by literal, so equal ones are the only one.
        return tuple(self._match(text, starts) for starts in ([left] if left == right else [left, right]))

    def _match(self, text: str, starts: Sequence[int]) -> Match:
        ends = [start + len(literal) for start, literal in zip(starts, self.literals, strict=True)]
        values = {name: text[ends[i] : starts[i + 1]] for i, name in enumerate(self.names)}
        return Match(starts[0], ends[-1], values)

    def _join(self, literal: Callable[[str], str], placeholder: Callable[[str], str]) -> str:
        parts = [literal(self.literals[0])]
        for name, after in zip(self.names, self.literals[1:], strict=True):
            parts += [placeholder(name), literal(after)]
        return "".join(parts)


def escape(text: str) -> str:
    """`text` as a template that says just that."""
    return text.replace("{", "{{").replace("}", "}}")


def _leftmost(literals: Sequence[str], text: str, whole: bool) -> list[int] | None:
    """Start of each literal, as far left as possible; None if they do not fit."""
    if whole and (not text.startswith(literals[0]) or not text.endswith(literals[-1])):
        return None
    starts: list[int] = []
    after = 0
    for number, literal in enumerate(literals):
        if whole and number == len(literals) - 1:
            start = len(text) - len(literal)
            start = start if start >= after and (number or not start) else -1
        else:
            start = 0 if whole and not number else text.find(literal, after)
        if start < 0:
            return None
        starts.append(start)
        after = start + len(literal)
    return starts


def _rightmost(literals: Sequence[str], text: str, whole: bool) -> list[int] | None:
    """The same, as far right as possible."""
    starts: list[int] = []
    before = len(text)
    for number in range(len(literals) - 1, -1, -1):
        literal = literals[number]
        if whole and not number:
            start = 0 if len(literal) <= before else -1
        elif whole and number == len(literals) - 1:
            start = before - len(literal)
        else:
            start = text.rfind(literal, 0, before)
        if start < 0:
            return None
        starts.append(start)
        before = start
    return starts[::-1]

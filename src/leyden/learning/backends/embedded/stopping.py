"""From sampled ids to text: incremental, never a broken character, and cut at stop strings.

`TextStream` gets the ids of one choice as they are sampled. What it gives out, joined, is the text of all its
ids (special tokens left out), up to the first stop string. Text that may yet become part of a stop string, or
a character whose bytes are not complete, is held back until it is decided. The ids are never changed.
"""

from collections.abc import Callable, Sequence

_INCOMPLETE = "\ufffd"
# A character has at most four bytes, so an ending that stays incomplete for longer is invalid, not late.
_MAX_HELD_TOKENS = 8


class TextStream:
    """Text of one choice. `decode` turns ids into text without special tokens."""

    def __init__(self, decode: Callable[[Sequence[int]], str], stop: Sequence[str] = ()) -> None:
        self._decode = decode
        self._stop = tuple(stop)
        self._ids: list[int] = []
        self._start = 0
        """First id of the piece that is decoded again with each new id."""
        self._read = 0
        """Ids before this one have given their text."""
        self._held = ""
        """Decoded, not given out yet."""
        self.matched: str | None = None
        """The stop string that ended the text."""

    def push(self, ids: Sequence[int]) -> str:
        """Take new ids; the text that is certain now. After a stop string was met, always empty."""
        if self.matched is not None:
            return ""
        self._ids.extend(ids)
        # The piece starts before the unread ids because many decoders treat the first id of a text
        # differently.
        before = self._decode(self._ids[self._start : self._read])
        after = self._decode(self._ids[self._start :])
        late = after.endswith(_INCOMPLETE) and len(self._ids) - self._read < _MAX_HELD_TOKENS
        if late or not after.startswith(before):
            return ""
        self._held += after[len(before) :]
        self._start, self._read = self._read, len(self._ids)
        return self._release(final=False)

    def finish(self) -> str:
        """No more ids: everything that is still held back."""
        if self.matched is not None:
            return ""
        before = self._decode(self._ids[self._start : self._read])
        after = self._decode(self._ids[self._start :])
        self._held += after[len(before) :]
        self._start, self._read = self._read, len(self._ids)
        return self._release(final=True)

    def _release(self, *, final: bool) -> str:
        found = [(at, s) for s in self._stop if (at := self._held.find(s)) >= 0]
        if found:
            at, self.matched = min(found)
            out, self._held = self._held[:at], ""
            return out
        keep = 0 if final else self._undecided()
        cut = len(self._held) - keep
        out, self._held = self._held[:cut], self._held[cut:]
        return out

    def _undecided(self) -> int:
        """Length of the longest ending that begins some stop string."""
        longest = min(len(self._held), max((len(s) - 1 for s in self._stop), default=0))
        for length in range(longest, 0, -1):
            ending = self._held[-length:]
            if any(s.startswith(ending) for s in self._stop):
                return length
        return 0

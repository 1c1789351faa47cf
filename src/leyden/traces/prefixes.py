"""What the recorder remembers of an attempt: enough to store the next call as a difference to an earlier one.

Only calls that are durable get in, so a stored difference always has its parent. It is a cache: what it has
forgotten (bounds below, a restart) is stored whole, which costs space and nothing else. Thread-safe. Letters
of shapes: S = prompt and first completion of a call.
"""

import threading
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

import numpy as np

from leyden.base.records import IntArray

T = TypeVar("T")

MAX_ATTEMPTS = 4096
"""Attempts remembered: twice the rollouts that are meant to be in flight."""
MAX_LEAVES = 8
"""Conversations per attempt; a harness rarely interleaves more sub-agents."""
MAX_TOKENS = 32 * 1024 * 1024
"""Token ids remembered in all, 128 MiB of them."""


class Body(NamedTuple):
    """Hashes of a request: one per message, one per other field that repeats.

    They are Python's own, 64 bits with a secret of this process: they never leave it.
    """

    call_id: str
    name: str | None
    messages: tuple[int, ...]
    fields: Mapping[str, int]


class Prompt(NamedTuple):
    """Token ids that the engine has seen after a call; shape (S,)."""

    call_id: str
    ids_S: IntArray


class Link(NamedTuple):
    """What a request shares with an earlier one; nothing by default."""

    parent: str | None = None
    num_messages: int = 0
    fields: tuple[str, ...] = ()


@dataclass(slots=True)
class _Attempt:
    bodies: list[Body] = field(default_factory=list)
    prompts: list[Prompt] = field(default_factory=list)


class Prefixes:
    """Recent calls by attempt, leaves only: a call that another one extends shares nothing that its child
    does not."""

    def __init__(self, max_attempts: int = MAX_ATTEMPTS, max_tokens: int = MAX_TOKENS) -> None:
        self._max_attempts = max_attempts
        self._max_tokens = max_tokens
        self._attempts: OrderedDict[str, _Attempt] = OrderedDict()
        self._num_tokens = 0
        self._lock = threading.Lock()

    def body_parent(self, attempt_id: str, body: Body) -> Link:
        """The earlier call that shares most messages, then most fields."""
        with self._lock:
            known = self._attempts.get(attempt_id)
            bodies = list(known.bodies) if known else []
        best = Link()
        for earlier in bodies:
            same = tuple([name for name, digest in body.fields.items() if earlier.fields.get(name) == digest])
            shared = _num_shared(earlier.messages, body.messages) if earlier.name == body.name else 0
            link = Link(earlier.call_id, shared, same)
            if (link.num_messages, len(same)) > (best.num_messages, len(best.fields)):
                best = link
        return best

    def prompt_parent(self, attempt_id: str, prompt_ids: IntArray) -> tuple[str | None, int]:
        """(earlier call whose tokens share the longest prefix, its length); None and 0 if no token is
        shared."""
        with self._lock:
            known = self._attempts.get(attempt_id)
            prompts = list(known.prompts) if known else []
        best: tuple[str | None, int] = (None, 0)
        for earlier in prompts:
            shared = common_prefix(earlier.ids_S, prompt_ids)
            if shared > best[1]:
                best = (earlier.call_id, shared)
        return best

    def add_body(self, attempt_id: str, body: Body) -> None:
        """Remember a request that is durable."""
        with self._lock:
            known = self._touch(attempt_id)
            extended = [
                b for b in known.bodies if b.messages == body.messages[: len(b.messages)] and b.fields == body.fields
            ]
            _replace(known.bodies, extended, body)

    def add_prompt(self, attempt_id: str, prompt: Prompt) -> None:
        """Remember a completion that is durable."""
        with self._lock:
            known = self._touch(attempt_id)
            extended = [p for p in known.prompts if common_prefix(p.ids_S, prompt.ids_S) == len(p.ids_S)]
            gone = _replace(known.prompts, extended, prompt)
            self._num_tokens += len(prompt.ids_S) - sum(len(p.ids_S) for p in gone)
            while len(self._attempts) > 1 and self._num_tokens > self._max_tokens:
                self._evict()

    def _touch(self, attempt_id: str) -> _Attempt:
        known = self._attempts.setdefault(attempt_id, _Attempt())
        self._attempts.move_to_end(attempt_id)
        if len(self._attempts) > self._max_attempts:
            self._evict()
        return known

    def _evict(self) -> None:
        _, oldest = self._attempts.popitem(last=False)
        self._num_tokens -= sum(len(p.ids_S) for p in oldest.prompts)


def common_prefix(left: IntArray, right: IntArray) -> int:
    """Number of equal leading ids."""
    length = min(len(left), len(right))
    one, other = left[:length], right[:length]
    # Conversations mostly extend each other, and bytes are compared ten times faster than ids.
    if one.dtype == other.dtype and one.tobytes() == other.tobytes():
        return length
    different = np.flatnonzero(one != other)
    return int(different[0]) if len(different) else length


def _num_shared(left: tuple[int, ...], right: tuple[int, ...]) -> int:
    for index, (one, other) in enumerate(zip(left, right, strict=False)):
        if one != other:
            return index
    return min(len(left), len(right))


def _replace(known: list[T], extended: list[T], new: T) -> list[T]:
    """Put `new` in the place of what it extends, or of the oldest when there are too many; what went away."""
    gone = list(extended)
    if not gone and len(known) >= MAX_LEAVES:
        gone = [known[0]]
    known[:] = [item for item in known if not any(item is other for other in gone)]
    known.append(new)
    return gone

"""Deterministic draws from names: the same on every machine, in every process, after every restart.

Hashes instead of a random generator: the result depends on the names alone, not on the order in which they
come, nor on a generator's state that a resumed run would have to restore.
"""

from collections.abc import Callable, Iterable
from hashlib import blake2b
from typing import TypeVar

T = TypeVar("T")


def digest(*parts: object, num_bytes: int = 10) -> str:
    """Hexadecimal digest of `parts`, 2 * num_bytes long; where one part ends and the next begins matters."""
    return blake2b(repr(parts).encode(), digest_size=num_bytes).hexdigest()


def draw(*parts: object, bits: int = 31) -> int:
    """A number in [0, 2**bits), for at most 64 bits."""
    return int(digest(*parts, num_bytes=8), 16) >> (64 - bits)


def shuffled(items: Iterable[T], name: Callable[[T], str], *salt: object) -> list[T]:
    """`items` in an order that depends only on the set of their names and on `salt`."""
    return sorted(items, key=lambda item: (digest(*salt, name(item)), name(item)))

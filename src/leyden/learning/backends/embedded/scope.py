"""What holds inside a `with` block, in this thread."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

_T = TypeVar("_T")


@contextmanager
def held(variable: ContextVar[_T], value: _T) -> Iterator[None]:
    """`variable` is `value` inside, and afterwards what it was."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)

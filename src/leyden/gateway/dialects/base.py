"""What a dialect of a model API is: one family, one file per member, registry in `__init__`.

A dialect is pure: it reads a harness's body, writes the body for an engine, reads the engine's answer, and
writes what the harness gets. It opens no connection and knows neither keys nor stores. Engines speak one wire
format, that of vLLM's server; token ids and log-probabilities are asked for on every call and stripped again
unless the harness asked for them.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from leyden.base.errors import RequestRefused
from leyden.traces.tokens import RawChoice

Body = dict[str, Any]
"""A JSON object."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRequest:
    """A request, read and checked."""

    dialect: str
    """Name of the dialect."""
    body: Body
    """As the harness sent it."""
    alias: str
    """The model name that it asked for."""
    asked: Mapping[str, Any]
    """Sampling parameters that the harness sent, under the names of `SAMPLING`."""
    num_choices: int = 1
    """`n`."""
    stream: bool = False
    """Whether a stream was asked for."""
    usage_wanted: bool = True
    """Whether usage belongs in the answer; a stream has it only on request."""
    logprobs_wanted: bool = False
    """Whether log-probabilities belong in the answer."""
    ids_wanted: bool = False
    """Whether token ids belong in the answer (`return_token_ids`)."""


SAMPLING = ("temperature", "top_p", "max_tokens", "seed", "stop", "n")
"""Names of sampling parameters in records and towards engines."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Capture:
    """What an engine's answer says about tokens, not yet checked."""

    prompt_ids: list[int] | None
    """None if the engine did not say."""
    choices: Sequence[RawChoice]
    """Every choice."""
    usage: Mapping[str, Any] = field(default_factory=dict)
    """Counts as the engine gave them."""


class Assembly(Protocol):
    """The copy of a stream that grows into the body of its unstreamed twin."""

    def add(self, chunk: Body) -> None:
        """Take one chunk of the engine in."""

    def complete(self) -> bool:
        """Whether every choice has its finish reason."""

    def body(self) -> Body:
        """The engine's answer as it would have been without streaming, as far as it has come."""


class Dialect(Protocol):
    """One member of the family."""

    name: str
    """Name in records."""
    path: str
    """Path after `v1/`, of the harness's request and of the engine's."""

    def parse(self, body: Body) -> ModelRequest:
        """Read a body. Raises RequestRefused that names the field."""

    def engine_body(self, request: ModelRequest, used: Mapping[str, Any], model: str) -> Body:
        """The body for the engine, with `used` sampling parameters."""

    def probe_body(self, model: str) -> Body:
        """The smallest request whose answer shows what an engine can return."""

    def capture(self, answer: Body) -> Capture:
        """Tokens of an engine's unstreamed answer."""

    def public(self, answer: Body, request: ModelRequest) -> Body:
        """What the harness gets of an unstreamed answer."""

    def public_chunk(self, chunk: Body, request: ModelRequest) -> Body | None:
        """What the harness gets of one streamed chunk; None if nothing of it."""

    def assembly(self, request: ModelRequest) -> Assembly:
        """An empty copy for a stream."""

    def chunks(self, response: Mapping[str, Any], request: ModelRequest) -> list[Body]:
        """A stored answer as the chunks of a stream, for a replay."""

    def error_body(self, message: str, kind: str, field: str | None, hint: str | None) -> Body:
        """An error in the shape of the dialect."""


def take(body: Body, key: str, check: Callable[[Any], bool], what: str, default: Any = None) -> Any:
    """`body[key]` if `check` holds; the default if it is absent or null; else RequestRefused naming `key`."""
    value = body.get(key)
    if value is None:
        return default
    if not check(value):
        raise RequestRefused(f"{key} is {_short(value)}; it must be {what}", field=key, hint=f"send {key} as {what}")
    return value


def refuse_unknown(body: Body, known: frozenset[str], dialect: str) -> None:
    """RequestRefused naming the first field that this dialect cannot honour. Null counts as absent."""
    for key, value in body.items():
        if key not in known and value is not None:
            raise RequestRefused(
                f"field {key!r} is not supported by {dialect} here",
                field=key,
                hint=f"leave {key!r} out; supported: {', '.join(sorted(known))}",
            )


def is_number(value: object) -> bool:
    """A JSON number that is not a boolean."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def is_count(value: object) -> bool:
    """A whole number of at least 1."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."

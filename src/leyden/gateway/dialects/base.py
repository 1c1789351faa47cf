"""What a dialect of a model API is: one family, one file per member, registry in `__init__`.

A dialect is pure: it reads a harness's body, writes the body for an engine, reads the engine's answer, and
writes what the harness gets. It opens no connection and knows neither keys nor stores; what a request only
refers to (an earlier answer by its id) is looked up by `recall` and handed to `resolve`. Engines speak one wire
format, that of vLLM's server, which need not be that of the harness; token ids and log-probabilities are asked
for on every call and stripped again unless the harness asked for them.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec
import orjson

from leyden.base.errors import RequestRefused
from leyden.base.records import Call
from leyden.traces.tokens import RawChoice

Body = dict[str, Any]
"""A JSON object."""


class ModelRequest(msgspec.Struct, frozen=True, kw_only=True):
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
    engine: Mapping[str, Any] = msgspec.field(default_factory=dict)
    """Fields for the engine, sampling parameters apart, where they are not those of `body`."""
    needs: Mapping[str, str] = msgspec.field(default_factory=dict)
    """Features that not every engine has (`FEATURES`), each with the field that needs it."""
    rewrites: Sequence[str] = ()
    """Fields that reach the engine in another form than the dialect's own mapping would give them."""
    previous: str | None = None
    """Id of an earlier answer that this request continues."""
    recalls: bool = False
    """Whether exact texts of earlier answers of the attempt are needed."""


SAMPLING = ("temperature", "top_p", "max_tokens", "seed", "stop", "n")
"""Names of sampling parameters in records and towards engines."""


FEATURES = ("response_format", "images", "reasoning", "thinking_budget")
"""What `policies.NAME.engine_features` may list, since no probe can tell it."""

BUDGET = "thinking_token_budget"
"""Field of an engine's request: the most tokens of thinking."""


class Capture(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine's answer says about tokens, not yet checked."""

    prompt_ids: list[int] | None
    """None if the engine did not say."""
    choices: Sequence[RawChoice]
    """Every choice."""
    usage: Mapping[str, Any] = msgspec.field(default_factory=dict)
    """Counts as the engine gave them."""
    is_spliced: bool = False
    """Whether the engine says that it built the prompt from ids it served before (`leyden_prompt`)."""
    texts: Mapping[str, Sequence[tuple[Any, str]]] = msgspec.field(default_factory=dict)
    """For `Earlier.texts` of later requests."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Earlier:
    """What earlier answers of an attempt said."""

    calls: Sequence[Call] = ()
    """Calls of the attempt; only where `ModelRequest.previous` asks for one."""
    texts: Mapping[str, Sequence[tuple[Any, str]]] = field(default_factory=dict)
    """By id of a tool call: its arguments, read, and as the engine wrote them."""


class Assembly(Protocol):
    """The copy of a stream that grows into the body of its unstreamed twin."""

    def add(self, chunk: Body) -> None:
        """Take one chunk of the engine in."""

    def complete(self) -> bool:
        """Whether every choice has its finish reason."""

    @property
    def num_choices(self) -> int:
        """Choices that the engine has begun."""

    def body(self) -> Body:
        """The engine's answer as it would have been without streaming, as far as it has come."""


class Translator(Protocol):
    """One stream on its way from the engine's events to the harness's; made for one call, keeps its state."""

    def events(self, chunk: Body) -> bytes:
        """What the harness gets of one chunk of the engine; empty if nothing. Raises EngineError."""

    def closing(self, public: Body) -> bytes:
        """The events that end a stream whose whole answer is `public`."""

    def failure(self, message: str, kind: str) -> bytes:
        """The event that ends a stream that cannot go on."""


class Dialect(Protocol):
    """One member of the family."""

    name: str
    """Name in records."""
    family: str
    """Whose API it is, as paths name it: `openai` or `anthropic`."""
    path: str
    """Path of the harness's request after `v1/`."""
    engine_path: str
    """Path of the engine's request after `v1/`."""
    id_header: bytes
    """Response header in which clients look for the id of the request."""

    def parse(self, body: Body) -> ModelRequest:
        """Read a body. Raises RequestRefused that names the field."""

    def resolve(self, request: ModelRequest, earlier: Earlier) -> ModelRequest:
        """The request with what it refers to. Called only where it refers to something. Raises
        RequestRefused."""

    def engine_body(self, request: ModelRequest, used: Mapping[str, Any], model: str) -> Body:
        """The body for the engine, with `used` sampling parameters."""

    def probe_body(self, model: str) -> Body:
        """The smallest request whose answer shows what an engine can return."""

    def capture(self, answer: Body) -> Capture:
        """Tokens of an engine's unstreamed answer."""

    def public(self, answer: Body, request: ModelRequest, call_id: str) -> Body:
        """What the harness gets of an unstreamed answer."""

    def assembly(self, request: ModelRequest) -> Assembly:
        """An empty copy for a stream."""

    def translator(self, request: ModelRequest, call_id: str) -> Translator:
        """The way of a new stream."""

    def replay(self, response: Mapping[str, Any], request: ModelRequest) -> bytes:
        """A stored answer as a whole stream."""

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


def only_neutral(body: Body, neutral: Mapping[str, tuple[Any, ...]]) -> None:
    """RequestRefused naming the first field whose value would change something; the tuples list what does
    not."""
    for key, values in neutral.items():
        value = body.get(key)
        if value is not None and not any(value == v and type(value) is type(v) for v in values):
            raise RequestRefused(
                f"{key} is {_short(value)}, which cannot be honoured here", field=key,
                hint=f"leave {key} out" + "".join(f", or send {v!r}" for v in values[:1]),
            )  # fmt: skip


def event_bytes(body: Mapping[str, object], name: str = "") -> bytes:
    """One server-sent event, named where the dialect names its events."""
    if name:
        return b"event: " + name.encode() + b"\ndata: " + orjson.dumps(body) + b"\n\n"
    return b"data: " + orjson.dumps(body) + b"\n\n"


def is_number(value: object) -> bool:
    """A JSON number that is not a boolean."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def budget_binds(request: ModelRequest, used: Mapping[str, Any]) -> bool:
    """Whether an answer of `used` tokens could think more than the request allows."""
    budget = request.engine.get(BUDGET)
    return budget is not None and budget < used.get("max_tokens", budget + 1)


def is_count(value: object) -> bool:
    """A whole number of at least 1."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."

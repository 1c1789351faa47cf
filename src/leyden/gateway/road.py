"""The road of a call as records: what each phase of `forward` takes and gives. `Gateway` is the rooms they
share.

Most records are named tuples, always made by name: a frozen dataclass takes five times as long to make.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from leyden.base.config import Config
from leyden.base.leaks import Guard
from leyden.base.records import LiveOrigin
from leyden.gateway.address import Address
from leyden.gateway.auth import Keys, KnownAttempt
from leyden.gateway.client import Client
from leyden.gateway.dialects import Body, ModelRequest
from leyden.gateway.hold import Hold
from leyden.gateway.ledger import Book, Flight, Settle
from leyden.gateway.metrics import Metrics
from leyden.gateway.prompts import NOTHING, Prompts, Replaced
from leyden.gateway.routing import Route, Router
from leyden.gateway.siblings import Siblings
from leyden.gateway.stream import Relay
from leyden.gateway.upstream import Upstream
from leyden.store.aio import Quay
from leyden.store.base import Store
from leyden.traces.reader import Reader
from leyden.traces.recorder import Recorder


@dataclass(frozen=True, slots=True, kw_only=True)
class Gateway:
    """The rooms that a call passes through; made once."""

    config: Config
    """The whole configuration."""
    store: Store
    """Where everything is recorded."""
    recorder: Recorder
    """The only road in."""
    reader: Reader
    """The only road out."""
    keys: Keys
    """Who calls."""
    router: Router
    """Where calls go."""
    upstream: Upstream
    """Connections to engines."""
    hold: Hold
    """Pause and drain."""
    quay: Quay
    """Where rows leave for the store, and its receipts arrive."""
    prompts: Prompts
    """What versions put in place of the harness's prompts."""
    live: Book = field(default_factory=lambda: Book(None))
    """Calls without an attempt."""
    metrics: Metrics = field(default_factory=Metrics)
    """What is counted."""
    flights: set[Flight] = field(default_factory=set)
    """Every call between its arrival and its record."""
    guard: Guard = field(default_factory=lambda: Guard([]))
    """Knows the tasks that no rollout may train on."""
    siblings: Siblings | None = None
    """The other workers, if there are any."""

    @property
    def settle(self) -> Settle | None:
        """Waits for a call that another worker has in flight; None where there is no other."""
        return None if self.siblings is None else self.siblings.settle

    @property
    def worker(self) -> tuple[int, int]:
        """(index, number of workers)."""
        return (0, 1) if self.siblings is None else (self.siblings.index, self.siblings.size)


class Arrival(NamedTuple):
    """A request as it came."""

    address: Address
    """What its path says."""
    key: bytes | None
    """What it was sent with."""
    retry_count: int
    """As an SDK marked it; 0 if it did not."""
    from_sdk: bool
    """Whether an SDK that retries sent it."""
    client: Client
    """Who waits."""
    started_at: float
    """Seconds since the epoch."""
    began: float
    """The same on the monotonic clock."""
    live_headers: Mapping[bytes, bytes] = MappingProxyType({})
    """Headers `x-leyden-*`."""


class Called(NamedTuple):
    """A request whose caller is known."""

    arrival: Arrival
    """The request."""
    known: KnownAttempt | None
    """None for live traffic."""
    raw: bytes
    """The body."""
    live: LiveOrigin | None = None
    """Who is behind live traffic."""


class Translated(NamedTuple):
    """A request that can be honoured."""

    called: Called
    """The request."""
    request: ModelRequest
    """The request, read and checked."""
    used: Mapping[str, Any]
    """Effective sampling parameters, the seed excepted."""
    rewrites: Sequence[str]
    """Fields that were changed."""
    digest: str
    """Of the request."""
    policy: str
    """Who answers: the name that was asked for, or what a matcher made of it."""


class Chosen(NamedTuple):
    """A request with an engine and a place in the ledger."""

    translated: Translated
    """The request."""
    flight: Flight
    """Its place in the ledger."""
    route: Route
    """Where it goes."""
    model: str
    """Name for the engine."""
    used: Mapping[str, Any]
    """Effective sampling parameters."""
    rewrites: Sequence[str]
    """Fields that were changed."""
    replaced: Replaced = NOTHING
    """What the version's prompts change."""


class Sent(NamedTuple):
    """What came of the request upstream."""

    chosen: Chosen
    """The request."""
    status: Literal["ok", "error", "aborted"]
    """How it ended."""
    http_status: int
    """What the client is answered."""
    answer: Body
    """The engine's answer, as far as it came."""
    error: str | None = None
    """What went wrong."""
    kind: str = "engine_error"
    """Type of the error."""
    relay: Relay | None = None
    """The stream, whose last events wait for the record."""
    first_byte_ms: float | None = None
    """Until the first byte of the answer."""
    retry_after_s: float | None = None
    """How long a provider asks to be left alone."""


class Recorded(NamedTuple):
    """A call that is durable."""

    sent: Sent
    """What came of it."""
    public: Body
    """What the harness gets."""

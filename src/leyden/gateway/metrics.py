"""What is counted for Prometheus. On the road of a call it costs a few increments; everything else is asked when the
page is scraped.

One registry per gateway, so that several may live in one process. Labels come from the configuration and from closed
lists, never from a caller, so that nobody can make series without end.
"""

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from leyden.base.records import CallCompletion

if TYPE_CHECKING:
    from leyden.gateway.road import Gateway

CONTENT_TYPE = CONTENT_TYPE_LATEST
_CALL_S = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)
"""From an engine without a model to one that writes a book."""
_COMMIT_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0)
"""From a memory disk to a disk that is overloaded."""


class Metrics:
    """The counters of one gateway."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        registry = self.registry
        self._calls = Counter(
            "leyden_calls", "Calls that were recorded", ["dialect", "policy", "status"], registry=registry
        )
        self._seconds = Histogram(
            "leyden_call_seconds", "From the first byte in to the record", ["dialect"], buckets=_CALL_S,
            registry=registry,
        )  # fmt: skip
        self._first_byte = Histogram(
            "leyden_first_byte_seconds", "Until the engine's first byte", ["dialect"], buckets=_CALL_S,
            registry=registry,
        )  # fmt: skip
        self._undelivered = Counter("leyden_undelivered", "Calls whose client left before the end", registry=registry)
        self._retries = Counter("leyden_retries", "Marked retries that were joined or replayed", registry=registry)
        self._refused = Counter("leyden_refused", "Requests that were refused", ["kind"], registry=registry)
        self._cost = Counter("leyden_cost_usd", "What providers asked for", ["policy"], registry=registry)
        self._tokens = Counter("leyden_tokens", "Tokens as engines counted them", ["policy", "part"], registry=registry)
        self._commit = Histogram(
            "leyden_store_commit_seconds", "Until a completion was durable", buckets=_COMMIT_S, registry=registry
        )
        # The children of labels are looked up under a lock; a dictionary of ours is several times faster.
        self._children: dict[tuple[str, str, str], Any] = {}

    def recorded(self, dialect: str, policy: str, completion: CallCompletion, commit_s: float) -> None:
        """A call became durable."""
        slot = (dialect, policy, completion.status)
        children = self._children.get(slot)
        if children is None:
            children = self._children[slot] = (
                self._calls.labels(*slot), self._seconds.labels(dialect), self._first_byte.labels(dialect),
                self._tokens.labels(policy, "prompt"), self._tokens.labels(policy, "completion"),
            )  # fmt: skip
        calls, seconds, first_byte, prompt, sampled = children
        calls.inc()
        seconds.observe(completion.latency_ms / 1000)
        if completion.first_byte_ms is not None:
            first_byte.observe(completion.first_byte_ms / 1000)
        self._commit.observe(commit_s)
        if not completion.delivered:
            self._undelivered.inc()
        prompt.inc(_count(completion.usage.get("prompt_tokens")))
        sampled.inc(_count(completion.usage.get("completion_tokens")))
        cost = completion.usage.get("cost_usd")
        if cost:
            self._cost.labels(policy).inc(cost)

    def refused(self, kind: str) -> None:
        """A request was refused. `kind` is one of ours: what an engine calls its error is counted as a call."""
        self._refused.labels(kind).inc()

    def attach(self, gateway: "Gateway") -> None:
        """Show what is true of `gateway` at the moment of a scrape; once."""
        self.registry.register(_Now(gateway))

    def retried(self) -> None:
        """A marked retry found its call."""
        self._retries.inc()


class _Now(Collector):
    """What is true at the moment of a scrape."""

    def __init__(self, gateway: "Gateway") -> None:
        self._gateway = gateway

    def collect(self) -> Iterable[Metric]:
        """Gauges of the moment."""
        hold = self._gateway.hold
        yield GaugeMetricFamily("leyden_in_flight", "Calls between their release and their record", hold.inflight)
        yield GaugeMetricFamily("leyden_held", "Calls that wait for a resume", hold.waiting)
        yield GaugeMetricFamily("leyden_paused", "Whether new calls wait", float(hold.paused))
        up = GaugeMetricFamily("leyden_replica_up", "Whether calls may go to a replica", labels=["endpoint"])
        failures = GaugeMetricFamily("leyden_replica_failures", "Failures of a replica in a row", labels=["endpoint"])
        for one in self._gateway.upstream.health.every():
            up.add_metric([one.endpoint], float(one.state in ("up", "failing", "unknown")))
            failures.add_metric([one.endpoint], one.num_failures)
        yield up
        yield failures


def page(gateway: "Gateway") -> bytes:
    """The metrics of this process as Prometheus reads them."""
    return generate_latest(gateway.metrics.registry)


def merged(pages: dict[int, str]) -> bytes:
    """Pages of several workers as one, each series with its worker's number."""
    registry = CollectorRegistry()
    registry.register(_Merged(pages))
    return generate_latest(registry)


class _Merged(Collector):
    def __init__(self, pages: dict[int, str]) -> None:
        self._pages = pages

    def collect(self) -> Iterator[Metric]:
        """Families by name, each once."""
        families: dict[str, Metric] = {}
        for worker, text in sorted(self._pages.items()):
            for family in text_string_to_metric_families(text):
                into = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
                for sample in family.samples:
                    into.samples.append(sample._replace(labels={**sample.labels, "worker": str(worker)}))
        yield from families.values()


def _count(value: object) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 0

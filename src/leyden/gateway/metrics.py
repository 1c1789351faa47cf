"""What is counted for Prometheus. On the road of a call it costs a few additions to plain numbers of the event loop
(the counters of the library take a lock each); everything else is made when the page is scraped.

One registry per gateway, so that several may live in one process. Labels come from the configuration and from closed
lists, never from a caller, so that nobody can make series without end.
"""

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
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


class _Histogram:
    """Observations by bucket, without a lock: the event loop alone adds to it."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        """One more."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def buckets(self) -> list[tuple[str, float]]:
        """(upper bound, observations up to it), as Prometheus wants them."""
        names = [*map(str, self.bounds), "+Inf"]
        return list(zip(names, accumulate(map(float, self.counts)), strict=True))


class _Tally:
    """What is counted of calls of one dialect, policy and status."""

    __slots__ = ("calls", "completion", "prompt")

    def __init__(self) -> None:
        self.calls = self.prompt = self.completion = 0


class Metrics:
    """The counters of one gateway."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        registry = self.registry
        self._undelivered = Counter("leyden_undelivered", "Calls whose client left before the end", registry=registry)
        self._retries = Counter("leyden_retries", "Marked retries that were joined or replayed", registry=registry)
        self._refused = Counter("leyden_refused", "Requests that were refused", ["kind"], registry=registry)
        self._cost = Counter("leyden_cost_usd", "What providers asked for", ["policy"], registry=registry)
        self._tallies: dict[tuple[str, str, str], _Tally] = {}
        self._times: dict[str, tuple[_Histogram, _Histogram]] = {}
        self._commit = _Histogram(_COMMIT_S)
        registry.register(_Counted(self))

    def recorded(self, dialect: str, policy: str, completion: CallCompletion, commit_s: float) -> None:
        """A call became durable."""
        slot = (dialect, policy, completion.status)
        tally = self._tallies.get(slot)
        if tally is None:
            tally = self._tallies[slot] = _Tally()
            if dialect not in self._times:
                self._times[dialect] = (_Histogram(_CALL_S), _Histogram(_CALL_S))
        tally.calls += 1
        whole, first_byte = self._times[dialect]
        whole.observe(completion.latency_ms / 1000)
        if completion.first_byte_ms is not None:
            first_byte.observe(completion.first_byte_ms / 1000)
        self._commit.observe(commit_s)
        if not completion.delivered:
            self._undelivered.inc()
        usage = completion.usage
        tally.prompt += _count(usage.get("prompt_tokens"))
        tally.completion += _count(usage.get("completion_tokens"))
        cost = usage.get("cost_usd")
        if cost:
            self._cost.labels(policy).inc(cost)

    def counted(self) -> Iterable[Metric]:
        """What `recorded` counted."""
        calls = CounterMetricFamily("leyden_calls", "Calls that were recorded", labels=["dialect", "policy", "status"])
        tokens = CounterMetricFamily("leyden_tokens", "Tokens as engines counted them", labels=["policy", "part"])
        sums: dict[tuple[str, str], int] = {}
        for slot, tally in self._tallies.items():
            calls.add_metric(slot, tally.calls)
            for part, num_tokens in (("prompt", tally.prompt), ("completion", tally.completion)):
                sums[slot[1], part] = sums.get((slot[1], part), 0) + num_tokens
        for labels, num_tokens in sums.items():
            tokens.add_metric(labels, num_tokens)
        seconds = HistogramMetricFamily(
            "leyden_call_seconds", "From the first byte in to the record", labels=["dialect"]
        )
        first_byte = HistogramMetricFamily(
            "leyden_first_byte_seconds", "Until the engine's first byte", labels=["dialect"]
        )
        for dialect, (whole, first) in self._times.items():
            seconds.add_metric([dialect], whole.buckets(), whole.total)
            first_byte.add_metric([dialect], first.buckets(), first.total)
        commit = HistogramMetricFamily("leyden_store_commit_seconds", "Until a completion was durable")
        commit.add_metric([], self._commit.buckets(), self._commit.total)
        return calls, tokens, seconds, first_byte, commit

    def refused(self, kind: str) -> None:
        """A request was refused. `kind` is one of ours: what an engine calls its error is counted as a call."""
        self._refused.labels(kind).inc()

    def attach(self, gateway: "Gateway") -> None:
        """Show what is true of `gateway` at the moment of a scrape; once."""
        self.registry.register(_Now(gateway))

    def retried(self) -> None:
        """A marked retry found its call."""
        self._retries.inc()


class _Counted(Collector):
    """What is counted without the library's locks."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def collect(self) -> Iterable[Metric]:
        """Counters and histograms of calls."""
        return self._metrics.counted()


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

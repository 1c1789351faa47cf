"""What rollouts cost: tokens, money of providers, seconds of engines, harnesses and verifiers, bytes kept.

Promises: costs add up (of a rollout to a step, of steps to a version); money that nobody reported and no price is
given for is None, which is not 0; rollouts that do not count for an evaluation cost all the same. Of a rollout that
was tried several times only the last attempt is seen: the trace is its.

A call's money is `usage.cost_usd` where the gateway recorded it, else its tokens by the price of the
policy that answered (`usd_per_million` of the policy, else of its provider).
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from leyden.base.config import Config
from leyden.base.errors import RecordError
from leyden.base.records import VERIFICATION_SPAN, Call, Trace


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """A sum over rollouts."""

    num_rollouts: int = 0
    """Rollouts in the sum."""
    num_calls: int = 0
    """Their model calls."""
    prompt_tokens: int = 0
    """Tokens that engines read."""
    completion_tokens: int = 0
    """Tokens that engines sampled."""
    usd: float | None = None
    """Money for calls; None when no call has a price."""
    num_unpriced: int = 0
    """Calls without a price: `usd` does not cover them."""
    engine_s: float = 0.0
    """Sum of the time that calls took; calls overlap, so it may exceed wall time."""
    harness_s: float = 0.0
    """Sum of the wall time of harnesses."""
    verifier_s: float = 0.0
    """Sum of the wall time of verifications."""
    storage_bytes: int = 0
    """Bytes that the store keeps of them; 0 when nobody looked."""

    @property
    def tokens(self) -> int:
        """Read and sampled."""
        return self.prompt_tokens + self.completion_tokens

    def __add__(self, other: "Cost") -> "Cost":
        summed: dict[str, Any] = {
            field.name: getattr(self, field.name) + getattr(other, field.name)
            for field in fields(self)
            if field.name != "usd"
        }
        return Cost(**summed, usd=_plus(self.usd, other.usd))

    def to_json(self) -> dict[str, Any]:
        """Plain numbers."""
        return asdict(self)

    @classmethod
    def from_json(cls, tree: Mapping[str, Any]) -> "Cost":
        """What `to_json` wrote. Raises RecordError for unknown names."""
        try:
            return cls(**tree)
        except TypeError as error:
            raise RecordError(f"no cost: {error}; read it with the version that wrote it") from None

    def sentence(self) -> str:
        """The sum in plain words."""
        money = "no price is known"
        if self.usd is not None:
            money = f"{self.usd:.4f} USD" + (
                f" ({self.num_unpriced} calls without a price)" if self.num_unpriced else ""
            )
        kept = f", {self.storage_bytes / 1024:,.0f} KiB kept" if self.storage_bytes else ""
        return (
            f"{self.num_rollouts} rollouts, {self.num_calls} calls, {self.prompt_tokens:,} tokens read, "
            f"{self.completion_tokens:,} sampled, {money}, {self.engine_s:.1f} s of engines, "
            f"{self.harness_s:.1f} s of harnesses, {self.verifier_s:.1f} s of verifiers{kept}"
        )


def cost_of(trace: Trace, config: Config) -> Cost:
    """What one rollout cost."""
    usd = [call_usd(call, config) for call in trace.calls]
    priced = [value for value in usd if value is not None]
    return Cost(
        num_rollouts=1,
        num_calls=len(trace.calls),
        prompt_tokens=sum(prompt_tokens(call) for call in trace.calls),
        completion_tokens=sum(completion_tokens(call) for call in trace.calls),
        usd=math.fsum(priced) if priced else None,
        num_unpriced=len(usd) - len(priced),
        engine_s=sum(call.latency_ms for call in trace.calls) / 1000,
        harness_s=trace.attempt.duration_s or 0.0,
        verifier_s=sum(
            (span.ended_at or span.started_at) - span.started_at
            for span in trace.spans
            if span.name == VERIFICATION_SPAN
        ),
    )


def total(costs: Iterable[Cost]) -> Cost:
    """The sum, exact to rounding whatever the order of tokens and counts."""
    summed = Cost()
    for one in costs:
        summed += one
    return summed


def total_of(traces: Sequence[Trace], config: Config) -> Cost:
    """What many rollouts cost together."""
    return total(cost_of(trace, config) for trace in traces)


def call_usd(call: Call, config: Config) -> float | None:
    """Money for one call: as recorded, else by the price of its policy, else None. A call that failed is free."""
    recorded = call.usage.get("cost_usd")
    if isinstance(recorded, int | float) and not isinstance(recorded, bool) and math.isfinite(recorded):
        return float(recorded)
    price = config.price_of(call.policy) if call.policy else None
    return None if price is None else price.usd(prompt_tokens(call), completion_tokens(call))


def prompt_tokens(call: Call) -> int:
    """Tokens that the engine read: their ids, else the provider's own count, else 0."""
    return len(call.prompt_ids) or _count(call, "prompt_tokens", "input_tokens")


def completion_tokens(call: Call) -> int:
    """Tokens that the engine sampled, over all choices: their ids, else the provider's own count, else 0."""
    return call.num_sampled or _count(call, "completion_tokens", "output_tokens")


def _count(call: Call, *names: str) -> int:
    for name in names:
        value = call.usage.get(name)
        if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
            return value
    return 0


def _plus(a: float | None, b: float | None) -> float | None:
    return b if a is None else a if b is None else a + b

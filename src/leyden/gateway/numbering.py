"""The intent of a call where several workers serve one attempt: its numbers are given by the store as it is written.

The seed of a call that brought none follows from its place in the order of arrival, so it is known only then, too.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

from leyden.base.records import CallIntent
from leyden.gateway.road import Chosen, Gateway
from leyden.gateway.sampling import seed_of
from leyden.traces.numbers import Numbers


def by_store(gateway: Gateway, chosen: Chosen) -> bool:
    """Whether the store numbers this call."""
    return gateway.worker[1] > 1 and chosen.translated.called.known is not None


async def write(gateway: Gateway, chosen: Chosen, intent: CallIntent) -> Chosen:
    """Make the intent durable; the call with its numbers and its seed. Raises StoreError."""
    known = chosen.translated.called.known
    assert known is not None
    asked, used = intent.sampling["asked"], dict(chosen.used)
    draws = "seed" in chosen.rewrites

    def sampling(seq: int) -> Mapping[str, Any]:
        if draws:
            used["seed"] = seed_of(known.rollout.seed, known.attempt.number, seq)
        return {"asked": asked, "used": used}

    told: list[Numbers] = []
    # Lazily, as in `forward`: nobody was answered yet.
    await gateway.quay.durable(partial(gateway.recorder.hand_in_numbered, intent, sampling, told.append, lazily=True))
    chosen.flight.seq, chosen.flight.occurrence = told[-1]
    known.book.numbered(chosen.flight)
    return chosen._replace(used=used)

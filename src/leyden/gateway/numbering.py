"""The intent of a call where several workers serve one attempt: its numbers are given by the store as it is written.

The seed of a call that brought none follows from its place in the order of arrival, so it is known only then, too.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from leyden.base.records import CallIntent
from leyden.gateway.road import Chosen, Gateway
from leyden.gateway.sampling import seed_of


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

    seq, occurrence = await asyncio.wrap_future(gateway.recorder.numbered_intent(intent, sampling))
    chosen.flight.seq, chosen.flight.occurrence = seq, occurrence
    known.book.numbered(chosen.flight)
    return replace(chosen, used=used)

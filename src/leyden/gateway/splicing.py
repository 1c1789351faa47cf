"""What the gateway has to do with splicing: tell our own engine the attempt, and believe only it."""

from leyden.base.records import Provenance
from leyden.gateway.dialects.base import Capture
from leyden.gateway.road import Chosen, Gateway

ATTEMPT_HEADER = "x-leyden-attempt"
"""Under which the embedded engine finds what it served before."""


def headers(gateway: Gateway, chosen: Chosen) -> dict[str, str] | None:
    """Headers for the engine beside the usual ones. Nobody but an engine that splices learns the id of an attempt."""
    known = chosen.translated.called.known
    if known is None or not _splices(gateway, chosen):
        return None
    return {ATTEMPT_HEADER: known.attempt.id}


def provenance(gateway: Gateway, chosen: Chosen, known: Provenance, capture: Capture) -> Provenance:
    """`spliced` where our engine says so of tokens that it served; the word of any other engine does not count."""
    spliced = known is Provenance.SERVED and capture.is_spliced and _splices(gateway, chosen)
    return Provenance.SPLICED if spliced else known


def _splices(gateway: Gateway, chosen: Chosen) -> bool:
    policy = gateway.config.policies.get(chosen.route.policy)
    return policy is not None and policy.splice

"""What an attempt cost: tokens, seconds, money, calls. Weights of these components are negative."""

from leyden.base.config import PriceConfig
from leyden.rewards.library.base import Evidence, Member, Settings


class CostSettings(Settings):
    """`[rewards.settings.cost]`"""

    usd_per_million: PriceConfig = PriceConfig()
    """What a million tokens cost an agent in its reward; it sees tokens, not which policy read or sampled them."""


def _score(evidence: Evidence, settings: CostSettings) -> dict[str, float]:
    trace = evidence.trace
    read, sampled = int(trace.get("num_prompt_tokens") or 0), int(trace.get("num_completion_tokens") or 0)
    return {
        "cost_tokens": float(sampled),
        "cost_prompt_tokens": float(read),
        "cost_seconds": float(trace.get("duration_s") or 0.0),
        "cost_money": settings.usd_per_million.usd(read, sampled),
        "cost_calls": float(trace.get("num_calls") or 0),
    }


MEMBER = Member(
    name="cost",
    says="tokens, seconds, money and calls of the attempt; give them negative weights",
    settings=CostSettings,
    score=_score,
    components=("cost_tokens", "cost_prompt_tokens", "cost_seconds", "cost_money", "cost_calls"),
)

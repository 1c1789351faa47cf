"""What an attempt cost: tokens, seconds, money, calls. Weights of these components are negative."""

from pydantic import Field

from leyden.rewards.library.base import Evidence, Member, Settings


class CostSettings(Settings):
    """`[rewards.settings.cost]`"""

    prompt_price: float = Field(0.0, ge=0)
    """Money per million prompt tokens."""
    completion_price: float = Field(0.0, ge=0)
    """Money per million completion tokens."""


def money(num_prompt_tokens: int, num_completion_tokens: int, prompt_price: float, completion_price: float) -> float:
    """Price of so many tokens, at prices per million."""
    return (num_prompt_tokens * prompt_price + num_completion_tokens * completion_price) / 1e6


def _score(evidence: Evidence, settings: CostSettings) -> dict[str, float]:
    trace = evidence.trace
    read, sampled = int(trace.get("num_prompt_tokens") or 0), int(trace.get("num_completion_tokens") or 0)
    return {
        "cost_tokens": float(sampled),
        "cost_prompt_tokens": float(read),
        "cost_seconds": float(trace.get("duration_s") or 0.0),
        "cost_money": money(read, sampled, settings.prompt_price, settings.completion_price),
        "cost_calls": float(trace.get("num_calls") or 0),
    }


MEMBER = Member(
    name="cost",
    says="tokens, seconds, money and calls of the attempt; give them negative weights",
    settings=CostSettings,
    score=_score,
    components=("cost_tokens", "cost_prompt_tokens", "cost_seconds", "cost_money", "cost_calls"),
)

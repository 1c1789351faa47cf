"""How far two raters agree beyond chance: Cohen's kappa (Cohen 1960).

    kappa = (p_observed - p_chance) / (1 - p_chance),   p_chance = sum over categories of p_a(category) p_b(category)

Pure functions.
"""

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

ENOUGH = 30
"""Items below which a kappa says little: its standard error is then about 0.15 or more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """Two raters on the same items."""

    num_items: int
    """Items that both rated."""
    agreed: float
    """Share on which they agree."""
    kappa: float | None
    """Agreement beyond chance, 1 for perfect, 0 for chance; None when both always say the same one thing."""

    def sentence(self) -> str:
        """For people, with what it is worth."""
        if self.kappa is None:
            return (
                f"{self.num_items} items, all in one category: agreement cannot be told from chance; "
                "rate items of both kinds"
            )
        words = ((0.2, "hardly any"), (0.4, "fair"), (0.6, "moderate"), (0.8, "substantial"), (1.1, "almost perfect"))
        word = next(word for limit, word in words if self.kappa < limit)
        few = "" if self.num_items >= ENOUGH else f"; {self.num_items} items are too few to rely on it"
        return f"{self.num_items} items, {self.agreed:.0%} agree, kappa {self.kappa:.2f} ({word} agreement{few})"


def cohen_kappa(a: Sequence[Hashable], b: Sequence[Hashable]) -> float | None:
    """Kappa of two ratings of the same items; None where chance agreement is certain.

    Raises ValueError for lengths that differ or no items.
    """
    if len(a) != len(b) or not a:
        raise ValueError(f"kappa needs the same items rated twice, at least one; got {len(a)} and {len(b)}")
    num = len(a)
    observed = sum(x == y for x, y in zip(a, b, strict=True)) / num
    first, second = Counter(a), Counter(b)
    chance = sum(first[category] * second[category] for category in first) / num**2
    return None if chance == 1.0 else (observed - chance) / (1.0 - chance)


def agreement(
    a: Sequence[float], b: Sequence[float], *, threshold_a: float = 0.5, threshold_b: float = 0.5
) -> Agreement:
    """Agreement of two scores of the same items on what is good: above the threshold of each."""
    good_a, good_b = [x > threshold_a for x in a], [y > threshold_b for y in b]
    return Agreement(
        num_items=len(a),
        agreed=sum(x == y for x, y in zip(good_a, good_b, strict=True)) / len(a) if a else 0.0,
        kappa=cohen_kappa(good_a, good_b),
    )

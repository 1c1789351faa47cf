"""Several chances to be wrong: Holm's correction of several tests, and error spent over several looks.

Promises: with `holm`, the chance of any false claim among the tests is at most alpha, however they depend on each
other; with `spent_at`, the chance of any false claim over all looks at one holdout is at most alpha, however many
there are. Both follow from Bonferroni's inequality, so neither assumes independence.

Group-sequential boundaries (O'Brien and Fleming 1979) are not used: they rest on data that accumulates, while every
look at a holdout sees the same tasks with another candidate.
"""

from collections.abc import Sequence

from leyden.base.errors import RecordError


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's (1979) adjusted p-values, in the order given: reject those below alpha.

    The k-th smallest of m is `max over j <= k of (m - j + 1) p_(j)`, at most 1. Raises RecordError for a value outside
    0 to 1.
    """
    for value in p_values:
        if not 0 <= value <= 1:
            raise RecordError(f"p-value {value} is not from 0 to 1")
    adjusted = [1.0] * len(p_values)
    highest = 0.0
    for rank, position in enumerate(sorted(range(len(p_values)), key=lambda i: p_values[i])):
        highest = max(highest, min(1.0, (len(p_values) - rank) * p_values[position]))
        adjusted[position] = highest
    return adjusted


def spent_at(look: int, alpha: float, planned: int = 0) -> float:
    """Error rate that look number `look` (from 1) at one holdout may use.

    With `planned` looks each may use `alpha / planned`, and further ones 0: nothing can be claimed any more. Without
    a plan look k may use `alpha / (k (k + 1))`: these sum to alpha over any number of looks. Raises RecordError for
    numbers out of range.
    """
    if look < 1 or planned < 0 or not 0 < alpha < 1:
        raise RecordError(
            f"look {look}, alpha {alpha}, planned {planned}; looks count from 1, alpha lies between 0 and 1, and 0 "
            "planned looks stand for no plan"
        )
    if planned:
        return alpha / planned if look <= planned else 0.0
    return alpha / (look * (look + 1))

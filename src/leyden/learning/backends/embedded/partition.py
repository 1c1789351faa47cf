"""Where a step is cut into passes: the cuts that compute the fewest tokens.

A cut in front of an input computes again what that input shares with the one before it: the cut goes through the
forest at that depth. So cutting at the cheapest nodes is a shortest path over the inputs in the order of the
forest, found by dynamic programming; greedy filling cuts wherever the budget happens to end. Pure; no model.

Letters: n inputs in the order of the forest.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from leyden.learning.backends.base import Layout

Index = NDArray[np.int64]


def partition(layout: Layout, budget: int, lengths: Sequence[int], shared: Index) -> list[slice]:
    """Runs of consecutive inputs, each of at most `budget` tokens in `layout`, or one input that is longer alone.

    `lengths` are the tokens of each input, `shared` those that it has in common with the one before it (0 for the
    first). The sum of tokens over the runs is the smallest that consecutive runs can have; in `padded` their number
    comes first.
    """
    num = len(lengths)
    if layout == "single":
        return [slice(i, i + 1) for i in range(num)]
    tokens_of = _Tokens(layout, np.asarray(lengths, np.int64), shared)
    # Passes decide between equals; in `padded`, where single rows have no padding at all, tokens do.
    per_token, per_pass = (1, int(sum(lengths)) * num + 1) if layout == "padded" else (num + 1, 1)
    best = np.zeros(num + 1, np.int64)
    first_of = np.zeros(num + 1, np.int64)
    low = 0
    for stop in range(1, num + 1):
        tokens = tokens_of(low, stop)
        fits = tokens <= budget
        fits[-1] = True  # an input that is too long alone has to go through all the same
        # More inputs never cost less, so what does not fit now never will again.
        skipped = int(fits.argmax())
        low += skipped
        costs = best[low:stop] + tokens[skipped:] * per_token + per_pass
        costs = np.where(fits[skipped:], costs, np.iinfo(np.int64).max)
        choice = int(costs.argmin())
        best[stop], first_of[stop] = costs[choice], low + choice
    runs = []
    stop = num
    while stop:
        runs.append(slice(int(first_of[stop]), stop))
        stop = int(first_of[stop])
    return runs[::-1]


class _Tokens:
    """Tokens of the runs [i, stop) for all i in [low, stop)."""

    def __init__(self, layout: Layout, lengths: Index, shared: Index) -> None:
        self.layout, self.lengths, self.shared = layout, lengths, shared
        # An input that the next one extends rides on it, unless the run ends in between.
        hosts = np.append(shared[1:] < lengths[:-1], True) if len(lengths) else np.zeros(0, np.bool_)
        self.fresh_before = np.concatenate(([0], np.cumsum(lengths - shared)))
        self.hosted_before = np.concatenate(([0], np.cumsum(np.where(hosts, lengths, 0))))
        self.rows_before = np.concatenate(([0], np.cumsum(hosts)))

    def __call__(self, low: int, stop: int) -> Index:
        last = stop - 1
        tokens: Index
        if self.layout == "tree":
            tokens = self.fresh_before[stop] - self.fresh_before[low:stop] + self.shared[low:stop]
        elif self.layout == "packed":
            tokens = self.hosted_before[last] - self.hosted_before[low:stop] + self.lengths[last]
        else:
            rows = self.rows_before[last] - self.rows_before[low:stop] + 1
            tokens = rows * np.maximum.accumulate(self.lengths[low:stop][::-1])[::-1]
        return tokens

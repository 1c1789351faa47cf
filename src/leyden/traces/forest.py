"""Radix forest of token sequences: every shared prefix once. Pure; no I/O, no torch.

It promises the same tokens, parents and intervals for the same set of sequences in any order, and a path for
each input. It does not know what a token means: equal ids after equal prefixes are one token.

Letters: U = unique tokens of the forest, S = tokens of one sequence, N = tokens of all sequences.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from leyden.base.errors import RecordError
from leyden.base.records import IntArray


@dataclass(frozen=True, slots=True, kw_only=True)
class Forest:
    """Tokens in depth-first order. Token q sees token k iff k <= q < end_U[k]."""

    tokens_U: IntArray
    """Token id."""
    parent_U: IntArray
    """Index of the token before it, -1 at a root; always smaller than its own index."""
    depth_U: IntArray
    """Position in its sequence; 0 at a root."""
    end_U: IntArray
    """One past the last token of the subtree; its Euler interval is [k, end_U[k])."""
    paths: Sequence[IntArray]
    """For each input sequence, in input order, the index of each of its tokens; shapes (S_i,)."""


def build_forest(sequences: Sequence[IntArray]) -> Forest:
    """Merge sequences by shared prefix, in time linear in their total length plus the sort of the rows.

    `sequences` are arrays of token ids, shapes (S_i,) with S_i >= 1; none at all give an empty forest.
    Siblings stand in the order of their ids, a sequence before its extensions; equal ones share one path.
    Raises RecordError for a sequence that is empty, not one-dimensional or holds what is no token id.
    """
    flat_N, starts = _flatten(sequences)
    order, shared = _sorted_rows(flat_N, starts)
    lengths = np.diff(starts)[order]
    fresh = lengths - shared
    heads = np.zeros(len(order) + 1, np.int64)
    np.cumsum(fresh, out=heads[1:])
    num_unique = int(heads[-1])
    assert num_unique < 2**31, "indices of a forest are int32"

    index_U = np.arange(num_unique, dtype=np.int32)
    depth_U = index_U - np.repeat(heads[:-1] - shared, fresh).astype(np.int32)
    tokens_U = np.empty(num_unique, np.int32)
    parent_U = index_U - np.int32(1)
    end_U = np.empty(num_unique, np.int32)
    paths: list[IntArray] = [index_U] * len(order)
    path: IntArray = index_U[:0]
    open_segments: list[tuple[int, int, int]] = []  # (first index, depth of the first, number) along the path
    for row, i in enumerate(order.tolist()):
        common, head, num_fresh = int(shared[row]), int(heads[row]), int(fresh[row])
        if num_fresh:
            _close(open_segments, common, head, end_U)
            open_segments.append((head, common, num_fresh))
            tokens_U[head : head + num_fresh] = flat_N[starts[i] + common : starts[i + 1]]
            parent_U[head] = path[common - 1] if common else -1
            path = np.concatenate((path[:common], index_U[head : head + num_fresh]))
        paths[i] = path
    _close(open_segments, 0, num_unique, end_U)
    return Forest(tokens_U=tokens_U, parent_U=parent_U, depth_U=depth_U, end_U=end_U, paths=paths)


def leaves(forest: Forest) -> IntArray:
    """Indices of the tokens that nothing follows, one per trajectory."""
    return np.flatnonzero(forest.end_U == np.arange(1, len(forest.end_U) + 1)).astype(np.int32)


def _flatten(sequences: Sequence[IntArray]) -> tuple[IntArray, NDArray[np.int64]]:
    """All tokens one after another, and where each sequence begins, with the end of the last."""
    rows = [np.asarray(sequence) for sequence in sequences]
    starts = np.zeros(len(rows) + 1, np.int64)
    for i, row in enumerate(rows):
        if row.ndim != 1 or row.size == 0:
            raise RecordError(f"sequence {i} has shape {row.shape}; a forest takes arrays of one dimension, not empty")
        if row.dtype.kind not in "iu":
            raise RecordError(f"sequence {i} has type {row.dtype}; token ids are integers")
        starts[i + 1] = row.size
    np.cumsum(starts, out=starts)
    if not rows:
        return np.zeros(0, np.int32), starts
    flat_N = np.concatenate(rows)
    if int(flat_N.min()) < 0 or int(flat_N.max()) >= 2**31:
        raise RecordError(f"token ids run from {flat_N.min()} to {flat_N.max()}; they must be in [0, 2**31)")
    return flat_N.astype(np.int32, copy=False), starts


def _sorted_rows(flat_N: IntArray, starts: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(rows in lexicographic order, tokens that each shares with the row before it)."""
    # Big-endian unsigned bytes compare like the ids: the sort is memcmp and makes no token objects.
    data = flat_N.astype(">u4").tobytes()
    bounds = starts.tolist()
    keys = [data[4 * low : 4 * high] for low, high in pairwise(bounds)]
    order = np.asarray(sorted(range(len(keys)), key=keys.__getitem__), np.int64)
    shared = np.zeros(len(order), np.int64)
    rows = order.tolist()
    for place in range(1, len(rows)):
        before, here = rows[place - 1], rows[place]
        num = min(len(keys[before]), len(keys[here])) // 4
        low, high = bounds[before], bounds[here]
        differs = flat_N[low : low + num] != flat_N[high : high + num]
        first = int(differs.argmax())
        shared[place] = first if differs[first] else num
    return order, shared


def _close(open_segments: list[tuple[int, int, int]], depth: int, end: int, end_U: IntArray) -> None:
    """End every open token at `depth` or below it; each token of the forest is ended exactly once."""
    while open_segments:
        first, at, num = open_segments[-1]
        kept = max(depth - at, 0)
        if kept >= num:
            return
        end_U[first + kept : first + num] = end
        open_segments.pop()
        if kept:
            open_segments.append((first, at, kept))
            return

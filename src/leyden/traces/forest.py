"""Radix forest of token sequences: every shared prefix once. Pure; no I/O, no torch.

Letters: U = unique tokens of the forest, S = tokens of one sequence.
"""

from collections.abc import Sequence
from dataclasses import dataclass

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
    """Merge sequences by shared prefix, in time linear in their total length plus the sort of the rows."""
    raise NotImplementedError

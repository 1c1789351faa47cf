"""The nodes of a forest: runs of tokens between two branchings. Pure, on arrays; no recursion, so no depth is too
deep.

It promises that the runs, in depth-first order, cover every token of the forest once, and that a run's tokens
have one child each but for the last. It says nothing about what a run means.

Letters: U = unique tokens of the forest, K = nodes of it.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from leyden.base.records import IntArray
from leyden.traces.forest import Forest


@dataclass(frozen=True, slots=True, kw_only=True)
class Nodes:
    """A forest with each unbranched run of tokens as one node, in depth-first order."""

    start_K: IntArray
    """First token of each node, ascending; node k is tokens [start_K[k], stop_K[k])."""
    stop_K: IntArray
    """One past its last token, which is the first of the next node."""
    parent_K: IntArray
    """The node above, -1 at a root; always smaller than its own index."""
    level_K: IntArray
    """Branchings above it; 0 at a root."""
    node_U: IntArray
    """The node of each token."""

    def __len__(self) -> int:
        return len(self.start_K)

    @property
    def sizes(self) -> IntArray:
        """Tokens of each node, shape (K,)."""
        return self.stop_K - self.start_K


def compress(forest: Forest) -> Nodes:
    """Nodes of `forest`, in time linear in its tokens."""
    num_unique = len(forest.tokens_U)
    at_U = np.arange(num_unique, dtype=np.int32)
    below = forest.parent_U[forest.parent_U >= 0]
    num_children_U = np.bincount(below, minlength=num_unique)
    # A run goes on only into the token behind it, and only if that is the one child.
    follows_U = (forest.parent_U == at_U - 1) & (forest.parent_U >= 0)
    goes_on_U = follows_U.copy()
    goes_on_U[follows_U] = num_children_U[forest.parent_U[follows_U]] == 1
    start_K = at_U[~goes_on_U]
    stop_K = np.append(start_K[1:], np.int32(num_unique)).astype(np.int32)[: len(start_K)]
    node_U = (np.cumsum(~goes_on_U) - 1).astype(np.int32)
    above_K = forest.parent_U[start_K]
    parent_K = np.where(above_K >= 0, node_U[above_K], -1).astype(np.int32)
    return Nodes(start_K=start_K, stop_K=stop_K, parent_K=parent_K, level_K=_levels(forest, start_K), node_U=node_U)


def rows_through(forest: Forest) -> NDArray[np.int64]:
    """How many of the input sequences run through each token, shape (U,); a sequence counts at each of its tokens."""
    num_unique = len(forest.tokens_U)
    last = np.asarray([path[-1] for path in forest.paths], np.int64)
    ends_at = np.concatenate(([0], np.cumsum(np.bincount(last, minlength=num_unique))))
    # A sequence runs through a token if, and only if, it ends inside that token's subtree.
    through: NDArray[np.int64] = ends_at[forest.end_U] - ends_at[np.arange(num_unique)]
    return through


def _levels(forest: Forest, start_K: IntArray) -> IntArray:
    """Branchings above each node: subtrees of nodes that are open when it begins, one of which is its own."""
    num_unique = len(forest.tokens_U)
    change = np.bincount(start_K, minlength=num_unique + 1) - np.bincount(
        forest.end_U[start_K], minlength=num_unique + 1
    )
    level_K: IntArray = (np.cumsum(change)[start_K] - 1).astype(np.int32)
    return level_K

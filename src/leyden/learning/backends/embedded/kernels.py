"""Attention of the training layouts: the kernel of a rule, and how many pairs of query and key it computes.

Promises: every kernel gives the softmax over exactly the keys that its rule and the window of the layer allow. What a
kernel prepares (masks, blocks) is made once per pass and shared by all layers with the same window.

A window changes rows and segments into what `tree_attention` computes anyway: a row is a chain, segments are a forest
of chains, and positions are depths.

    B rows   T columns   U tokens of a tree, below P tokens of a path whose keys and values are given
"""

import itertools

import numpy as np
import torch
from torch import Tensor, nn

from leyden.learning.backends.embedded import tree_attention
from leyden.learning.backends.embedded.attention import AttentionKernel, causal_kernel
from leyden.learning.backends.embedded.layouts import Causal, Rule, Segments, Tree
from leyden.learning.backends.embedded.tree_attention import DENSE_LIMIT


def kernel_for(
    rule: Rule, shape: tuple[int, ...], device: torch.device, dense_limit: int = DENSE_LIMIT
) -> AttentionKernel:
    """The kernel of a layout for ids of shape (B, T)."""
    plain: AttentionKernel | None = None
    match rule:
        case Causal():
            plain = causal_kernel
        case Segments(bounds):
            plain = _segments_kernel(bounds)
        case Tree():
            plain = causal_kernel if is_chain(rule) else None
    as_tree = _as_tree(rule, shape[-1])
    longest = int(tree_attention.depths(as_tree).max()) + 1 if shape[-1] else 0
    made: dict[int | None, AttentionKernel] = {}

    def kernel(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, scaling: float, window: int | None = None) -> Tensor:
        if window is not None and window >= longest:
            window = None  # nothing is far enough away to be hidden
        if window is None and plain is not None:
            return plain(module, q, k, v, scaling, None)
        if window not in made:
            made[window] = tree_attention.tree_kernel(as_tree, window, device, dense_limit)
        return made[window](module, q, k, v, scaling, window)

    return kernel


def computed_pairs(rule: Rule, shape: tuple[int, ...], dense_limit: int = DENSE_LIMIT) -> int:
    """Pairs of a query and a key that the CPU kernel of a layout computes for ids of shape (B, T), without a window."""
    match rule:
        case Causal():
            rows, columns = shape
            return rows * columns * (columns + 1) // 2
        case Segments(bounds):
            return sum(n * (n + 1) // 2 for n in (end - start for start, end in itertools.pairwise(bounds)))
        case Tree(end_U):
            if is_chain(rule):
                return len(end_U) * (len(end_U) + 1) // 2
            return tree_attention.num_pairs(rule, dense_limit)


def is_chain(rule: Rule) -> bool:
    """Whether it is a tree without a branch and a path above, so that plain causal attention is what it says."""
    return isinstance(rule, Tree) and not rule.num_above and bool((rule.end_U == len(rule.end_U)).all())


def _as_tree(rule: Rule, columns: int) -> Tree:
    match rule:
        case Causal():
            return Tree(np.full(columns, columns, np.int64))
        case Segments(bounds):
            return Tree(np.repeat(np.asarray(bounds[1:], np.int64), np.diff(bounds)))
        case Tree():
            return rule


def _segments_kernel(bounds: tuple[int, ...]) -> AttentionKernel:
    lengths = [end - start for start, end in itertools.pairwise(bounds)]

    def kernel(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, scaling: float, window: int | None = None) -> Tensor:
        parts = zip(*(torch.split(x, lengths, 2) for x in (q, k, v)), strict=True)
        return torch.cat([causal_kernel(module, q, k, v, scaling) for q, k, v in parts], 2)

    return kernel

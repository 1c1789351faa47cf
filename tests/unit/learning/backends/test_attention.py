"""Who sees whom: the tree's rule against brute-force ancestors, and every kernel against the dense one."""

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from leyden.base.errors import ModelUnusable
from leyden.learning.backends.embedded import attention
from leyden.learning.backends.embedded.layouts import Causal, Segments, Tree
from leyden.traces.forest import build_forest

CPU = torch.device("cpu")
MODULE = nn.Identity()


def random_parents(rng: np.random.Generator, size: int, straight: float) -> np.ndarray:
    """A forest in depth-first order: each token continues the one before it, or branches off one of its
    ancestors."""
    parents = np.full(size, -1, np.int64)
    for i in range(1, size):
        above = i - 1
        if rng.random() > straight:
            for _ in range(rng.integers(1, 6)):
                above = parents[above] if above >= 0 else -1
        parents[i] = above
    return parents


def ends_of(parents: np.ndarray) -> np.ndarray:
    ends = np.arange(1, len(parents) + 1)
    for i in reversed(range(len(parents))):
        if parents[i] >= 0:
            ends[parents[i]] = max(ends[parents[i]], ends[i])
    return ends


def ancestors(parents: np.ndarray) -> np.ndarray:
    """(U, U): whether k is q or above it, by walking up."""
    seen = np.zeros((len(parents), len(parents)), bool)
    for q in range(len(parents)):
        k = q
        while k >= 0:
            seen[q, k] = True
            k = parents[k]
    return seen


def qkv(size: int, heads: int = 4, kv_heads: int = 2, rows: int = 1) -> list[torch.Tensor]:
    torch.manual_seed(1)
    return [torch.randn(rows, h, size, 8, dtype=torch.float64, requires_grad=True) for h in (heads, kv_heads, kv_heads)]


def by_definition(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: np.ndarray, scaling: float) -> torch.Tensor:
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scores = (q @ k.transpose(-1, -2)) * scaling
    return torch.softmax(scores.masked_fill(~torch.from_numpy(seen), float("-inf")), -1) @ v


def agree(kernel: attention.AttentionKernel, seen: np.ndarray, inputs: list[torch.Tensor]) -> None:
    """Values and gradients of a kernel are those of the definition."""
    q, k, v = inputs
    out, expected = kernel(MODULE, q, k, v, 0.3), by_definition(q, k, v, seen, 0.3)
    assert torch.allclose(out, expected, atol=1e-10)
    direction = torch.randn_like(out)
    found = torch.autograd.grad(out, inputs, direction)
    wanted = torch.autograd.grad(expected, inputs, direction)
    for a, b in zip(found, wanted, strict=True):
        assert torch.allclose(a, b, atol=1e-10)


@given(st.integers(0, 10_000), st.integers(1, 60), st.sampled_from([0.5, 0.8, 0.97]))
@settings(max_examples=60, deadline=None)
def test_the_tree_rule_is_that_a_token_sees_itself_and_its_ancestors(seed: int, size: int, straight: float) -> None:
    parents = random_parents(np.random.default_rng(seed), size, straight)
    assert np.array_equal(attention.tree_mask(ends_of(parents)), ancestors(parents))


def test_the_rule_holds_for_the_forest_of_real_sequences() -> None:
    rng = np.random.default_rng(5)
    sequences = [rng.integers(0, 3, rng.integers(1, 30)).astype(np.int32) for _ in range(40)]
    forest = build_forest(sequences)
    assert np.array_equal(
        attention.tree_mask(forest.end_U.astype(np.int64)), ancestors(forest.parent_U.astype(np.int64))
    )


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("way", ["dense", "blocked", "masks anew", "public function"])
def test_every_tree_kernel_is_the_definition_on_deep_random_forests(
    seed: int, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "DENSE_LIMIT", 1 if way == "masks anew" else 2048)
    if way == "public function":
        monkeypatch.setattr(attention, "_flash", None)
    rng = np.random.default_rng(seed)
    parents = random_parents(rng, int(rng.integers(20, 150)), 0.9)
    ends = ends_of(parents)
    if way == "dense":
        kernel = attention._dense_tree_kernel(ends, CPU)
    else:
        kernel = attention._blocked_tree_kernel(attention.plan_blocks(ends, CPU, rows=16))
    agree(kernel, ancestors(parents), qkv(len(parents)))


def test_the_kernel_with_fewest_pairs_is_chosen() -> None:
    chain, forest = np.full(100, 100), np.repeat(np.arange(256, 2049, 256), 256)
    deep = np.full(3000, 3000)
    names = [attention.kernel_for(Tree(ends), CPU).__qualname__.split(".")[0] for ends in (chain, forest, deep)]
    assert names == ["_dense_tree_kernel", "_blocked_tree_kernel", "_blocked_tree_kernel"]


def test_blocks_hold_only_keys_that_one_of_their_rows_sees() -> None:
    # A trunk of 10 and 30 leaves of 10: the last block sees the trunk and its own leaves, not the other 290
    # tokens.
    ends = np.concatenate([np.full(10, 310), np.repeat(np.arange(20, 311, 10), 10)])
    blocks = attention.plan_blocks(ends, CPU, rows=20)
    assert all(1 <= b.stop - b.start <= 20 for b in blocks)
    assert max(len(b.key_J) for b in blocks) <= 10 + 20
    assert sorted(q for b in blocks for q in range(b.start, b.stop)) == list(range(310))


def test_a_block_ends_between_groups_where_it_can() -> None:
    # Three separate trees of 150, 160 and 170 tokens, each a trunk of 100 and leaves of 10.
    parts, offset = [], 0
    for size in (150, 160, 170):
        ends = np.concatenate([np.full(100, size), np.repeat(np.arange(110, size + 1, 10), 10)])
        parts.append(ends + offset)
        offset += size
    blocks = attention.plan_blocks(np.concatenate(parts), CPU, rows=200)
    assert [(b.start, b.stop) for b in blocks] == [(0, 150), (150, 310), (310, 480)]


def test_packed_segments_are_blind_to_each_other() -> None:
    bounds = (0, 5, 6, 14)
    seen = np.zeros((14, 14), bool)
    for start, end in itertools.pairwise(bounds):
        seen[start:end, start:end] = np.tril(np.ones((end - start, end - start), bool))
    agree(attention.kernel_for(Segments(bounds), CPU), seen, qkv(14))


def test_padded_rows_are_causal() -> None:
    agree(attention.kernel_for(Causal(), CPU), np.tril(np.ones((9, 9), bool)), qkv(9, rows=3))


def attend(**extra: Any) -> tuple[torch.Tensor, None]:
    """As an attention layer of transformers calls it."""
    q, k, v = qkv(3)
    return attention._attend(MODULE, q, k, v, None, **extra)


def test_attention_outside_a_scope_is_an_assertion_and_scopes_nest() -> None:
    with pytest.raises(AssertionError, match="outside attention_scope"):
        attend()

    def other(module: nn.Module, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scaling: float) -> torch.Tensor:
        return torch.zeros_like(q)

    with attention.attention_scope(attention.causal_kernel):
        with attention.attention_scope(other):
            assert not attend()[0].any()
        assert attend()[0].any()


def test_an_attention_that_is_more_than_a_softmax_is_refused_by_name() -> None:
    with attention.attention_scope(attention.causal_kernel), pytest.raises(ModelUnusable, match="softcap"):
        attend(softcap=50.0)


class Largest(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the largest tensor that an operation makes, in elements."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.num_elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for one in made if isinstance(made, tuple | list) else [made]:
            if isinstance(one, torch.Tensor):
                self.num_elements = max(self.num_elements, one.numel())
        return made


def test_above_the_threshold_no_tensor_grows_with_the_square_of_the_tree() -> None:
    size = attention.DENSE_LIMIT + 1000
    parents = random_parents(np.random.default_rng(0), size, 0.999)
    ends = ends_of(parents)
    q, k, v = (torch.randn(1, 1, size, 8, requires_grad=True) for _ in range(3))
    with Largest() as seen:
        kernel = attention.kernel_for(Tree(ends), CPU)
        kernel(MODULE, q, k, v, 0.3).sum().backward()  # type: ignore[no-untyped-call]
    assert size * 8 <= seen.num_elements <= attention.BLOCK_ROWS * size
    assert seen.num_elements < size * size / 10


def test_above_the_threshold_blocks_agree_with_the_definition() -> None:
    size = 600
    parents = random_parents(np.random.default_rng(1), size, 0.99)
    kernel = attention.kernel_for(Tree(ends_of(parents)), CPU, dense_limit=100)
    assert "_blocked_tree_kernel" in kernel.__qualname__
    agree(kernel, ancestors(parents), qkv(size, heads=2, kv_heads=1))


def test_computed_pairs_are_those_of_the_kernel_that_is_chosen() -> None:
    assert attention.computed_pairs(Causal(), (3, 4)) == 3 * 10
    assert attention.computed_pairs(Segments((0, 2, 5)), (1, 5)) == 3 + 6
    assert attention.computed_pairs(Tree(np.full(100, 100)), (1, 100)) == 100 * 100
    forest = np.repeat(np.arange(256, 2049, 256), 256)
    assert attention.computed_pairs(Tree(forest), (1, 2048)) == 8 * 256 * 256


def test_flex_attention_is_for_cuda_with_its_compiler_only() -> None:
    assert not attention.has_flex(CPU)
    names = attention.kernel_for(Tree(np.full(5000, 5000)), CPU).__qualname__
    assert "flex" not in names

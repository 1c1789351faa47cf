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
from leyden.learning.backends.embedded import attention, kernels, tree_attention
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


def agree(
    kernel: attention.AttentionKernel, seen: np.ndarray, inputs: list[torch.Tensor], window: int | None = None
) -> None:
    """Values and gradients of a kernel are those of the definition."""
    q, k, v = inputs
    out, expected = kernel(MODULE, q, k, v, 0.3, window), by_definition(q, k, v, seen, 0.3)
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
    assert np.array_equal(tree_attention.tree_mask(Tree(ends_of(parents))), ancestors(parents))


def test_the_rule_holds_for_the_forest_of_real_sequences() -> None:
    rng = np.random.default_rng(5)
    sequences = [rng.integers(0, 3, rng.integers(1, 30)).astype(np.int32) for _ in range(40)]
    forest = build_forest(sequences)
    assert np.array_equal(
        tree_attention.tree_mask(Tree(forest.end_U.astype(np.int64))), ancestors(forest.parent_U.astype(np.int64))
    )


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("way", ["dense", "blocked", "masks anew", "public function"])
def test_every_tree_kernel_is_the_definition_on_deep_random_forests(
    seed: int, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tree_attention, "DENSE_LIMIT", 1 if way == "masks anew" else 2048)
    if way == "public function":
        monkeypatch.setattr(tree_attention, "_flash", None)
    rng = np.random.default_rng(seed)
    parents = random_parents(rng, int(rng.integers(20, 150)), 0.9)
    ends = ends_of(parents)
    if way == "dense":
        kernel = tree_attention._dense_kernel(Tree(ends), None, CPU)
    else:
        kernel = tree_attention._blocked_kernel(tree_attention.plan_blocks(Tree(ends), CPU, rows=16))
    agree(kernel, ancestors(parents), qkv(len(parents)))


def name_of(ends: np.ndarray, dense_limit: int = tree_attention.DENSE_LIMIT) -> str:
    kernel = tree_attention.tree_kernel(Tree(ends), None, CPU, dense_limit)
    return kernel.__qualname__.split(".")[0]


@pytest.mark.parametrize(
    ("rows", "heads", "expected"), [(800, 12, 1), (400, 12, 2), (256, 12, 3), (5, 12, 6), (5, 2, 1)]
)
def test_heads_that_share_keys_become_rows_until_there_are_enough(rows: int, heads: int, expected: int) -> None:
    assert tree_attention.folds_of(torch.zeros(1, heads, rows, 8), torch.zeros(1, 2, 7, 8)) == expected


@pytest.mark.parametrize("full", [1, 20, 60])
def test_heads_as_rows_change_nothing(full: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tree_attention, "FULL_ROWS", full)
    parents = random_parents(np.random.default_rng(full), 70, 0.9)
    tree = Tree(ends_of(parents))
    for kernel in (
        tree_attention._dense_kernel(tree, None, CPU),
        tree_attention._blocked_kernel(tree_attention.plan_blocks(tree, CPU, 16)),
    ):
        agree(kernel, ancestors(parents), qkv(70, heads=12, kv_heads=2))


def test_the_kernel_with_fewest_pairs_is_chosen() -> None:
    chain, forest = np.full(100, 100), np.repeat(np.arange(256, 2049, 256), 256)
    deep = np.full(3000, 3000)
    assert [name_of(ends) for ends in (chain, forest, deep)] == ["_dense_kernel", "_blocked_kernel", "_blocked_kernel"]


def test_blocks_hold_only_keys_that_one_of_their_rows_sees() -> None:
    # A trunk of 10 and 30 leaves of 10: the last block sees the trunk and its own leaves, not the other 290
    # tokens.
    ends = np.concatenate([np.full(10, 310), np.repeat(np.arange(20, 311, 10), 10)])
    blocks = tree_attention.plan_blocks(Tree(ends), CPU, rows=20)
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
    blocks = tree_attention.plan_blocks(Tree(np.concatenate(parts)), CPU, rows=200)
    assert [(b.start, b.stop) for b in blocks] == [(0, 150), (150, 310), (310, 480)]


def near(parents: np.ndarray, window: int) -> np.ndarray:
    """(U, U): whether k is fewer than `window` steps above q, by walking up."""
    seen = np.zeros((len(parents), len(parents)), bool)
    for q in range(len(parents)):
        k = q
        for _ in range(window):
            if k < 0:
                break
            seen[q, k] = True
            k = parents[k]
    return seen


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("window", [None, 1, 5, 40])
@pytest.mark.parametrize("way", ["dense", "blocked", "masks anew"])
def test_tokens_below_a_path_see_it_and_a_window_ends_at_its_length(
    seed: int, window: int | None, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tree_attention, "DENSE_LIMIT", 1 if way == "masks anew" else 2048)
    rng = np.random.default_rng(seed)
    P = int(rng.integers(1, 30))
    size = P + int(rng.integers(20, 100))
    parents = random_parents(rng, size, 0.9)
    parents[: P + 1] = np.arange(-1, P)  # the first tokens are the path, and the next one stands below it
    parents = np.where((np.arange(size) > P) & (parents < P), P - 1, parents)
    seen = ancestors(parents) if window is None else near(parents, window)
    tree = Tree(ends_of(parents)[P:] - P, P)
    depth = [int(row.sum()) - 1 for row in ancestors(parents)]
    assert tree_attention.depths(tree).tolist() == depth
    if way == "dense":
        kernel = tree_attention._dense_kernel(tree, window, CPU)
    else:
        kernel = tree_attention._blocked_kernel(tree_attention.plan_blocks(tree, CPU, 16, window))
    q, k, v = qkv(size)
    agree(kernel, seen[P:], [q[:, :, P:].detach().requires_grad_(), k, v], window)


def test_blocks_of_a_window_leave_out_what_is_too_far_away() -> None:
    blocks = tree_attention.plan_blocks(Tree(np.full(1000, 1000)), CPU, 150, window=50)
    assert [(b.start, b.stop, len(b.key_J)) for b in blocks[:2]] == [(0, 100, 100), (100, 200, 100 + 49)]
    assert blocks[-1].stop == 1000


@pytest.mark.parametrize("window", [1, 3, 8, 100])
def test_rows_and_segments_have_windows_too(window: int) -> None:
    band = np.tril(np.ones((14, 14), bool)) & ~np.tril(np.ones((14, 14), bool), -window)
    agree(kernels.kernel_for(Causal(), (3, 14), CPU), band, qkv(14, rows=3), window)
    agree(attention.causal_kernel, band, qkv(14, rows=3), window)
    bounds = (0, 5, 6, 14)
    apart = np.repeat(np.arange(3), np.diff(bounds))
    agree(kernels.kernel_for(Segments(bounds), (1, 14), CPU), band & (apart[:, None] == apart), qkv(14), window)


def test_packed_segments_are_blind_to_each_other() -> None:
    bounds = (0, 5, 6, 14)
    seen = np.zeros((14, 14), bool)
    for start, end in itertools.pairwise(bounds):
        seen[start:end, start:end] = np.tril(np.ones((end - start, end - start), bool))
    agree(kernels.kernel_for(Segments(bounds), (1, 14), CPU), seen, qkv(14))


def test_padded_rows_are_causal() -> None:
    agree(kernels.kernel_for(Causal(), (3, 9), CPU), np.tril(np.ones((9, 9), bool)), qkv(9, rows=3))


def attend(**extra: Any) -> tuple[torch.Tensor, None]:
    """As an attention layer of transformers calls it."""
    q, k, v = qkv(3)
    return attention._attend(MODULE, q, k, v, None, **extra)


def test_attention_outside_a_scope_is_an_assertion_and_scopes_nest() -> None:
    with pytest.raises(AssertionError, match="outside attention_scope"):
        attend()

    def other(
        module: nn.Module, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scaling: float, window: int | None
    ) -> torch.Tensor:
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
    size = tree_attention.DENSE_LIMIT + 1000
    parents = random_parents(np.random.default_rng(0), size, 0.999)
    ends = ends_of(parents)
    q, k, v = (torch.randn(1, 1, size, 8, requires_grad=True) for _ in range(3))
    with Largest() as seen:
        kernel = kernels.kernel_for(Tree(ends), (1, size), CPU)
        kernel(MODULE, q, k, v, 0.3, None).sum().backward()  # type: ignore[no-untyped-call]
    assert size * 8 <= seen.num_elements <= tree_attention.BLOCK_ROWS * size
    assert seen.num_elements < size * size / 10


def test_above_the_threshold_blocks_agree_with_the_definition() -> None:
    size = 600
    parents = random_parents(np.random.default_rng(1), size, 0.99)
    assert name_of(ends_of(parents), dense_limit=100) == "_blocked_kernel"
    kernel = kernels.kernel_for(Tree(ends_of(parents)), (1, size), CPU, dense_limit=100)
    agree(kernel, ancestors(parents), qkv(size, heads=2, kv_heads=1))


def test_computed_pairs_are_those_of_the_kernel_that_is_chosen() -> None:
    assert kernels.computed_pairs(Causal(), (3, 4)) == 3 * 10
    assert kernels.computed_pairs(Segments((0, 2, 5)), (1, 5)) == 3 + 6
    assert kernels.computed_pairs(Tree(np.full(100, 100)), (1, 100)) == 100 * 101 // 2  # a chain is causal
    forest = np.repeat(np.arange(256, 2049, 256), 256)
    assert kernels.computed_pairs(Tree(forest), (1, 2048)) == 8 * 256 * 256


def test_flex_attention_is_for_cuda_with_its_compiler_only() -> None:
    assert not tree_attention.has_flex(CPU)
    assert "flex" not in name_of(np.full(5000, 5000))

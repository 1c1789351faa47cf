"""A walk of one path at a time: the gradient of the whole tree, every token once, and only a path alive."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.learning.backends.test_attention import ends_of, random_parents
from tests.unit.learning.backends.tiny import (
    CONFIGS,
    gradients,
    make_batch,
    make_loaded,
    random_sequences,
    relative_difference,
)

from leyden.base.config import LearnConfig, LoraConfig
from leyden.learning.backends.base import Objective
from leyden.learning.backends.embedded import descent
from leyden.learning.backends.embedded.descent import Chunk, descend
from leyden.learning.backends.embedded.layouts import plan_passes
from leyden.learning.backends.embedded.model import LoadedModel
from leyden.learning.backends.embedded.trainer import Trainer
from leyden.learning.batch import Batch


@pytest.fixture
def every_trunk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short trunks get passes of their own too; tiny sequences have no others."""
    monkeypatch.setattr(descent, "PASS_TOKENS", 0)


def walk(chunks: list[Chunk]) -> list[tuple[Chunk, list[int]]]:
    """Each chunk with the tokens of the trunks above it."""
    found: list[tuple[Chunk, list[int]]] = []
    trunks: list[Chunk] = []
    for chunk in chunks:
        assert len(trunks) >= chunk.level
        del trunks[chunk.level :]
        found.append((chunk, [int(t) for trunk in trunks for t in trunk.tokens]))
        if chunk.is_trunk:
            trunks.append(chunk)
    return found


@given(
    st.integers(0, 10_000), st.integers(1, 200), st.sampled_from([0.6, 0.9, 0.98]), st.integers(1, 250), st.booleans()
)
@settings(max_examples=150, deadline=None)
def test_every_token_is_computed_below_exactly_its_ancestors(
    seed: int, size: int, straight: float, budget: int, cheap: bool
) -> None:
    parents = random_parents(np.random.default_rng(seed), size, straight)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(descent, "PASS_TOKENS", 0 if cheap else 64)
        chunks = descend(ends_of(parents), budget)
    computed = np.concatenate([chunk.tokens for chunk in chunks])
    assert set(computed.tolist()) == set(range(size))
    if cheap:
        assert len(computed) == size
    for chunk, above in walk(chunks):
        assert chunk.num_above == len(above)
        for row, token in enumerate(chunk.tokens.tolist()):
            seen = above + [int(t) for k, t in enumerate(chunk.tokens) if k <= row < chunk.end[k]]
            ancestors = []
            while token >= 0:
                ancestors.append(token)
                token = int(parents[token])
            assert seen == ancestors[::-1]


@given(st.integers(0, 10_000), st.integers(20, 400), st.integers(16, 400))
@settings(max_examples=80, deadline=None)
def test_a_path_and_what_is_below_it_fit_the_budget_wherever_a_path_leaves_room(
    seed: int, size: int, budget: int
) -> None:
    parents = random_parents(np.random.default_rng(seed), size, 0.95)
    ends = ends_of(parents)
    for chunk, _ in walk(descend(ends, budget)):
        branches = bool((np.diff(chunk.end) != 0).any())
        if branches:  # a single trajectory has nothing that could be left for another pass
            assert len(chunk.tokens) <= max(budget - chunk.num_above, budget // 4)


def test_what_fits_is_one_pass_and_an_empty_forest_is_none() -> None:
    ends = ends_of(random_parents(np.random.default_rng(0), 100, 0.9))
    (one,) = descend(ends, 100)
    assert (len(one.tokens), one.level, one.is_trunk) == (100, 0, False)
    assert descend(np.zeros(0, np.int64), 100) == []


def test_a_short_system_prompt_is_computed_again_rather_than_given_a_pass() -> None:
    # 5 tokens above three groups of 100 + 4 x 50: the groups are cut, their trunks are passes, the 5 tokens are not.
    parts, at = [np.full(5, 905)], 5
    for _ in range(3):
        parts.append(np.full(100, at + 300))
        parts += [np.full(50, at + 150 + 50 * leaf) for leaf in range(4)]
        at += 300
    chunks = descend(np.concatenate(parts), 210)
    trunks = [chunk for chunk in chunks if chunk.is_trunk]
    assert [len(chunk.tokens) for chunk in trunks] == [105] * 3
    assert all(chunk.tokens[:5].tolist() == [0, 1, 2, 3, 4] for chunk in trunks)
    leaves = [chunk for chunk in chunks if not chunk.is_trunk]
    assert [(len(chunk.tokens), chunk.num_above) for chunk in leaves] == [(100, 105)] * 6


def batch_of(seed: int = 0, num: int = 14) -> Batch:
    rng = np.random.default_rng(seed)
    return make_batch(random_sequences(rng, num), rng)


def accumulate(loaded: LoadedModel, batch: Batch, layout: str, budget: int = 20, **learn: Any) -> Any:
    trainer = Trainer(loaded, LearnConfig(layout=layout, token_budget=budget, **learn))
    loss = trainer.accumulate(batch, Objective(surrogate="ppo_clip", kl=0.1, entropy=0.1), logp_reference_N=np.full(
        batch.num_labels, -3.0
    ))  # fmt: skip
    return loss, gradients(loaded)


@pytest.mark.usefixtures("every_trunk")
@pytest.mark.parametrize("lora", [None, LoraConfig(rank=3), LoraConfig(rank=2, targets=("o_proj",))])
@pytest.mark.parametrize("kind", CONFIGS)
def test_the_gradient_is_that_of_single_sequences(kind: str, lora: LoraConfig | None) -> None:
    loaded = make_loaded(kind, lora=lora)
    loaded.model.to(torch.float64)
    if lora:
        for name, parameter in loaded.trainable().items():
            if "lora_B" in name:  # it begins at 0, and then lora_A has no gradient
                torch.nn.init.normal_(parameter, std=0.1)
    batch = batch_of(len(kind))
    passes = plan_passes(batch, "depth_first", 20)
    assert sum(one.is_trunk for one in passes) >= 3 and max(one.level for one in passes) >= 2
    loss, expected = accumulate(loaded, batch, "single")
    for checkpointing in (False, True):
        other_loss, found = accumulate(loaded, batch, "depth_first", activation_checkpointing=checkpointing)
        assert abs(loss - other_loss) < 1e-10
        assert relative_difference(found, expected) < 1e-9


@pytest.mark.usefixtures("every_trunk")
def test_trunks_without_a_label_of_their_own_get_the_gradient_of_what_is_below() -> None:
    loaded = make_loaded()
    loaded.model.to(torch.float64)
    rng = np.random.default_rng(1)
    system = rng.integers(0, 60, 12)
    actions = []
    for _ in range(3):
        question = np.concatenate([system, rng.integers(0, 60, 8)])
        actions += [(np.concatenate([question, rng.integers(0, 60, 9)]).astype(np.int32), 20) for _ in range(4)]
    batch = make_batch(actions, rng)
    first = plan_passes(batch, "depth_first", 40)[0]
    assert first.is_trunk and not len(first.label_L)
    expected = accumulate(loaded, batch, "single")[1]
    assert relative_difference(accumulate(loaded, batch, "depth_first", 40)[1], expected) < 1e-9
    logps = [Trainer(loaded, LearnConfig(layout=x, token_budget=40)).logprobs(batch) for x in ("single", "depth_first")]
    assert np.allclose(logps[0], logps[1], atol=1e-6)


@pytest.mark.usefixtures("every_trunk")
def test_activation_checkpointing_changes_no_bit_in_bfloat16() -> None:
    loaded = make_loaded(dtype="bfloat16")
    plain = accumulate(loaded, batch_of(), "depth_first")[1]
    again = accumulate(loaded, batch_of(), "depth_first", activation_checkpointing=True)[1]
    assert all(torch.equal(plain[name], again[name]) for name in plain)
    tree = accumulate(loaded, batch_of(), "tree")[1]
    assert relative_difference(plain, tree) < 0.05


class Alive:
    """Bytes that autograd keeps for backward, now and at most; one storage counts once."""

    def __init__(self) -> None:
        self.now = self.peak = 0
        self._counts: dict[int, int] = {}

    def pack(self, tensor: torch.Tensor) -> "_Held":
        storage = tensor.untyped_storage()
        key = storage.data_ptr()
        if not self._counts.get(key):
            self.now += storage.nbytes()
            self.peak = max(self.peak, self.now)
        self._counts[key] = self._counts.get(key, 0) + 1
        return _Held(self, tensor, key, storage.nbytes())

    def drop(self, key: int, num_bytes: int) -> None:
        self._counts[key] -= 1
        if not self._counts[key]:
            self.now -= num_bytes


class _Held:
    def __init__(self, alive: Alive, tensor: torch.Tensor, key: int, num_bytes: int) -> None:
        self.alive, self.tensor, self.key, self.num_bytes = alive, tensor, key, num_bytes

    def __del__(self) -> None:
        self.alive.drop(self.key, self.num_bytes)


def peak_bytes(loaded: LoadedModel, batch: Batch, layout: str, budget: int) -> int:
    alive = Alive()
    with torch.autograd.graph.saved_tensors_hooks(alive.pack, lambda held: held.tensor):
        accumulate(loaded, batch, layout, budget)
    assert alive.now == 0, "a graph outlived its update"
    return alive.peak


def test_only_one_path_and_one_branch_are_alive_and_shared_tokens_are_computed_once() -> None:
    rng = np.random.default_rng(0)
    prompt = rng.integers(0, 60, 80)
    batch = make_batch([(np.concatenate([prompt, rng.integers(0, 60, 21)]).astype(np.int32), 80)] * 1, rng)
    actions = [(np.concatenate([prompt, rng.integers(0, 60, 21)]).astype(np.int32), 80) for _ in range(16)]
    group = make_batch(actions, rng)
    loaded = make_loaded()
    budget = 80 + 20
    tokens = {x: sum(p.num_tokens for p in plan_passes(group, x, budget)) for x in ("tree", "depth_first")}
    assert tokens == {"tree": 16 * 100, "depth_first": 80 + 16 * 20}
    one = peak_bytes(loaded, batch, "tree", 4096)
    whole = peak_bytes(loaded, group, "tree", 4096)
    walked = peak_bytes(loaded, group, "depth_first", budget)
    assert walked < 1.3 * one and walked < whole / 2


def test_an_interrupted_walk_leaves_nothing_behind() -> None:
    loaded = make_loaded()
    batch = batch_of()
    expected = accumulate(loaded, batch, "depth_first")[1]
    trainer = Trainer(loaded, LearnConfig(layout="depth_first", token_budget=20))
    labels_of, calls = trainer._labels_of, []

    def failing(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return labels_of(*args, **kwargs)

    trainer._labels_of = failing  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        trainer.accumulate(batch, Objective())
    gradients(loaded)
    assert relative_difference(accumulate(loaded, batch, "depth_first")[1], expected) < 1e-6

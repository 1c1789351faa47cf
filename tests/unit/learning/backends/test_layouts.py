"""Every label is computed once, from the token before it, in passes that respect the budget."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.learning.backends.tiny import make_batch, random_sequences

from leyden.learning.backends.embedded import descent
from leyden.learning.backends.embedded.layouts import Causal, Pass, Segments, Tree, plan_passes
from leyden.learning.batch import Batch

LAYOUTS = ("single", "padded", "packed", "tree", "depth_first")


def seen_by(one: Pass, source: int, above: list[int]) -> list[int]:
    """Token ids that the token at a flat index sees, itself last; `above` are those of the trunks above the pass."""
    T = one.ids_BT.shape[1]
    row, column = divmod(source, T)
    ids = one.ids_BT[row]
    match one.rule:
        case Causal():
            keys = range(column + 1)
        case Segments(bounds):
            keys = range(max(b for b in bounds if b <= column), column + 1)
        case Tree(end_U, num_above):
            assert num_above == len(above)
            return above + [int(ids[k]) for k in range(column + 1) if column < end_U[k]]
    return [int(ids[k]) for k in keys]


def check_passes(batch: Batch, passes: list[Pass], active_N: np.ndarray) -> None:
    computed = np.concatenate([p.label_L for p in passes]) if passes else np.zeros(0, np.int64)
    assert sorted(computed.tolist()) == np.flatnonzero(active_N).tolist()
    trunks: list[Pass] = []
    for one in passes:
        assert len(trunks) >= one.level
        del trunks[one.level :]
        above = [int(token) for trunk in trunks for token in trunk.ids_BT[0]]
        for label, source in zip(one.label_L.tolist(), one.source_L.tolist(), strict=True):
            a = int(batch.action_N[label])
            place = int(batch.prompt_len_A[a] + batch.offset_N[label])
            # What the model reads before the label is exactly what was read when it was sampled.
            assert seen_by(one, source, above) == batch.sequences[a][:place].tolist()
            assert one.positions_BT.flat[source] == place - 1
        if one.is_trunk:
            trunks.append(one)


@given(
    st.integers(0, 10_000), st.sampled_from(LAYOUTS), st.sampled_from([1, 20, 60, 10_000]), st.booleans(), st.booleans()
)
@settings(max_examples=120, deadline=None)
def test_each_label_is_predicted_once_from_exactly_what_was_read(
    seed: int, layout: str, budget: int, some: bool, cheap: bool
) -> None:
    rng = np.random.default_rng(seed)
    batch = make_batch(random_sequences(rng, 10), rng)
    active_N = rng.random(batch.num_labels) < (0.5 if some else 2.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(descent, "PASS_TOKENS", 0 if cheap else 64)  # whether short trunks get a pass of their own
        passes = plan_passes(batch, layout, budget, active_N)  # type: ignore[arg-type]
    check_passes(batch, passes, active_N)
    longest = max((len(s) for s in batch.sequences), default=0)
    for one in passes:
        assert one.num_tokens <= max(budget, longest)


def test_a_group_is_computed_once_in_the_tree_and_prefixes_ride_in_padded_and_packed() -> None:
    prompt = list(range(10))
    first = (np.asarray([*prompt, 20, 21, 22], np.int32), 10)
    second = (np.asarray([*prompt, 20, 21, 22, 40, 30, 31], np.int32), 14)
    sibling = (np.asarray([*prompt, 25, 26, 27, 28], np.int32), 10)
    batch = make_batch([first, second, sibling], np.random.default_rng(0))
    tokens = {}
    for layout in LAYOUTS:
        passes = plan_passes(batch, layout, 4096)  # type: ignore[arg-type]
        tokens[layout] = sum(p.num_tokens for p in passes)
    # The last token of each input predicts nothing and is left out.
    assert tokens == {
        "single": 12 + 15 + 13, "padded": 2 * 15, "packed": 15 + 13, "tree": 10 + 5 + 3, "depth_first": 10 + 5 + 3,
    }  # fmt: skip


def test_a_boundary_token_has_several_labels() -> None:
    actions = [(np.asarray([1, 2, 3, 10 + i], np.int32), 3) for i in range(4)]
    batch = make_batch(actions, np.random.default_rng(0))
    (one,) = plan_passes(batch, "tree", 4096)
    assert one.ids_BT.tolist() == [[1, 2, 3]]
    assert one.source_L.tolist() == [2, 2, 2, 2]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_budget_cuts_between_groups_not_through_them(layout: str) -> None:
    rng = np.random.default_rng(0)
    groups = [np.concatenate([[g], rng.integers(0, 60, 19)]).astype(np.int32) for g in range(3)]
    # Interleaved as they arrive; a group of four shares its prompt.
    actions = [
        (np.concatenate([groups[g], rng.integers(0, 60, 6)]).astype(np.int32), 20) for _ in range(4) for g in range(3)
    ]
    batch = make_batch(actions, rng)
    passes = plan_passes(batch, layout, 100)  # type: ignore[arg-type]
    assert len(passes) == {"single": 12, "padded": 3, "packed": 3, "tree": 2, "depth_first": 2}[layout]
    if layout in ("tree", "depth_first"):
        assert sum(p.num_tokens for p in passes) == 3 * (20 + 4 * 5)


def test_nothing_active_is_no_pass() -> None:
    rng = np.random.default_rng(0)
    batch = make_batch(random_sequences(rng, 3), rng)
    assert plan_passes(batch, "tree", 100, np.zeros(batch.num_labels, np.bool_)) == []

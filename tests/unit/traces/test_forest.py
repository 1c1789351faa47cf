import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.traces.making import ids

from leyden.base.errors import RecordError
from leyden.base.records import IntArray
from leyden.traces.forest import Forest, build_forest, leaves

# Few distinct ids and short rows: most random sets share prefixes, contain each other and repeat.
rows = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=8), min_size=1, max_size=12)


def arrays(sequences: list[list[int]]) -> list[IntArray]:
    return [np.asarray(sequence, np.int32) for sequence in sequences]


def trie(sequences: list[list[int]]) -> set[tuple[int, ...]]:
    """The obvious reference: a node is a prefix."""
    return {tuple(s[: n + 1]) for s in sequences for n in range(len(s))}


def prefixes(forest: Forest) -> list[tuple[int, ...]]:
    """The prefix that each token stands for, by walking up."""
    found: list[tuple[int, ...]] = []
    for u, parent in enumerate(forest.parent_U.tolist()):
        assert parent < u
        found.append((*(found[parent] if parent >= 0 else ()), int(forest.tokens_U[u])))
    return found


@given(rows)
def test_the_tokens_of_a_forest_are_the_nodes_of_a_trie(sequences: list[list[int]]) -> None:
    found = prefixes(build_forest(arrays(sequences)))
    assert len(found) == len(set(found))
    assert set(found) == trie(sequences)


@given(rows)
def test_every_path_spells_its_sequence_from_a_root(sequences: list[list[int]]) -> None:
    forest = build_forest(arrays(sequences))
    found = prefixes(forest)
    assert len(forest.paths) == len(sequences)
    for sequence, path in zip(sequences, forest.paths, strict=True):
        assert [found[u] for u in path] == [tuple(sequence[: n + 1]) for n in range(len(sequence))]


@given(rows)
def test_depth_is_the_position_in_the_sequence(sequences: list[list[int]]) -> None:
    forest = build_forest(arrays(sequences))
    assert [len(prefix) - 1 for prefix in prefixes(forest)] == forest.depth_U.tolist()


@given(rows)
def test_a_token_sees_exactly_itself_and_its_ancestors(sequences: list[list[int]]) -> None:
    forest = build_forest(arrays(sequences))
    found = prefixes(forest)
    k = np.arange(len(found))
    sees = (k[None, :] <= k[:, None]) & (k[:, None] < forest.end_U[None, :])
    for q, below in enumerate(found):
        assert [below[: len(above)] == above for above in found] == sees[q].tolist()


@given(rows, st.randoms(use_true_random=False))
def test_the_order_of_the_input_changes_nothing_but_the_order_of_the_paths(
    sequences: list[list[int]], random: object
) -> None:
    order = list(range(len(sequences)))
    random.shuffle(order)  # type: ignore[attr-defined]
    one, two = build_forest(arrays(sequences)), build_forest(arrays([sequences[i] for i in order]))
    for name in ("tokens_U", "parent_U", "depth_U", "end_U"):
        assert np.array_equal(getattr(one, name), getattr(two, name))
    assert all(np.array_equal(two.paths[place], one.paths[i]) for place, i in enumerate(order))


@given(rows)
def test_leaves_are_the_sequences_that_no_other_extends(sequences: list[list[int]]) -> None:
    forest = build_forest(arrays(sequences))
    nodes = trie(sequences)
    ends = {node for node in nodes if not any(other[:-1] == node for other in nodes)}
    found = prefixes(forest)
    assert {found[u] for u in leaves(forest)} == ends
    assert len(leaves(forest)) == len(ends)


def test_interleaved_agents_give_two_trajectories() -> None:
    a1, b1 = [1, 10, 11], [1, 20, 21]
    a2, b2 = [*a1, 12, 13], [*b1, 22]
    forest = build_forest(arrays([a1, b1, a2, b2]))
    assert len(leaves(forest)) == 2
    assert len(forest.tokens_U) == 1 + 4 + 3
    assert np.array_equal(forest.paths[2][:3], forest.paths[0])
    assert np.array_equal(forest.paths[3][:3], forest.paths[1])


def test_identical_sequences_share_one_path() -> None:
    forest = build_forest([ids(4, 5), ids(9), ids(4, 5)])
    assert forest.paths[0] is forest.paths[2]
    assert len(forest.tokens_U) == 3


def test_a_prefix_ends_inside_the_longer_sequence() -> None:
    forest = build_forest([ids(1, 2, 3), ids(1, 2)])
    assert forest.paths[1].tolist() == [0, 1]
    assert forest.end_U.tolist() == [3, 3, 3]


def test_ids_above_a_byte_keep_their_order() -> None:
    # Little-endian bytes would put 256 before 1 and separate the two rows that share it.
    forest = build_forest([ids(256, 1), ids(1), ids(256, 2), ids(65536)])
    assert forest.tokens_U.tolist() == [1, 256, 1, 2, 65536]


def test_no_sequences_give_an_empty_forest() -> None:
    forest = build_forest([])
    assert len(forest.tokens_U) == len(forest.parent_U) == len(forest.end_U) == len(forest.paths) == 0
    assert len(leaves(forest)) == 0


@pytest.mark.parametrize(
    ("sequence", "says"),
    [
        (np.zeros(0, np.int32), "sequence 1 has shape"),
        (np.zeros((2, 2), np.int32), "sequence 1 has shape"),
        (np.zeros(2, np.float32), "float32"),
        (np.asarray([1, -1], np.int32), "-1"),
        (np.asarray([1, 2**31], np.int64), "2147483648"),
    ],
)
def test_what_is_no_token_sequence_is_refused_by_value(sequence: IntArray, says: str) -> None:
    with pytest.raises(RecordError, match=says):
        build_forest([ids(1, 2), sequence])


def test_a_chain_of_many_turns_costs_no_more_than_its_last_turn() -> None:
    history = np.arange(20_000, dtype=np.int32)
    forest = build_forest([history[: 100 * turn] for turn in range(1, 201)])
    assert len(forest.tokens_U) == 20_000
    assert np.array_equal(forest.parent_U, np.arange(-1, 19_999))
    assert np.all(forest.end_U == 20_000)

import sys
from collections import Counter

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from leyden.base.records import IntArray
from leyden.traces.forest import build_forest, leaves
from leyden.traces.nodes import compress, rows_through

rows = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=8), min_size=1, max_size=12)


def arrays(sequences: list[list[int]]) -> list[IntArray]:
    return [np.asarray(sequence, np.int32) for sequence in sequences]


@given(rows)
@settings(deadline=None)
def test_nodes_cover_every_token_once_and_branch_only_at_their_end(sequences: list[list[int]]) -> None:
    forest = build_forest(arrays(sequences))
    nodes = compress(forest)
    assert nodes.start_K.tolist() == [0, *nodes.stop_K.tolist()[:-1]]
    assert nodes.stop_K[-1] == len(forest.tokens_U)
    children = Counter(forest.parent_U.tolist())
    for k, (start, stop) in enumerate(zip(nodes.start_K.tolist(), nodes.stop_K.tolist(), strict=True)):
        assert nodes.node_U[start:stop].tolist() == [k] * (stop - start)
        assert all(children[u] == 1 for u in range(start, stop - 1))
        assert all(forest.parent_U[u] == u - 1 for u in range(start + 1, stop))
        above = int(forest.parent_U[start])
        assert int(nodes.parent_K[k]) == (-1 if above < 0 else int(nodes.node_U[above]))
        assert above < 0 or children[above] > 1 or above + 1 != start


@given(rows)
@settings(deadline=None)
def test_the_level_of_a_node_is_the_number_of_nodes_above_it(sequences: list[list[int]]) -> None:
    nodes = compress(build_forest(arrays(sequences)))
    for k, parent in enumerate(nodes.parent_K.tolist()):
        assert int(nodes.level_K[k]) == (0 if parent < 0 else int(nodes.level_K[parent]) + 1)


@given(rows)
@settings(deadline=None)
def test_the_rows_through_a_token_are_those_that_begin_with_its_prefix(sequences: list[list[int]]) -> None:
    forest = build_forest(arrays(sequences))
    expected = [0] * len(forest.tokens_U)
    for path in forest.paths:
        for u in path.tolist():
            expected[u] += 1
    assert rows_through(forest).tolist() == expected


def test_an_empty_forest_has_no_nodes() -> None:
    forest = build_forest([])
    assert len(compress(forest)) == 0
    assert len(rows_through(forest)) == 0


def agent(turns: int, first: int, history: list[int]) -> list[list[int]]:
    """The rows of an agent whose calls append to `history`."""
    made = []
    for turn in range(turns):
        history = [*history, first + turn]
        made.append(history)
    return made


def test_compaction_begins_a_branch_behind_what_it_kept() -> None:
    before = agent(3, 100, [1, 2, 3])
    after = agent(3, 200, [1, 2, 9])  # the system prompt stays, the rest was rewritten
    nodes = compress(build_forest(arrays(before + after)))
    assert len(nodes) == 3
    assert nodes.sizes.tolist() == [2, 4, 4]
    assert nodes.parent_K.tolist() == [-1, 0, 0]


def test_sub_agents_that_alternate_are_as_many_trajectories() -> None:
    agents = [agent(5, 1000 * (a + 1), [7, 100 + a]) for a in range(3)]
    interleaved = [agents[a][turn] for turn in range(5) for a in range(3)]
    forest = build_forest(arrays(interleaved))
    assert len(leaves(forest)) == 3
    assert np.array_equal(forest.tokens_U, build_forest(arrays([row for rows in agents for row in rows])).tokens_U)


def test_a_retry_of_the_same_prompt_adds_its_completion_only() -> None:
    prompt = list(range(50))
    forest = build_forest(arrays([[*prompt, 60, 61], [*prompt, 70], [*prompt, 60, 61]]))
    assert len(forest.tokens_U) == 50 + 2 + 1
    assert rows_through(forest)[0] == 3


def test_best_of_n_goes_on_from_the_one_that_was_chosen() -> None:
    prompt = list(range(20))
    choices = [[*prompt, 100 + n, 200 + n] for n in range(5)]
    forest = build_forest(arrays([*choices, [*choices[3], 300]]))
    nodes = compress(forest)
    assert len(leaves(forest)) == 5
    assert nodes.sizes.tolist() == [20, 2, 2, 2, 3, 2]


def test_a_forest_may_branch_deeper_than_the_interpreter_may_recurse() -> None:
    depth = 5 * sys.getrecursionlimit()
    spine = np.arange(depth, dtype=np.int32)
    # At each depth one row leaves the spine: retry after retry of an agent that never ends.
    made = [np.append(spine[: n + 1], np.int32(depth + n)) for n in range(0, depth, 7)]
    forest = build_forest([*made, spine])
    nodes = compress(forest)
    assert int(nodes.level_K.max()) == len(made)
    assert len(leaves(forest)) == len(made) + 1
    assert rows_through(forest)[0] == len(made) + 1

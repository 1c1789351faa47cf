"""From the actions of an optimizer step to inputs of the model: five layouts, one gradient.

    single   each action alone, its prompt computed anew
    padded   one row per trajectory (a sequence that no other extends), padded on the right
    packed   the same trajectories one after another in one row, blind to each other, positions restart
    tree     the forest of all sequences in depth-first order, each shared prefix once, position = depth
    depth_first  the same forest in several passes, of which the later ones read keys and values of the earlier

Every layout drops the last tokens of a sequence that predict nothing, and computes each label once. Sequences
that are a prefix of a longer one ride on it, except in `single`. `plan_passes` cuts a step into passes of at
most `token_budget` tokens, in the order of the forest, so that shared prefixes stay together where they fit; where
they do not, `tree` computes them once per pass and `depth_first` once (`descent`).

    B rows   T columns   U unique tokens   L labels of a pass   N labels of the batch
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from leyden.base.records import IntArray
from leyden.learning.backends.base import Layout
from leyden.learning.backends.embedded.descent import descend
from leyden.learning.backends.embedded.partition import partition
from leyden.learning.batch import Batch
from leyden.traces.forest import Forest, build_forest

Index = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Causal:
    """Each row sees itself up to the query. Right padding needs no mask: nothing real comes after it."""


@dataclass(frozen=True, slots=True)
class Segments:
    """One row of independent causal segments."""

    bounds: tuple[int, ...]
    """Start of each segment, and the end of the last."""


@dataclass(frozen=True, slots=True, eq=False)
class Tree:
    """One row in depth-first order: q sees k iff k <= q < end_U[k]."""

    end_U: Index
    """One past the last token of the subtree of each token."""
    num_above: int = 0
    """Tokens of a path that all of them see, and that come before them among the keys."""


Rule = Causal | Segments | Tree


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Pass:
    """One forward pass."""

    ids_BT: Index
    """Token ids; what fills a padded row is arbitrary."""
    positions_BT: Index
    """Position ids."""
    rule: Rule
    """Who sees whom."""
    label_L: Index
    """Labels of the batch that this pass computes; every active label is in exactly one pass."""
    source_L: Index
    """For each of them, row * T + column of the token whose hidden state predicts it."""
    level: int = 0
    """`depth_first`: trunks above whose keys and values it reads; they are the last ones of a lower level each."""
    is_trunk: bool = False
    """`depth_first`: later passes read its keys and values, so its backward waits for theirs."""

    @property
    def num_tokens(self) -> int:
        """Tokens that go through the model, padding included."""
        return int(self.ids_BT.size)


def plan_passes(
    batch: Batch, layout: Layout, token_budget: int, active_N: NDArray[np.bool_] | None = None
) -> list[Pass]:
    """Passes that together compute every label of `active_N` (default: all) once. They run in this order.

    In the order of the forest, cut where the fewest tokens are computed twice (`partition`). An action whose input
    alone is longer than the budget gets a pass of its own.
    """
    inputs, actions, labels = _inputs(batch, active_N)
    if not actions:
        return []
    if layout == "depth_first":
        return _depth_first(inputs, labels, batch, token_budget)
    order, shared = _forest_order(inputs)
    passes = []
    for group in partition(layout, token_budget, [len(inputs[i]) for i in order], shared):
        members = order[group]
        build = {"tree": _tree, "single": _padded, "padded": _padded, "packed": _packed}[layout]
        passes.append(build([inputs[i] for i in members], shared[group], [labels[i] for i in members], batch))
    return passes


def _inputs(batch: Batch, active_N: NDArray[np.bool_] | None) -> tuple[list[IntArray], list[int], list[Index]]:
    """(input tokens, action, labels) of every action that has an active label."""
    active = np.arange(batch.num_labels) if active_N is None else np.flatnonzero(active_N)
    action_L = batch.action_N[active]
    by_action = np.argsort(action_L, kind="stable")
    firsts = np.flatnonzero(np.diff(action_L[by_action], prepend=-1))
    inputs, actions, labels = [], [], []
    for mine in np.split(active[by_action], firsts[1:]) if len(active) else []:
        a = int(batch.action_N[mine[0]])
        # The token before the last label is the last that predicts anything.
        num = int(batch.prompt_len_A[a]) + int(batch.offset_N[mine].max())
        inputs.append(np.asarray(batch.sequences[a][:num]))
        actions.append(a)
        labels.append(mine.astype(np.int64))
    return inputs, actions, labels


def _forest_order(inputs: Sequence[IntArray]) -> tuple[Index, Index]:
    """(order of the inputs in their forest, tokens that each shares with the one before it)."""
    # Big-endian bytes compare as the ids do, without one object per token.
    keys = [sequence.astype(">u4").tobytes() for sequence in inputs]
    order = np.asarray(sorted(range(len(keys)), key=keys.__getitem__), np.int64)
    shared = np.zeros(len(order), np.int64)
    for place in range(1, len(order)):
        before, here = inputs[order[place - 1]], inputs[order[place]]
        num = min(len(before), len(here))
        differs = np.flatnonzero(before[:num] != here[:num])
        shared[place] = differs[0] if len(differs) else num
    return order, shared


def _hosts(lengths: Sequence[int], shared: Index) -> tuple[list[int], Index]:
    """(inputs that get a row, row of each input); an input that the next one extends rides on it."""
    last = len(lengths) - 1
    own = [i for i in range(len(lengths)) if i == last or shared[i + 1] < lengths[i]]
    return own, np.searchsorted(np.asarray(own), np.arange(len(lengths)))


def _padded(inputs: Sequence[IntArray], shared: Index, labels: Sequence[Index], batch: Batch) -> Pass:
    own, row_of = _hosts([len(x) for x in inputs], shared)
    T = max(len(inputs[i]) for i in own)
    ids_BT = np.zeros((len(own), T), np.int64)
    for row, i in enumerate(own):
        ids_BT[row, : len(inputs[i])] = inputs[i]
    sources = [row_of[i] * T + _places(batch, mine) for i, mine in enumerate(labels)]
    return Pass(
        ids_BT=ids_BT,
        positions_BT=np.broadcast_to(np.arange(T), ids_BT.shape).copy(),
        rule=Causal(),
        label_L=np.concatenate(labels),
        source_L=np.concatenate(sources),
    )


def _packed(inputs: Sequence[IntArray], shared: Index, labels: Sequence[Index], batch: Batch) -> Pass:
    own, row_of = _hosts([len(x) for x in inputs], shared)
    lengths = [len(inputs[i]) for i in own]
    bounds = np.concatenate(([0], np.cumsum(lengths)))
    sources = [bounds[row_of[i]] + _places(batch, mine) for i, mine in enumerate(labels)]
    return Pass(
        ids_BT=np.concatenate([inputs[i] for i in own]).astype(np.int64)[None],
        positions_BT=np.concatenate([np.arange(n) for n in lengths])[None],
        rule=Segments(tuple(int(b) for b in bounds)),
        label_L=np.concatenate(labels),
        source_L=np.concatenate(sources),
    )


def _tree(inputs: Sequence[IntArray], shared: Index, labels: Sequence[Index], batch: Batch) -> Pass:
    forest: Forest = build_forest(inputs)
    sources = [forest.paths[i][_places(batch, mine)] for i, mine in enumerate(labels)]
    return Pass(
        ids_BT=forest.tokens_U.astype(np.int64)[None],
        positions_BT=forest.depth_U.astype(np.int64)[None],
        rule=Tree(forest.end_U.astype(np.int64)),
        label_L=np.concatenate(labels),
        source_L=np.concatenate(sources).astype(np.int64),
    )


def _depth_first(inputs: Sequence[IntArray], labels: Sequence[Index], batch: Batch, budget: int) -> list[Pass]:
    forest: Forest = build_forest(inputs)
    chunks = descend(forest.end_U.astype(np.int64), budget)
    label_L = np.concatenate(labels)
    token_L = np.concatenate([forest.paths[i][_places(batch, mine)] for i, mine in enumerate(labels)])
    # A token of a trunk that is computed again predicts its labels where it is computed first.
    chunk_U = np.zeros(len(forest.tokens_U), np.int64)
    for number in reversed(range(len(chunks))):
        chunk_U[chunks[number].tokens] = number
    by_chunk = np.argsort(chunk_U[token_L], kind="stable")
    cuts = np.searchsorted(chunk_U[token_L][by_chunk], np.arange(1, len(chunks)))
    passes = []
    for chunk, mine in zip(chunks, np.split(by_chunk, cuts), strict=True):
        passes.append(
            Pass(
                ids_BT=forest.tokens_U[chunk.tokens].astype(np.int64)[None],
                positions_BT=forest.depth_U[chunk.tokens].astype(np.int64)[None],
                rule=Tree(chunk.end, chunk.num_above),
                label_L=label_L[mine],
                source_L=np.searchsorted(chunk.tokens, token_L[mine]).astype(np.int64),
                level=chunk.level,
                is_trunk=chunk.is_trunk,
            )
        )
    return passes


def _places(batch: Batch, labels: Index) -> Index:
    """Column of the token before each label, in the action's own sequence."""
    places: Index = batch.prompt_len_A[batch.action_N[labels]].astype(np.int64) + batch.offset_N[labels] - 1
    return places

"""The merge rule of Agent Lightning's trainer, as passes of our model: what trains without a tree are linear rows.

Calls of a rollout are taken in time. A call joins the row before it if its prompt begins with exactly that row (its
prompt and response); otherwise it begins a row of its own. So interleaved sub-agents do not merge, a rewritten history
begins anew, and rollouts of a group share nothing. Rows are packed one after another, which is kinder than padding.

    N labels of the batch
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from leyden.learning.backends.embedded.layouts import Pass, Segments
from leyden.learning.backends.embedded.planner import Plan, Planner, Shape
from leyden.learning.batch import Batch


def merged_rows(batch: Batch) -> list[list[int]]:
    """Actions of each row; the sequence of the last one is the row. Actions of a rollout stand in time order."""
    rows: list[list[int]] = []
    for a, sequence in enumerate(batch.sequences):
        last = rows[-1][-1] if rows else -1
        before = batch.sequences[last]
        if (
            rows
            and batch.rollout_A[last] == batch.rollout_A[a]
            and len(before) <= batch.prompt_len_A[a]
            and np.array_equal(sequence[: len(before)], before)
        ):
            rows[-1].append(a)
        else:
            rows.append([a])
    return rows


def linear_passes(batch: Batch, token_budget: int) -> list[Pass]:
    """Rows in order, packed into passes of at most `token_budget` tokens; every label once."""
    passes: list[Pass] = []
    taken: list[list[int]] = []
    for row in [*merged_rows(batch), None]:
        tokens = sum(len(batch.sequences[r[-1]]) - 1 for r in taken)
        if taken and (row is None or tokens + len(batch.sequences[row[-1]]) - 1 > token_budget):
            passes.append(_pass(batch, taken))
            taken = []
        if row is not None:
            taken.append(row)
    return passes


def _pass(batch: Batch, rows: Sequence[Sequence[int]]) -> Pass:
    # The last token of a row predicts nothing.
    inputs = [batch.sequences[row[-1]][:-1] for row in rows]
    bounds = np.concatenate(([0], np.cumsum([len(x) for x in inputs])))
    labels, sources = [], []
    for start, row in zip(bounds.tolist(), rows, strict=False):
        for a in row:
            mine = np.flatnonzero(batch.action_N == a)
            labels.append(mine)
            sources.append(start + int(batch.prompt_len_A[a]) + batch.offset_N[mine].astype(np.int64) - 1)
    return Pass(
        ids_BT=np.concatenate(inputs).astype(np.int64)[None],
        positions_BT=np.concatenate([np.arange(len(x)) for x in inputs])[None],
        rule=Segments(tuple(bounds.tolist())),
        label_L=np.concatenate(labels),
        source_L=np.concatenate(sources),
    )


class LinearPrefix(Planner):
    """Plans those passes, for a trainer of ours."""

    def __init__(self, token_budget: int, shape: Shape) -> None:
        super().__init__("packed", token_budget, shape)

    def plan(self, batch: Batch, active_N: NDArray[np.bool_] | None = None) -> Plan:
        """All labels must be active."""
        assert active_N is None or bool(active_N.all())
        return Plan(layout="packed", passes=linear_passes(batch, self.token_budget))

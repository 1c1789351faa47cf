"""A forest of recorded calls as people look at it: branches, who shares them, what was trained, why calls diverged.

Pure; no I/O. It promises that every known token of the calls is in exactly one branch, that `num_sampled` and
`num_trained` count each such token once, that a divergence stands at the branch that it began, and that what is shown
of texts, branches and names is bounded and what is left out is counted. It draws nothing; how ids are shown it is told.

Letters: P = prompt tokens of a call, U = unique tokens of the forest.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypedDict

import numpy as np

from leyden.base.records import Call, IntArray, Trace
from leyden.traces.assemble import Action
from leyden.traces.divergence import Decode, Divergence, Kind, survey
from leyden.traces.forest import Forest, build_forest, leaves
from leyden.traces.nodes import Nodes, compress, rows_through

Text = Callable[[IntArray], str]
"""Ids to what is shown of them."""

EXAMPLE_TOKENS = 24
"""Ids shown on either side of a divergence: enough to recognise a template, few enough for a line."""
SNIPPET_TOKENS = 16
"""Tokens whose text begins a branch."""
MAX_BRANCHES = 400
"""Branches shown, the first in depth-first order: about what a reader scrolls through."""
MAX_DIVERGED = 3
"""Divergences shown per branch."""
MAX_ENDS = 6
"""Names of answers shown per branch."""


class Diverged(TypedDict):
    """One call that did not extend an earlier call of its attempt."""

    kind: str
    """Class of `leyden.traces.divergence`."""
    position: int
    """First differing place."""
    earlier_call: str
    """Id of the earlier call."""
    later_call: str
    """Id of the later one."""
    earlier: str
    """What the earlier call had from there, at most `EXAMPLE_TOKENS`."""
    later: str
    """What the later one had."""


class Branch(TypedDict):
    """One node of the forest: a run of tokens between two branchings."""

    level: int
    """Branchings above it; 0 at a root."""
    depth: int
    """Position of its first token in the sequences that run through it."""
    num_tokens: int
    """Its tokens."""
    num_rows: int
    """Answers (choices of calls) that run through its first token: 1 is unshared."""
    num_sampled: int
    """Tokens that some call sampled."""
    num_trained: int
    """Tokens that some trained action predicts."""
    text: str
    """How it begins."""
    ends: Sequence[str]
    """Names of the first answers that end in it: rollout, call and choice."""
    num_ends: int
    """All answers that end in it."""
    diverged: Sequence[Diverged]
    """The first calls that began it by diverging from an earlier call of their own attempt."""
    num_diverged: int
    """All of those."""


class Picture(TypedDict):
    """Branches in depth-first order, and what all of them add up to. JSON can hold it."""

    title: str
    """What it is a picture of."""
    branches: Sequence[Branch]
    """Depth-first; a branch's level is at most one more than that of the one before it."""
    num_left_out: int
    """Branches that are not among these."""
    num_tokens: int
    """Tokens of all answers with their prompts, without any sharing."""
    num_unique: int
    """Tokens of the forest."""
    num_sampled: int
    """Unique sampled tokens."""
    num_trained: int
    """Unique trained tokens."""
    num_answers: int
    """Choices of calls whose ids are known."""
    num_trajectories: int
    """Root-to-leaf paths."""
    num_unknown: int
    """Calls without ids, which are not in the picture."""
    kinds: Mapping[str, int]
    """How later calls relate to earlier ones of their attempt, counted."""


@dataclass(frozen=True, slots=True)
class _Row:
    name: str
    call: Call
    choice_index: int
    ids: IntArray


def picture(
    traces: Sequence[Trace],
    actions: Sequence[Action] = (),
    *,
    text: Text,
    title: str = "",
    decode: Decode | None = None,
) -> Picture:
    """The forest of all calls of `traces`; `actions` say what is trained, `decode` lets `survey` compare texts."""
    rows = [row for t, trace in enumerate(traces) for row in _rows(trace, f"{t + 1}." if len(traces) > 1 else "")]
    forest = build_forest([row.ids for row in rows])
    nodes = compress(forest)
    sampled_U, trained_U = _marks(forest, rows, actions)
    ends: defaultdict[int, list[str]] = defaultdict(list)
    for row, path in zip(rows, forest.paths, strict=True):
        ends[int(nodes.node_U[path[-1]])].append(row.name)
    diverged, kinds = _diverged(traces, rows, forest, nodes, decode, text)
    through_U = rows_through(forest)
    bounds = list(zip(nodes.start_K.tolist(), nodes.stop_K.tolist(), strict=True))
    branches: list[Branch] = [
        {
            "level": int(nodes.level_K[k]),
            "depth": int(forest.depth_U[start]),
            "num_tokens": stop - start,
            "num_rows": int(through_U[start]),
            "num_sampled": int(sampled_U[start:stop].sum()),
            "num_trained": int(trained_U[start:stop].sum()),
            "text": text(forest.tokens_U[start : min(stop, start + SNIPPET_TOKENS)]),
            "ends": ends[k][:MAX_ENDS],
            "num_ends": len(ends[k]),
            "diverged": diverged[k][:MAX_DIVERGED],
            "num_diverged": len(diverged[k]),
        }
        for k, (start, stop) in enumerate(bounds[:MAX_BRANCHES])
    ]
    return {
        "title": title,
        "branches": branches,
        "num_left_out": len(bounds) - len(branches),
        "num_tokens": sum(len(row.ids) for row in rows),
        "num_unique": len(forest.tokens_U),
        "num_sampled": int(sampled_U.sum()),
        "num_trained": int(trained_U.sum()),
        "num_answers": len(rows),
        "num_trajectories": len(leaves(forest)),
        "num_unknown": sum(not len(call.prompt_ids) for trace in traces for call in trace.calls),
        "kinds": {kind.value: count for kind, count in sorted(kinds.items())},
    }


def _rows(trace: Trace, prefix: str) -> list[_Row]:
    found = []
    for call in sorted(trace.calls, key=lambda call: (call.seq, call.id)):
        if not len(call.prompt_ids):
            continue
        for choice in call.choices:
            several = f"/{choice.index}" if len(call.choices) > 1 else ""
            ids = np.concatenate((call.prompt_ids, choice.completion_ids))
            found.append(_Row(f"{prefix}{call.seq + 1}{several}", call, choice.index, ids))
        if not call.choices:
            found.append(_Row(f"{prefix}{call.seq + 1} (no answer)", call, -1, call.prompt_ids))
    return found


def _marks(
    forest: Forest, rows: Sequence[_Row], actions: Sequence[Action]
) -> tuple[np.ndarray[tuple[int], np.dtype[np.bool_]], np.ndarray[tuple[int], np.dtype[np.bool_]]]:
    """(whether each token was sampled, whether it is trained), shape (U,)."""
    num_trained = {(a.call_id, a.choice_index): a.num_tokens for a in actions if a.drop is None}
    sampled_U = np.zeros(len(forest.tokens_U), np.bool_)
    trained_U = np.zeros(len(forest.tokens_U), np.bool_)
    for row, path in zip(rows, forest.paths, strict=True):
        sampled_U[path[len(row.call.prompt_ids) :]] = True
        # A window trains the last tokens of a completion, everything else all of them.
        trained_U[path[len(path) - num_trained.get((row.call.id, row.choice_index), 0) :]] = True
    return sampled_U, trained_U


def _diverged(
    traces: Sequence[Trace], rows: Sequence[_Row], forest: Forest, nodes: Nodes, decode: Decode | None, text: Text
) -> tuple[defaultdict[int, list[Diverged]], Counter[Kind]]:
    """(divergences by the node that they began, how often each class was seen)."""
    first_row = {row.call.id: place for place, row in reversed(list(enumerate(rows)))}
    by_node: defaultdict[int, list[Diverged]] = defaultdict(list)
    kinds: Counter[Kind] = Counter()
    for trace in traces:
        for why in survey(trace.calls, decode=decode):
            kinds[why.kind] += 1
            if why.kind is Kind.EXTENDS:
                continue
            place = first_row[why.later_call]
            later = rows[place].ids
            earlier = _earlier(rows, why, later)
            by_node[int(nodes.node_U[forest.paths[place][why.position]])].append(
                {
                    "kind": why.kind.value,
                    "position": why.position,
                    "earlier_call": why.earlier_call,
                    "later_call": why.later_call,
                    "earlier": text(earlier[why.position : why.position + EXAMPLE_TOKENS]),
                    "later": text(later[why.position : why.position + EXAMPLE_TOKENS]),
                }
            )
    return by_node, kinds


def _earlier(rows: Sequence[_Row], why: Divergence, later: IntArray) -> IntArray:
    """The answer of the earlier call that shares the most with the later prompt."""
    shared = later[: why.position]
    candidates = [row.ids for row in rows if row.call.id == why.earlier_call]
    return next((ids for ids in candidates if np.array_equal(ids[: why.position], shared)), candidates[0])

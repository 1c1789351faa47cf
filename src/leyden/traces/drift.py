"""How much recorded calls drifted: what later prompts share with earlier calls, and what it costs. Pure; no I/O.

Two reports of the same agents, one without and one with splicing, say what splicing is worth. It does not say why
a prompt differs; `divergence` does.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from leyden.base.records import Provenance, Trace
from leyden.traces.divergence import Decode, Kind, survey
from leyden.traces.forest import build_forest, leaves


@dataclass(frozen=True, slots=True, kw_only=True)
class Drift:
    """Counts over some traces; each trace is a forest of its own."""

    num_calls: int
    """With known tokens."""
    num_spliced: int
    """Whose prompt was built from served ids."""
    num_extending: int
    """Later calls of an attempt whose prompt runs along a whole earlier call."""
    kinds: Mapping[Kind, int]
    """Later calls that do not, by class."""
    num_trajectories: int
    """Root-to-leaf paths over all traces: one per attempt where nothing drifts and nothing branches."""
    num_tokens: int
    """Tokens of all answers with their prompts, without any sharing."""
    num_unique: int
    """What is left to compute when every shared prefix of a trace is computed once."""

    def sentence(self) -> str:
        """All of it for people."""
        apart = ", ".join(f"{count} {kind.value}" for kind, count in sorted(self.kinds.items())) or "none"
        return (
            f"{self.num_calls} calls ({self.num_spliced} spliced) on {self.num_trajectories} trajectories: "
            f"{self.num_extending} extend an earlier call, apart: {apart}; {self.num_unique:,} of "
            f"{self.num_tokens:,} tokens are computed"
        )


def drift(traces: Sequence[Trace], *, decode: Decode | None = None) -> Drift:
    """The report of `traces`; `decode` tells a retokenized text from a rewritten one."""
    kinds: Counter[Kind] = Counter()
    num_calls = num_spliced = num_trajectories = num_tokens = num_unique = 0
    for trace in traces:
        known = [call for call in trace.calls if len(call.prompt_ids)]
        rows = [np.concatenate((call.prompt_ids, choice.completion_ids)) for call in known for choice in call.choices]
        forest = build_forest(rows)
        num_calls += len(known)
        num_spliced += sum(call.provenance is Provenance.SPLICED for call in known)
        num_trajectories += len(leaves(forest))
        num_tokens += sum(map(len, rows))
        num_unique += len(forest.tokens_U)
        kinds.update(found.kind for found in survey(known, decode=decode))
    extending = kinds.pop(Kind.EXTENDS, 0)
    return Drift(
        num_calls=num_calls,
        num_spliced=num_spliced,
        num_extending=extending,
        kinds=dict(kinds),
        num_trajectories=num_trajectories,
        num_tokens=num_tokens,
        num_unique=num_unique,
    )

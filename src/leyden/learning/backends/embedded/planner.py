"""Which layout a step takes: the one whose passes are predicted to be fastest, from measured seconds.

Promises: with a fixed layout it plans that layout and measures nothing. With `auto` it plans tree, packed and padded,
and depth_first where the tree does not fit one pass; predicts the seconds of each, and takes the tree (whole, cut or
depth first, whichever is faster) unless another is at least 5 % faster; the gradient is the same whichever it takes.
Prediction and measurement of each update are in its report. Since the choice follows measured time, two runs with
`auto` may lay out a step differently and then differ in the last bits: for bit-identical runs, fix the layout.

    seconds = sum over passes of  a * tokens + b_kernel * pairs of query and key + c * labels + d

The coefficients start from the shape of the model (multiplications), get their scale and first values from one
small measured pass per layout, and are fitted again by least squares to the last updates; none is negative.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls

from leyden.learning.backends.base import Layout
from leyden.learning.backends.embedded.descent import PASS_TOKENS
from leyden.learning.backends.embedded.kernels import computed_pairs, is_chain
from leyden.learning.backends.embedded.layouts import Causal, Pass, Segments, plan_passes
from leyden.learning.backends.embedded.model import LoadedModel
from leyden.learning.batch import Batch

CANDIDATES: tuple[Layout, ...] = ("tree", "packed", "padded")
MARGIN = 0.95
"""Another layout than the tree must be predicted to take at most this share of its time: predictions were within a
few per cent of measurements, so a smaller lead is noise."""
PRIOR_WEIGHT = 0.003
"""Weight of one coefficient's relative distance from its prior against one measurement's relative error."""
KEPT = 32
"""Measurements that are fitted: an update takes seconds, and what other processes do changes over minutes."""

Wide = NDArray[np.float64]
FEATURES = ("tokens", "pairs_causal", "pairs_segments", "pairs_tree", "labels", "passes")


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The passes of one batch."""

    layout: Layout
    """Of all of them."""
    passes: Sequence[Pass]
    """In the order in which they run."""
    predicted_s: float | None = None
    """Seconds of forward and backward; None with a fixed layout."""
    features: Wide | None = None
    """What the prediction was made from, summed over passes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What the multiplications of a model follow from."""

    num_parameters: int
    """Without embedding and output head."""
    num_layers: int
    """Attention layers."""
    attention_width: int
    """Query heads times head size."""
    head_size: int
    """Parameters of the output head, V * E."""

    def prior(self) -> Wide:
        """Multiplications per feature, forward and backward (three times the forward)."""
        pair = 3.0 * 2 * self.num_layers * self.attention_width
        token = 3.0 * self.num_parameters
        # Masked and gathered attention runs at about half the speed of plain causal attention on a CPU.
        return np.asarray([token, pair, pair, 2 * pair, 3.0 * self.head_size, PASS_TOKENS * token])


class CostModel:
    """Seconds of passes, fitted to what was measured."""

    def __init__(self, prior: Wide) -> None:
        self.prior = prior
        self.coefficients = prior * 0.0
        """Seconds per unit of each feature; all 0 until something was measured."""
        self._seen: deque[tuple[Wide, float]] = deque(maxlen=KEPT)

    @property
    def num_measured(self) -> int:
        """Measurements that are fitted now."""
        return len(self._seen)

    def measured(self, features: Wide, seconds: float) -> None:
        """Take one measurement in; a pass without time is none."""
        if seconds <= 0:
            return
        self._seen.append((features, seconds))
        scale = float(np.median([s / float(x @ self.prior) for x, s in self._seen]))
        start = self.prior * scale
        # In units of the scaled prior every coefficient is near 1, whatever the size of the model.
        rows = [x * start / s for x, s in self._seen]
        ones = [1.0] * len(self._seen)
        anchor = np.sqrt(PRIOR_WEIGHT)
        rows += list(np.eye(len(start)) * anchor)
        ones += [float(anchor)] * len(start)
        found, _ = nnls(np.asarray(rows), np.asarray(ones))
        self.coefficients = found * start

    def predict(self, features: Wide) -> float:
        """Seconds."""
        return float(features @ self.coefficients)


class Planner:
    """Plans the passes of batches in a fixed layout, or in the fastest one."""

    def __init__(
        self,
        layout: Layout | Literal["auto"],
        token_budget: int,
        shape: Shape,
        calibrate: Callable[[Layout], float] | None = None,
    ) -> None:
        """`calibrate` runs `calibration_batch` once in a layout and returns its seconds; without it the first choice
        is made from multiplications alone."""
        self.layout, self.token_budget = layout, token_budget
        self.costs = CostModel(shape.prior())
        self._calibrate = calibrate
        self._is_calibrated = False

    def plan(self, batch: Batch, active_N: NDArray[np.bool_] | None = None) -> Plan:
        """The passes that compute every active label once."""
        if self.layout != "auto":
            return Plan(layout=self.layout, passes=plan_passes(batch, self.layout, self.token_budget, active_N))
        if not self.costs.num_measured:
            self.calibrate()
        plans: list[Plan] = []
        candidates = list(CANDIDATES)
        whole = plan_passes(batch, "tree", self.token_budget, active_N)
        if len(whole) > 1:  # otherwise it is the same pass
            candidates.insert(1, "depth_first")
        for layout in candidates:
            passes = whole if layout == "tree" else plan_passes(batch, layout, self.token_budget, active_N)
            features = features_of(passes)
            plans.append(Plan(layout=layout, passes=passes, predicted_s=self._seconds(features), features=features))
        tree, fastest = min(plans[:-2], key=_predicted), min(plans, key=_predicted)
        return fastest if _predicted(fastest) < MARGIN * _predicted(tree) else tree

    def measured(self, plan: Plan, seconds: float) -> None:
        """Learn from the forward and backward of a whole plan."""
        if plan.features is not None and plan.passes:
            self.costs.measured(plan.features, seconds)

    def calibrate(self) -> None:
        """Measure one small pass per layout, once, if there is a way to."""
        if self._is_calibrated or self._calibrate is None:
            return
        self._is_calibrated = True
        batch = calibration_batch()
        self._calibrate("tree")  # the first pass of a process pays for memory that the others find
        for layout in CANDIDATES:
            passes = plan_passes(batch, layout, self.token_budget)
            self.costs.measured(features_of(passes), self._calibrate(layout))

    def _seconds(self, features: Wide) -> float:
        if self.costs.num_measured:
            return self.costs.predict(features)
        return float(features @ self.costs.prior) * 1e-10  # 10 G multiplications a second, until one was measured


def _predicted(plan: Plan) -> float:
    assert plan.predicted_s is not None
    return plan.predicted_s


def features_of(passes: Sequence[Pass]) -> Wide:
    """The features of all passes together, in the order of `FEATURES`."""
    found = np.zeros(len(FEATURES))
    for one in passes:
        kind = 1 if isinstance(one.rule, Causal) or is_chain(one.rule) else 2 if isinstance(one.rule, Segments) else 3
        found[0] += one.num_tokens
        found[kind] += computed_pairs(one.rule, one.ids_BT.shape)
        found[4] += len(one.label_L)
        found[5] += 1
    return found


def calibration_batch() -> Batch:
    """Eight unlike sequences of 48 tokens, so that all layouts compute the same tokens."""
    num, prompt, length = 8, 16, 48
    sequences = [(np.arange(length, dtype=np.int32) + i) % num for i in range(num)]
    answer = length - prompt
    return Batch(
        sequences=sequences,
        prompt_len_A=np.full(num, prompt, np.int32),
        rollout_A=np.arange(num, dtype=np.int32),
        temperature_A=np.ones(num, np.float32),
        action_N=np.repeat(np.arange(num, dtype=np.int32), answer),
        offset_N=np.tile(np.arange(answer, dtype=np.int32), num),
        token_N=np.concatenate([s[prompt:] for s in sequences]),
        logp_sampler_N=np.full(num * answer, np.nan, np.float32),
        credit_N=np.ones(num * answer, np.float32),
        weight_N=np.full(num * answer, 1 / (num * answer), np.float32),
        num_rollouts=num,
    )


def shape_of(loaded: LoadedModel) -> Shape:
    """What the planner's first guess follows from."""
    config = loaded.config
    heads = int(config.num_attention_heads)
    head_dim = int(getattr(config, "head_dim", None) or config.hidden_size // heads)
    head = loaded.vocab_size * int(config.hidden_size)
    body = sum(p.numel() for name, p in loaded.causal.named_parameters() if "embed" not in name)
    return Shape(
        num_parameters=body, num_layers=int(config.num_hidden_layers), attention_width=heads * head_dim, head_size=head
    )

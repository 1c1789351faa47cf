"""The trainer: one optimizer step per batch, by any layout, with gradients accumulated over passes.

Promises: the gradient does not depend on the layout or the token budget; on a CPU two runs from the same
state are bit-identical; a loss or gradient that is not finite is refused before it touches a weight; the
graph of a pass is freed before the next begins. Labels whose credit and other terms are all zero have no
gradient and take no forward pass; their share of the report (gap, entropy) is therefore not measured.

Does not: schedule the learning rate, decide credit, or serve. Nobody else may use the model during a call.

    N labels of a batch   L labels of a pass
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from leyden.base.config import LearnConfig
from leyden.base.errors import LearningError, ObjectiveError
from leyden.base.records import FloatArray
from leyden.learning.backends.base import Layout, Objective, UpdateReport
from leyden.learning.backends.embedded import recompute
from leyden.learning.backends.embedded.attention import attention_scope, kernel_for
from leyden.learning.backends.embedded.layouts import Pass, plan_passes
from leyden.learning.backends.embedded.logprobs import label_logprobs, plan_positions
from leyden.learning.backends.embedded.losses import Labels, Terms, objective_loss
from leyden.learning.backends.embedded.model import LoadedModel
from leyden.learning.backends.embedded.planner import Plan, Planner, Shape, calibration_batch
from leyden.learning.batch import Batch, check

ADAM_EPS = 1e-8

Mask = NDArray[np.bool_]
Wide = NDArray[np.float64]


@dataclass(slots=True)
class _Tally:
    """Sums over the labels and steps of one update, in double precision."""

    loss: float = 0.0
    grad_norm: float = 0.0
    weight: float = 0.0
    kl: float = 0.0
    entropy: float = 0.0
    num_clipped: int = 0
    num_capped: int = 0
    num_computed: int = 0
    num_steps: int = 0
    num_forward_tokens: int = 0
    num_passes: int = 0
    layouts: list[str] = field(default_factory=list)
    predicted_s: float | None = None
    measured_s: float = 0.0
    gaps: list[Wide] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - start

    def add_plan(self, plan: Plan, seconds: float) -> None:
        self.num_passes += len(plan.passes)
        self.measured_s += seconds
        if plan.layout not in self.layouts:
            self.layouts.append(plan.layout)
        if plan.predicted_s is not None:
            self.predicted_s = (self.predicted_s or 0.0) + plan.predicted_s

    def add_gap(self, logp_N: Wide, batch: Batch, active_N: Mask) -> None:
        known_N = active_N & ~np.isnan(batch.logp_sampler_N)
        self.gaps.append(np.abs(logp_N[known_N] - batch.logp_sampler_N[known_N]))

    def add_terms(self, terms: Terms, weight_L: Tensor) -> None:
        self.loss += float(terms.loss.detach())
        self.weight += float(weight_L.sum())
        self.kl += float((weight_L * terms.kl_L).sum())
        self.entropy += float((weight_L * terms.entropy_L).sum())
        self.num_clipped += int(terms.clipped_L.sum())
        self.num_capped += int(terms.capped_L.sum())
        self.num_computed += len(weight_L)


@dataclass(frozen=True, slots=True, eq=False)
class _Before:
    """Log-probs of a batch under weights other than the current ones; NaN where a label is not active."""

    logp_old_N: Wide | None
    """Before the first optimizer step; None: the forward pass of the step itself gives them."""
    logp_reference_N: Wide | None
    """Under the reference; None when there is no KL term."""


class Trainer:
    """Moves the weights of `loaded`."""

    def __init__(self, loaded: LoadedModel, learn: LearnConfig) -> None:
        self.loaded = loaded
        self.planner = Planner(learn.layout, learn.token_budget, _shape(loaded), self._time)
        self.recomputes = learn.activation_checkpointing
        if self.recomputes:
            recompute.install(loaded.causal, loaded.source)
        self.parameters = loaded.trainable()
        """Trained parameters by name."""
        self.num_steps = 0
        """Optimizer steps ever made."""
        self.reference: dict[str, Tensor] | None = None
        """Trained parameters at the first update with a KL term: the policy that KL is measured from."""
        matrices = [p for p in self.parameters.values() if p.ndim >= 2]
        others = [p for p in self.parameters.values() if p.ndim < 2]
        self.optimizer = torch.optim.AdamW(
            # Norms and biases are not decayed: pulling a scale to 0 regularises nothing.
            [
                {"params": matrices, "weight_decay": learn.weight_decay},
                {"params": others, "weight_decay": 0.0},
            ],
            lr=learn.learning_rate,
            betas=learn.betas,
            eps=ADAM_EPS,
            fused=True,
        )

    def update(self, batches: Sequence[Batch], objective: Objective) -> UpdateReport:
        """One optimizer step per batch that has anything to train, in order.

        Raises LearningError for a loss or gradient that is not finite (steps before it stay), ObjectiveError
        for a batch that does not fit the model.
        """
        tally = _Tally()
        active = {id(batch): _active(batch, objective) for batch in batches}
        for batch in batches:
            self._check(batch)
        todo = [batch for batch in batches if active[id(batch)].any()]
        before = self._before(todo, active, objective, tally)
        for batch in todo:
            self._step(batch, active[id(batch)], before[id(batch)], objective, tally)
        return _report(tally, batches)

    def logprobs(self, batch: Batch) -> FloatArray:
        """Log-prob of every label under the current weights, shape (N,)."""
        self._check(batch)
        everything = np.ones(batch.num_labels, np.bool_)
        return self._logprobs(batch, everything, _Tally()).astype(np.float32)

    def accumulate(
        self,
        batch: Batch,
        objective: Objective,
        *,
        logp_old_N: Wide | None = None,
        logp_reference_N: Wide | None = None,
    ) -> float:
        """Add the gradient of one batch to the parameters' `.grad`; the loss. Makes no step.

        `logp_old_N` and `logp_reference_N` have shape (N,); without the first, old is current.
        """
        tally = _Tally()
        self._backward(batch, _active(batch, objective), _Before(logp_old_N, logp_reference_N), objective, tally)
        return tally.loss

    def _check(self, batch: Batch) -> None:
        if not batch.num_labels:
            return
        if not bool((batch.temperature_A > 0).all()):
            raise ObjectiveError(
                f"a batch holds an action sampled at temperature {batch.temperature_A.min()}, which has no "
                "log-probabilities to train; sample at a temperature above 0"
            )
        highest = max(int(s.max()) for s in batch.sequences)
        if highest >= self.loaded.vocab_size:
            raise ObjectiveError(
                f"a batch holds token id {highest}, but {self.loaded.source} has "
                f"{self.loaded.vocab_size} tokens; was it sampled from another model?"
            )
        longest = max(len(s) for s in batch.sequences)
        limit = getattr(self.loaded.config, "max_position_embeddings", None)
        if limit is not None and longest > limit:
            raise ObjectiveError(
                f"a sequence of {longest} tokens is longer than the {limit} positions of "
                f"{self.loaded.source}; lower policies.NAME.max_context"
            )
        check(batch)

    def _before(
        self, batches: Sequence[Batch], active: dict[int, Mask], objective: Objective, tally: _Tally
    ) -> dict[int, _Before]:
        """What must be known of each batch before the first step, each distinct batch once."""
        unique = {id(batch): batch for batch in batches}
        old: dict[int, Wide] = {}
        # With a single step the old policy is the current one, and the step's own forward gives its
        # log-probs.
        if len(batches) > 1:
            with tally.timed("old_logprobs"):
                for key, batch in unique.items():
                    old[key] = self._logprobs(batch, active[key], tally)
                    tally.add_gap(old[key], batch, active[key])
        reference: dict[int, Wide] = {}
        if objective.kl != 0 and batches:
            with tally.timed("reference_logprobs"), self._reference_weights():
                for key, batch in unique.items():
                    reference[key] = self._logprobs(batch, active[key], tally)
        return {key: _Before(old.get(key), reference.get(key)) for key in unique}

    @contextmanager
    def _reference_weights(self) -> Iterator[None]:
        """The model holds the reference inside the block; pointers are exchanged, nothing is copied."""
        if self.reference is None:
            self.reference = {name: p.detach().clone() for name, p in self.parameters.items()}
        self._exchange(self.reference)
        try:
            yield
        finally:
            self._exchange(self.reference)

    def _exchange(self, other: dict[str, Tensor]) -> None:
        for name, parameter in self.parameters.items():
            parameter.data, other[name] = other[name], parameter.data
        self.loaded.refresh()

    def _step(self, batch: Batch, active_N: Mask, before: _Before, objective: Objective, tally: _Tally) -> None:
        # An update that was interrupted may have left gradients.
        self._clear_gradients()
        loss_before = tally.loss
        self._backward(batch, active_N, before, objective, tally)
        with tally.timed("optimizer"):
            grads = [p.grad for p in self.parameters.values() if p.grad is not None]
            norm = torch.nn.utils.get_total_norm(grads)
            grad_norm, loss = float(norm), tally.loss - loss_before
            if not (np.isfinite(grad_norm) and np.isfinite(loss)):
                self._clear_gradients()
                raise LearningError(
                    f"optimizer step {self.num_steps + 1} has loss {loss} and gradient norm {grad_norm}; the "
                    f"weights are those after step {self.num_steps}. Lower learn.learning_rate, or set "
                    'policies.NAME.dtype = "float32"'
                )
            if 0 < objective.grad_clip < grad_norm:
                torch._foreach_mul_(grads, objective.grad_clip / grad_norm)
            for group in self.optimizer.param_groups:
                group["lr"] = objective.learning_rate
            self.optimizer.step()
            # The fused AdamW writes without raising version counters (torch 2.13): nobody else would notice.
            self.loaded.refresh()
            self._clear_gradients()
        self.num_steps += 1
        tally.num_steps += 1
        tally.grad_norm += grad_norm

    def _clear_gradients(self) -> None:
        """Zero them and keep their memory: to allocate it anew costs more than to clear it (see `precision`)."""
        for parameter in self.parameters.values():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            else:
                parameter.grad.zero_()

    def _backward(self, batch: Batch, active_N: Mask, before: _Before, objective: Objective, tally: _Tally) -> None:
        logp_N = np.full(batch.num_labels, np.nan)
        plan = self.planner.plan(batch, active_N)
        start = time.perf_counter()
        for one in plan.passes:
            with tally.timed("forward"):
                logp_L, entropy_L = self._forward(batch, one, entropy=objective.entropy != 0)
                labels = self._labels(batch, one, before, logp_L.detach())
                terms = objective_loss(objective, labels, logp_L, entropy_L)
            with tally.timed("backward"):
                terms.loss.backward()  # type: ignore[no-untyped-call]
            tally.num_forward_tokens += one.num_tokens
            tally.add_terms(terms, labels.weight_L)
            logp_N[one.label_L] = logp_L.detach().cpu().numpy()
        seconds = time.perf_counter() - start
        self.planner.measured(plan, seconds)
        tally.add_plan(plan, seconds)
        if before.logp_old_N is None:
            tally.add_gap(logp_N, batch, active_N)

    def _logprobs(self, batch: Batch, active_N: Mask, tally: _Tally) -> Wide:
        logp_N = np.full(batch.num_labels, np.nan)
        with torch.no_grad():
            for one in self.planner.plan(batch, active_N).passes:
                logp_N[one.label_L] = self._forward(batch, one, entropy=False)[0].cpu().numpy()
                tally.num_forward_tokens += one.num_tokens
        return logp_N

    def _forward(self, batch: Batch, one: Pass, *, entropy: bool) -> tuple[Tensor, Tensor | None]:
        """(logp_L, entropy_L) of the labels of a pass."""
        device = self.loaded.device
        kept = recompute.recompute_scope() if self.recomputes else nullcontext()
        with attention_scope(kernel_for(one.rule, device)), kept:
            hidden_BTE = self.loaded.hidden(
                torch.from_numpy(one.ids_BT).to(device), torch.from_numpy(one.positions_BT).to(device)
            )
        dtype = torch.float64 if hidden_BTE.dtype == torch.float64 else torch.float32
        positions = plan_positions(
            one.source_L,
            batch.temperature_A[batch.action_N[one.label_L]],
            batch.token_N[one.label_L].astype(np.int64),
            device,
            dtype,
        )
        return label_logprobs(hidden_BTE, self.loaded.head, positions, entropy=entropy)

    def _time(self, layout: Layout) -> float:
        """Seconds of one small forward and backward in a layout, for the planner; gradients stay as they are."""
        batch = calibration_batch()
        parameters = list(self.parameters.values())
        kept = [parameter.grad for parameter in parameters]
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)  # as in a step: memory for them is there already
        start = time.perf_counter()
        with torch.enable_grad():
            for one in plan_passes(batch, layout, self.planner.token_budget):
                logp_L, _ = self._forward(batch, one, entropy=False)
                logp_L.mean().backward()  # type: ignore[no-untyped-call]
                float(logp_L.detach()[0])  # waits for a device that runs behind
        seconds = time.perf_counter() - start
        for parameter, grad in zip(parameters, kept, strict=True):
            parameter.grad = grad
        return seconds

    def _labels(self, batch: Batch, one: Pass, before: _Before, logp_L: Tensor) -> Labels:
        def take(values_N: FloatArray | Wide) -> Tensor:
            return torch.from_numpy(values_N[one.label_L]).to(logp_L.device, logp_L.dtype)

        return Labels(
            credit_L=take(batch.credit_N),
            weight_L=take(batch.weight_N),
            logp_old_L=logp_L if before.logp_old_N is None else take(before.logp_old_N),
            logp_sampler_L=take(batch.logp_sampler_N),
            logp_reference_L=None if before.logp_reference_N is None else take(before.logp_reference_N),
        )


def _shape(loaded: LoadedModel) -> Shape:
    """What the planner's first guess follows from."""
    config = loaded.config
    heads = int(config.num_attention_heads)
    head_dim = int(getattr(config, "head_dim", None) or config.hidden_size // heads)
    head = loaded.vocab_size * int(config.hidden_size)
    body = sum(p.numel() for name, p in loaded.causal.named_parameters() if "embed" not in name)
    return Shape(
        num_parameters=body, num_layers=int(config.num_hidden_layers), attention_width=heads * head_dim, head_size=head
    )


def _active(batch: Batch, objective: Objective) -> Mask:
    """Labels that have a gradient: without KL and entropy, a label without credit has none."""
    active_N: Mask = batch.weight_N != 0
    if objective.kl == 0 and objective.entropy == 0:
        active_N = active_N & (batch.credit_N != 0)
    return active_N


def _report(tally: _Tally, batches: Sequence[Batch]) -> UpdateReport:
    steps = max(1, tally.num_steps)
    computed = max(1, tally.num_computed)
    weight = tally.weight or 1.0
    gaps = np.concatenate(tally.gaps) if tally.gaps else np.zeros(0)
    return UpdateReport(
        loss=tally.loss / steps,
        grad_norm=tally.grad_norm / steps,
        kl=tally.kl / weight,
        entropy=tally.entropy / weight,
        clip_fraction=tally.num_clipped / computed,
        importance_capped=tally.num_capped / computed,
        gap_mean=float(gaps.mean()) if len(gaps) else 0.0,
        gap_max=float(gaps.max()) if len(gaps) else 0.0,
        num_labels=sum(batch.num_labels for batch in batches),
        num_forward_tokens=tally.num_forward_tokens,
        num_sequence_tokens=sum(batch.num_sequence_tokens for batch in batches),
        num_optimizer_steps=tally.num_steps,
        seconds=tally.seconds,
        layout=", ".join(tally.layouts),
        num_passes=tally.num_passes,
        predicted_s=tally.predicted_s,
        measured_s=tally.measured_s,
    )

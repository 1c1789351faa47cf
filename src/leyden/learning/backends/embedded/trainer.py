"""The trainer: one optimizer step per batch, by any layout, with gradients accumulated over passes.

Promises: the gradient does not depend on the layout or the token budget; on a CPU two runs from the same
state are bit-identical; a loss or gradient that is not finite is refused before it touches a weight; the
graph of a pass is freed before the next begins. Labels whose credit and other terms are all zero have no
gradient and take no forward pass; their share of the report (gap, entropy) is therefore not measured.

Does not: schedule the learning rate, decide credit, or serve. Nobody else may use the model during a call.

    A actions and N labels of a batch   L labels of a pass
"""

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext

import numpy as np
import torch
from torch import Tensor

from leyden.base import recipes
from leyden.base.config import LearnConfig
from leyden.base.errors import LearningError, ObjectiveError
from leyden.base.records import FloatArray
from leyden.learning.backends.base import Layout, Objective, UpdateReport
from leyden.learning.backends.embedded import fused, precision, recompute
from leyden.learning.backends.embedded.coupling import (
    Before,
    Coupled,
    Mask,
    Wide,
    call_log_importance,
    call_log_ratio,
    pair_margins,
    pair_terms,
    whole_actions,
)
from leyden.learning.backends.embedded.critic import Critic
from leyden.learning.backends.embedded.layouts import Pass, plan_passes
from leyden.learning.backends.embedded.logprobs import label_logprobs, plan_positions
from leyden.learning.backends.embedded.losses import Labels, objective_loss
from leyden.learning.backends.embedded.model import LoadedModel
from leyden.learning.backends.embedded.path import Path
from leyden.learning.backends.embedded.planner import Planner, calibration_batch, shape_of
from leyden.learning.backends.embedded.tally import Tally, report
from leyden.learning.batch import Batch, check

ADAM_EPS = 1e-8


class Trainer:
    """Moves the weights of `loaded`."""

    def __init__(self, loaded: LoadedModel, learn: LearnConfig) -> None:
        self.loaded = loaded
        self.planner = Planner(learn.layout, learn.token_budget, shape_of(loaded), self._time)
        fused.install(loaded)  # before `recompute`, which wraps what it finds
        self.recomputes = learn.activation_checkpointing
        if self.recomputes:
            recompute.install(loaded.causal, loaded.source)
        self.parameters = loaded.trainable()
        """Trained parameters by name."""
        self.num_steps = 0
        """Optimizer steps ever made."""
        self.reference: dict[str, Tensor] | None = None
        """Trained parameters at the first update with a KL term: the policy that KL is measured from."""
        width = int(loaded.head.weight.shape[1])  # type: ignore[index]
        self.critic = Critic(width, loaded.device) if recipes.recipe_of(learn.algorithm).critic else None
        """The value head, for algorithms that have one."""
        matrices = [p for p in self.parameters.values() if p.ndim >= 2]
        others = [p for p in self.parameters.values() if p.ndim < 2]
        self.optimizer = torch.optim.AdamW(
            # Norms and biases are not decayed: pulling a scale to 0 regularises nothing.
            [
                {"params": matrices, "weight_decay": learn.weight_decay},
                {"params": others, "weight_decay": 0.0},
                *([{"params": list(self.critic.parameters()), "weight_decay": 0.0}] if self.critic else []),
            ],
            lr=learn.learning_rate,
            betas=learn.betas,
            eps=ADAM_EPS,
            fused=True,
        )

    def trained(self) -> dict[str, torch.nn.Parameter]:
        """Everything that the optimizer moves, by name: the policy's parameters and those of the critic."""
        critic = self.critic.named_parameters("critic") if self.critic else ()
        return {**self.parameters, **dict(critic)}

    def update(self, batches: Sequence[Batch], objective: Objective) -> UpdateReport:
        """One optimizer step per batch that has anything to train, in order.

        Raises LearningError for a loss or gradient that is not finite (steps before it stay), ObjectiveError
        for a batch that does not fit the model.
        """
        tally = Tally()
        active = {id(batch): _active(batch, objective) for batch in batches}
        for batch in batches:
            self._check(batch)
        todo = [batch for batch in batches if active[id(batch)].any()]
        before = self._before(todo, active, objective, tally)
        for batch in todo:
            self._step(batch, active[id(batch)], before[id(batch)], objective, tally)
        return report(tally, batches)

    def logprobs(self, batch: Batch) -> FloatArray:
        """Log-prob of every label under the current weights, shape (N,)."""
        self._check(batch)
        everything = np.ones(batch.num_labels, np.bool_)
        return self._logprobs(batch, everything, Tally()).astype(np.float32)

    def values(self, batch: Batch) -> FloatArray:
        """What the critic expects from the prompt of each action on, shape (A,); NaN for an action without a label."""
        if self.critic is None:
            raise LearningError("there is no critic; choose an algorithm that has one, for example ppo")
        self._check(batch)
        value_A = np.full(len(batch.sequences), np.nan, np.float32)
        path = Path(self.loaded.device)
        with torch.no_grad():
            for one in self.planner.plan(batch, batch.offset_N == 0).passes:
                value_K, actions = self.critic.of_pass(self._hidden(one, path), one, batch)
                value_A[actions] = value_K.float().cpu().numpy()
        return value_A

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
        tally, active_N = Tally(), _active(batch, objective)
        importance_N = None
        if logp_old_N is not None and _by_call(objective):
            importance_N = call_log_importance(batch, logp_old_N)
        self._backward(batch, active_N, Before(logp_old_N, logp_reference_N, importance_N), objective, tally)
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
        self, batches: Sequence[Batch], active: dict[int, Mask], objective: Objective, tally: Tally
    ) -> dict[int, Before]:
        """What must be known of each batch before the first step, each distinct batch once."""
        unique = {id(batch): batch for batch in batches}
        coupled = objective.surrogate in ("gspo", "dpo") or _by_call(objective)
        needed = {key: whole_actions(b, active[key]) if coupled else active[key] for key, b in unique.items()}
        old: dict[int, Wide] = {}
        if objective.old_logprobs == "recorded":
            old = {key: batch.logp_sampler_N.astype(np.float64) for key, batch in unique.items()}
        elif len(batches) > 1 or _by_call(objective):
            # Otherwise the old policy is the current one, and the step's own forward gives its log-probs.
            with tally.timed("old_logprobs"):
                for key, batch in unique.items():
                    old[key] = self._logprobs(batch, needed[key], tally)
                    tally.add_gap(old[key], batch, active[key])
        reference: dict[int, Wide] = {}
        if (objective.kl != 0 or objective.surrogate == "dpo") and batches:
            with tally.timed("reference_logprobs"), self._reference_weights():
                for key, batch in unique.items():
                    reference[key] = self._logprobs(batch, needed[key], tally)
        return {
            key: Before(
                old.get(key),
                reference.get(key),
                call_log_importance(batch, old[key]) if _by_call(objective) else None,
                fresh=objective.old_logprobs == "recomputed",
            )
            for key, batch in unique.items()
        }

    def _coupled(self, batch: Batch, active_N: Mask, before: Before, objective: Objective, tally: Tally) -> Coupled:
        """What a loss over whole calls or pairs needs of the log-probs of now."""
        if objective.surrogate not in ("gspo", "dpo"):
            return Coupled()
        known = before.logp_old_N if before.fresh and tally.num_steps == 0 else None
        if objective.surrogate == "gspo":
            if before.logp_old_N is None or known is not None:
                return Coupled(log_ratio_N=np.zeros(batch.num_labels))
            now_N = self._logprobs(batch, whole_actions(batch, active_N), tally)
            return Coupled(log_ratio_N=call_log_ratio(batch, now_N, before.logp_old_N))
        assert before.logp_reference_N is not None
        now_N = self._logprobs(batch, whole_actions(batch, active_N), tally) if known is None else known
        margin_P = pair_margins(batch, now_N, before.logp_reference_N, objective.dpo_beta)
        tally.margins.append(margin_P)
        slope_N, share_N = pair_terms(batch, margin_P, objective.dpo_beta)
        return Coupled(slope_N=slope_N, share_N=share_N)

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

    def _step(self, batch: Batch, active_N: Mask, before: Before, objective: Objective, tally: Tally) -> None:
        # An update that was interrupted may have left gradients.
        self._clear_gradients()
        loss_before = tally.loss
        self._backward(batch, active_N, before, objective, tally)
        with tally.timed("optimizer"):
            precision.complete_gradients(self.trained().values())
            grad_norm = self._clip(self.parameters.values(), objective.grad_clip, tally.loss - loss_before)
            if self.critic:
                self._clip(self.critic.parameters(), objective.grad_clip, tally.value_loss)
            for group in self.optimizer.param_groups:
                group["lr"] = objective.learning_rate
            if self.critic:
                self.optimizer.param_groups[-1]["lr"] = objective.value_learning_rate
            self.optimizer.step()
            # The fused AdamW writes without raising version counters (torch 2.13): nobody else would notice.
            self.loaded.refresh()
            self._clear_gradients()
        self.num_steps += 1
        tally.num_steps += 1
        tally.grad_norm += grad_norm

    def _clip(self, parameters: Iterable[Tensor], limit: float, loss: float) -> float:
        """The norm of their gradients, which is then at most `limit`. LearningError when it or `loss` is not finite."""
        grads = [p.grad for p in parameters if p.grad is not None]
        norm = float(torch.nn.utils.get_total_norm(grads))
        if not (np.isfinite(norm) and np.isfinite(loss)):
            self._clear_gradients()
            raise LearningError(
                f"optimizer step {self.num_steps + 1} has loss {loss} and gradient norm {norm}; the "
                f"weights are those after step {self.num_steps}. Lower learn.learning_rate, or set "
                'policies.NAME.dtype = "float32"'
            )
        if 0 < limit < norm:
            torch._foreach_mul_(grads, limit / norm)
        return norm

    def _clear_gradients(self) -> None:
        precision.clear_gradients(self.loaded.model, self.trained().values())

    def _backward(self, batch: Batch, active_N: Mask, before: Before, objective: Objective, tally: Tally) -> None:
        logp_N = np.full(batch.num_labels, np.nan)
        coupled = self._coupled(batch, active_N, before, objective, tally)
        plan = self.planner.plan(batch, active_N)
        start, path = time.perf_counter(), Path(self.loaded.device)
        for one in plan.passes:
            with tally.timed("backward"):
                path.climb(one.level)
            with tally.timed("forward"):
                hidden_BTE = self._hidden(one, path)
                tally.num_forward_tokens += one.num_tokens
                if not len(one.label_L):
                    continue
                logp_L, entropy_L = self._labels_of(hidden_BTE, batch, one, entropy=objective.entropy != 0)
                labels = self._labels(batch, one, before, coupled, logp_L.detach())
                terms = objective_loss(objective, labels, logp_L, entropy_L)
                loss = terms.loss
                if self.critic and batch.target_A is not None:
                    value = self.critic.loss(hidden_BTE, one, batch, objective)
                    tally.value_loss += float(value.detach())
                    loss = loss + objective.value_coef * value
            with tally.timed("backward"):
                loss.backward()  # type: ignore[no-untyped-call]
            tally.add_terms(terms, labels.weight_L)
            tally.num_masked[id(batch)] = tally.num_masked.get(id(batch), 0) + int(terms.masked_L.sum())
            logp_N[one.label_L] = logp_L.detach().cpu().numpy()
        with tally.timed("backward"):
            path.climb(0)
        seconds = time.perf_counter() - start
        self.planner.measured(plan, seconds)
        tally.add_plan(plan, seconds)
        if before.logp_old_N is None or (not before.fresh and tally.num_steps == 0):
            tally.add_gap(logp_N, batch, active_N)

    def _logprobs(self, batch: Batch, active_N: Mask, tally: Tally) -> Wide:
        logp_N, path = np.full(batch.num_labels, np.nan), Path(self.loaded.device)
        with torch.no_grad():
            for one in self.planner.plan(batch, active_N).passes:
                hidden_BTE = self._hidden(one, path)
                tally.num_forward_tokens += one.num_tokens
                if len(one.label_L):
                    logp_L, _ = self._labels_of(hidden_BTE, batch, one, entropy=False)
                    logp_N[one.label_L] = logp_L.cpu().numpy()
        return logp_N

    def _hidden(self, one: Pass, path: Path) -> Tensor:
        """Hidden states of the next pass of a walk, (B, T, E)."""
        device = self.loaded.device
        kept = recompute.recompute_scope() if self.recomputes else nullcontext()
        with path.scope(one), fused.fused_scope(), kept:
            hidden_BTE = self.loaded.hidden(
                torch.from_numpy(one.ids_BT).to(device), torch.from_numpy(one.positions_BT).to(device)
            )
        return path.cut(one, hidden_BTE)

    def _labels_of(self, hidden_BTE: Tensor, batch: Batch, one: Pass, *, entropy: bool) -> tuple[Tensor, Tensor | None]:
        """(logp_L, entropy_L) of the labels of a pass."""
        positions = plan_positions(
            one.source_L,
            batch.temperature_A[batch.action_N[one.label_L]],
            batch.token_N[one.label_L].astype(np.int64),
            self.loaded.device,
            torch.float64 if hidden_BTE.dtype == torch.float64 else torch.float32,
        )
        return label_logprobs(hidden_BTE, self.loaded.head, positions, entropy=entropy)

    def _time(self, layout: Layout) -> float:
        """Seconds of one small forward and backward in a layout, for the planner; gradients stay as they are."""
        batch = calibration_batch()
        parameters = list(self.parameters.values())
        kept = [parameter.grad for parameter in parameters]
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)  # as in a step: memory for them is there already
        start, path = time.perf_counter(), Path(self.loaded.device)
        with torch.enable_grad():
            for one in plan_passes(batch, layout, self.planner.token_budget):
                logp_L, _ = self._labels_of(self._hidden(one, path), batch, one, entropy=False)
                logp_L.mean().backward()  # type: ignore[no-untyped-call]
                float(logp_L.detach()[0])  # waits for a device that runs behind
        seconds = time.perf_counter() - start
        for parameter, grad in zip(parameters, kept, strict=True):
            parameter.grad = grad
        return seconds

    def _labels(self, batch: Batch, one: Pass, before: Before, coupled: Coupled, logp_L: Tensor) -> Labels:
        def take(values_N: FloatArray | Wide) -> Tensor:
            return torch.from_numpy(values_N[one.label_L]).to(logp_L.device, logp_L.dtype)

        def given(values_N: Wide | None) -> Tensor | None:
            return None if values_N is None else take(values_N)

        old_L = given(before.logp_old_N)
        return Labels(
            credit_L=take(batch.credit_N),
            weight_L=take(batch.weight_N),
            # A label that the sampler did not score has nothing to be compared with: its ratio starts at 1.
            logp_old_L=logp_L if old_L is None else torch.where(torch.isnan(old_L), logp_L, old_L),
            logp_sampler_L=take(batch.logp_sampler_N),
            logp_reference_L=given(before.logp_reference_N),
            log_importance_L=given(before.log_importance_N),
            log_ratio_L=given(coupled.log_ratio_N),
            slope_L=given(coupled.slope_N),
            share_L=given(coupled.share_N),
        )


def _active(batch: Batch, objective: Objective) -> Mask:
    """Labels that have a gradient: without KL and entropy, a label without credit has none, unless a value has."""
    active_N: Mask = batch.weight_N != 0
    if objective.kl == 0 and objective.entropy == 0:
        active_N = active_N & (batch.credit_N != 0)
    if batch.target_A is not None and objective.value_coef != 0:
        active_N = active_N | ((batch.offset_N == 0) & ~np.isnan(batch.target_A)[batch.action_N])
    return active_N


def _by_call(objective: Objective) -> bool:
    """Whether importance is a matter of whole calls."""
    weighed = objective.surrogate not in ("nll", "dpo") and objective.old_logprobs == "recomputed"
    corrected = objective.importance_cap != 0 or objective.importance_mask != 0
    return weighed and corrected and objective.importance_level == "sequence"

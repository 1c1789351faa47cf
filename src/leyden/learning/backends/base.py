"""The contract of a backend: it moves the weights and serves them; it is blind to the algorithm.

An algorithm decides credit; `leyden.learning.batch` turns credit into weights; a backend only sees labels with
credit and weight and an `Objective`, the sum of named loss components.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from leyden.base.records import FloatArray
from leyden.learning.batch import Batch

Surrogate = Literal["policy_gradient", "ppo_clip", "cispo", "gspo", "nll", "dpo"]
Layout = Literal["tree", "depth_first", "packed", "padded", "single"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """What one optimizer step minimises: `sum_n weight_n * (importance_n * surrogate_n + kl * k3_n - entropy * H_n)`.

    With a critic, `value_coef` times the mean of its loss over the calls that have a target is added.
    """

    surrogate: Surrogate = "policy_gradient"
    """`policy_gradient`: -credit * logp; `ppo_clip`: -min(ratio * credit, clipped ratio * credit); `cispo`:
    -(clipped ratio, a constant) * credit * logp; `gspo`: as ppo_clip with the geometric mean of the ratios of a call;
    `nll`: -credit * logp without importance weight; `dpo`: -log sigmoid(dpo_beta * margin) per pair."""
    clip_low: float = 0.2
    """Ratios are clipped at 1 - clip_low."""
    clip_high: float = 0.2
    """Ratios are clipped at 1 + clip_high."""
    clip_dual: float = 0.0
    """`ppo_clip`: with credit below 0 the objective is at least clip_dual * credit; 0 is no bound."""
    old_logprobs: Literal["recomputed", "recorded"] = "recomputed"
    """Whose log-probs are below the ratio: the trainer's own before the first step, or the sampler's."""
    importance_cap: float = 2.0
    """Labels with a sampler log-prob are weighed by min(exp(logp_old - logp_sampler), cap), without gradient;
    0 turns it off. logp_old is the trainer's own log-prob before the step."""
    importance_level: Literal["token", "sequence"] = "token"
    """`sequence`: one weight per action, of the product of the ratios of its labels."""
    importance_mask: float = 0.0
    """Labels whose importance ratio is above it or below its inverse have no part in the loss; 0 is off."""
    kl: float = 0.0
    """Weight of k3(reference, policy)."""
    entropy: float = 0.0
    """Weight of the entropy bonus."""
    dpo_beta: float = 0.1
    """`dpo`: scale of the margin."""
    value_coef: float = 0.0
    """Weight of the critic's loss; 0 without a critic."""
    value_clip: float = 0.0
    """Farthest useful move of a value from what it was before the step; 0 is no bound."""
    value_learning_rate: float = 1e-3
    """Of the value head."""
    learning_rate: float = 5e-6
    """Of this step; schedules are resolved before."""
    grad_clip: float = 1.0
    """Largest gradient norm, of the model and of the value head each; 0 is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateReport:
    """What one call of `update` did, averaged over its optimizer steps."""

    loss: float
    """Value of the objective."""
    grad_norm: float
    """Before clipping."""
    kl: float
    """Weighted mean of k3 against the reference; 0 when there is none."""
    entropy: float
    """Weighted mean entropy of the policy at labels, in nats; 0 when it was not asked for."""
    clip_fraction: float
    """Share of labels whose clipped branch was taken."""
    importance_capped: float
    """Share of labels whose importance weight met the cap."""
    gap_mean: float
    """Mean |logp_trainer - logp_sampler| over labels that have both, before the update."""
    gap_max: float
    """Largest such difference."""
    num_labels: int
    """Trained tokens."""
    num_forward_tokens: int
    """Tokens that went through the model once, padding included."""
    num_sequence_tokens: int
    """Tokens of all sequences without any sharing."""
    num_optimizer_steps: int
    """Steps of the optimizer; 0 when there was nothing to train."""
    clip_low_fraction: float = 0.0
    """Part of `clip_fraction`: ratios below the lower bound."""
    clip_high_fraction: float = 0.0
    """Part of `clip_fraction`: ratios above the upper bound, or above `clip_dual`."""
    num_masked: Sequence[int] = ()
    """Labels of each batch that the importance mask took out of the loss."""
    value_loss: float = 0.0
    """Mean of the critic's loss over its calls, without its weight; 0 without a critic."""
    pair_accuracy: float = 0.0
    """Share of preference pairs whose better rollout had gained more than the worse; 0 without pairs."""
    pair_margin: float = 0.0
    """Mean of beta times the difference of those gains, in nats."""
    seconds: Mapping[str, float] = field(default_factory=dict)
    """Wall time by phase: `forward`, `backward`, `optimizer`, `old_logprobs`, ..."""
    layout: str = ""
    """Of its batches, in order, each once: `tree`, or `tree, packed` where the planner changed its mind."""
    num_passes: int = 0
    """Forward and backward passes."""
    predicted_s: float | None = None
    """Forward and backward as the planner predicted them; None with a fixed layout."""
    measured_s: float = 0.0
    """Forward and backward as they were."""


class Backend(Protocol):
    """What the loop needs of whoever samples from and moves the weights of one policy."""

    policy: str
    """Name of the policy."""

    @property
    def version(self) -> int:
        """Version of the weights it holds now."""

    def start(self) -> str:
        """Begin to serve; the URL of an engine that speaks the wire format of vLLM's server."""

    @property
    def engine_key(self) -> str:
        """Bearer key that the engine wants."""

    def encode_demo(self, messages: Sequence[Mapping[str, Any]]) -> tuple[list[int], int]:
        """(ids of a whole conversation, number of ids before the last assistant turn) by the chat template."""

    def update(self, batches: Sequence[Batch], objective: Objective, version: int) -> UpdateReport:
        """One optimizer step per batch, in order; then the weights are `version` and are served as that."""

    def logprobs(self, batch: Batch) -> FloatArray:
        """Trainer log-prob of every label under the current weights; shape (N,)."""

    def values(self, batch: Batch) -> FloatArray:
        """What the critic expects from the prompt of each action on, shape (A,); LearningError without a critic."""

    def save(self, folder: Path, *, full: bool) -> None:
        """Write the weights as safetensors with config and tokenizer; `full` adds optimizer and RNG states.

        The folder appears whole or not at all.
        """

    def load(self, folder: Path, version: int, *, full: bool) -> None:
        """Take the weights of `folder` (and, if `full`, everything else) and serve them as `version`."""

    def serve_as(self, version: int) -> None:
        """Give the weights that are held the number under which the store knows them."""

    def load_base(self, version: int) -> None:
        """Take the weights that the policy started from and serve them as `version`."""

    def forget_optimizer(self, folder: Path) -> None:
        """Reduce a full checkpoint to its weights: nothing resumes from it any more."""

    def close(self) -> None:
        """Stop serving. Idempotent."""

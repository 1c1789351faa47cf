"""Tiny random models in memory and batches whose sequences form a deep random forest."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, GemmaConfig, LlamaConfig, Qwen2Config, Qwen3Config

from leyden.base.config import LoraConfig
from leyden.learning.backends.embedded.attention import ATTENTION_NAME
from leyden.learning.backends.embedded.model import ComputeType, LoadedModel, wrap
from leyden.learning.batch import Batch

VOCAB = 64

CONFIGS: dict[str, type[Any]] = {
    "llama": LlamaConfig,
    "qwen2": Qwen2Config,
    "qwen3": Qwen3Config,
    "gemma": GemmaConfig,
}


def in_its_own_type(norm: torch.nn.Module) -> None:
    """Let an RMS norm compute in the type of its input; transformers always rounds to float32 inside."""
    offset = 1.0 if "Gemma" in type(norm).__name__ else 0.0
    eps = float(getattr(norm, "variance_epsilon", None) or norm.eps)  # type: ignore[arg-type]

    def forward(x: torch.Tensor) -> torch.Tensor:
        weight = norm.weight
        assert isinstance(weight, torch.Tensor)
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * (weight + offset)

    norm.forward = forward


class NoTokenizer:
    """What a LoadedModel of bare ids has in the place of a tokenizer."""

    eos_token_id = 2
    chat_template = ""


def make_loaded(
    kind: str = "llama",
    *,
    dtype: ComputeType = "float32",
    lora: LoraConfig | None = None,
    seed: int = 0,
    tied: bool = True,
) -> LoadedModel:
    """A random model of two layers with weights large enough that tokens matter to each other."""
    config = CONFIGS[kind](
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=256,
        initializer_range=0.3,
        tie_word_embeddings=tied,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
    )
    torch.manual_seed(seed)
    causal = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
        config, attn_implementation=ATTENTION_NAME, dtype=torch.float32
    )
    for module in causal.modules():
        if type(module).__name__.endswith("RMSNorm"):
            in_its_own_type(module)
    return wrap(
        causal,
        NoTokenizer(),
        "",
        dtype=dtype,
        lora=lora,
        max_context=256,
        source=f"a tiny {kind}",
        seed=seed,
    )


def random_sequences(rng: np.random.Generator, num: int, *, longest: int = 14) -> list[tuple[np.ndarray, int]]:
    """(sequence, prompt length) of actions that continue, repeat, extend and share prefixes with earlier
    ones."""
    made: list[tuple[np.ndarray, int]] = []
    for _ in range(num):
        start = np.zeros(0, np.int64)
        if made and rng.random() < 0.8:
            earlier = made[rng.integers(len(made))][0]
            start = earlier[: rng.integers(1, len(earlier) + 1)]
        fresh = rng.integers(0, VOCAB, rng.integers(0 if len(start) > 1 else 2, longest))
        sequence = np.concatenate([start, fresh]).astype(np.int32)
        made.append((sequence, int(rng.integers(1, len(sequence) + (1 if rng.random() < 0.1 else 0)))))
    return made


def make_batch(
    actions: Sequence[tuple[np.ndarray, int]],
    rng: np.random.Generator,
    *,
    temperatures: Sequence[float] = (1.0, 0.7),
    weights: str = "random",
    unknown: float = 0.1,
) -> Batch:
    """Random credit and log-probs; `weights` is `random` or one of the four normalisations."""
    num_rollouts = max(1, len(actions) // 2)
    rollout_A = np.asarray(sorted(rng.integers(0, num_rollouts, len(actions))), np.int32)
    lengths_A = np.asarray([len(s) - p for s, p in actions])
    action_N = np.repeat(np.arange(len(actions)), lengths_A).astype(np.int32)
    offset_N = np.concatenate([np.arange(n) for n in lengths_A]).astype(np.int32)
    N = len(action_N)
    logp_sampler_N = (-np.abs(rng.normal(3.0, 1.0, N))).astype(np.float32)
    logp_sampler_N[rng.random(N) < unknown] = np.nan
    return Batch(
        sequences=[s for s, _ in actions],
        prompt_len_A=np.asarray([p for _, p in actions], np.int32),
        rollout_A=rollout_A,
        temperature_A=rng.choice(np.asarray(temperatures, np.float32), len(actions)),
        action_N=action_N,
        offset_N=offset_N,
        token_N=np.concatenate([s[p:] for s, p in actions]).astype(np.int32),
        logp_sampler_N=logp_sampler_N,
        credit_N=rng.normal(size=N).astype(np.float32),
        weight_N=weigh(weights, action_N, rollout_A, num_rollouts, rng),
        num_rollouts=num_rollouts,
    )


def weigh(
    kind: str, action_N: np.ndarray, rollout_A: np.ndarray, num_rollouts: int, rng: np.random.Generator
) -> np.ndarray:
    """Weights by the definition of each normalisation, one label at a time."""
    N = len(action_N)
    rollout_N = rollout_A[action_N]
    match kind:
        case "random":
            weights = rng.uniform(0.1, 1.0, N)
        case "rollout_mean":
            weights = np.asarray([1 / num_rollouts / np.sum(rollout_N == r) for r in rollout_N])
        case "token_mean":
            weights = np.full(N, 1 / N)
        case "call_mean":
            num_calls = len(set(action_N.tolist()))
            weights = np.asarray([1 / num_calls / np.sum(action_N == a) for a in action_N])
        case "constant":
            weights = np.full(N, 1 / num_rollouts / 256)
        case _:
            raise AssertionError(kind)
    return weights.astype(np.float32)


def gradients(loaded: LoadedModel) -> dict[str, torch.Tensor]:
    """Copies of all gradients, which are cleared; zeros where there is none."""
    found = {}
    for name, parameter in loaded.trainable().items():
        found[name] = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()
        parameter.grad = None
    return found


def relative_difference(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    """Largest over parameters of the norm of the difference by the norm."""
    return max(
        float((a[n] - b[n]).norm() / b[n].norm().clamp(min=1e-30))
        for n in b
        if float(b[n].norm()) or float(a[n].norm())
    )

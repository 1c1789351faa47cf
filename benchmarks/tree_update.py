"""Time of one update (forward and backward) by layout on the shapes of SmolLM2-135M: padded, packed, tree.

    python benchmarks/tree_update.py [--quick] [--model FOLDER] [--repeats 5]

Random weights are used unless a model is given; the time does not depend on their values. Layouts are timed
in turn, repetition by repetition, so that a change in the load of the machine meets all of them; medians are
reported. One warm-up of each comes first. `share_of_bound` is the speed-up over padded divided by the ratio
of tokens, which for a group of G with prompt P and response R is G(P+R)/(P+GR). The last line is one JSON
object.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import leyden.learning.backends.embedded  # noqa: F401 - before torch: it says how threads wait

# isort: split

import numpy as np
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from leyden.base.config import LearnConfig
from leyden.learning.backends.base import Layout, Objective
from leyden.learning.backends.embedded.attention import ATTENTION_NAME
from leyden.learning.backends.embedded.layouts import plan_passes
from leyden.learning.backends.embedded.model import LoadedModel, load_model, wrap
from leyden.learning.backends.embedded.trainer import Trainer
from leyden.learning.batch import Batch

VOCAB = 49152
LAYOUTS: tuple[Layout, ...] = ("padded", "packed", "tree")
Action = tuple[Sequence[int], int]


class _NoTokenizer:
    eos_token_id = 2
    chat_template = ""


def random_smollm2() -> LoadedModel:
    """Random weights in the shapes of SmolLM2-135M."""
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        head_dim=64,
        max_position_embeddings=8192,
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
        tie_word_embeddings=True,
    )
    config._attn_implementation = ATTENTION_NAME
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    if torch.cuda.is_available():
        nn.Module.cuda(model)  # the override in transformers hides its signature
    return wrap(
        model,
        _NoTokenizer(),
        "",
        dtype="bfloat16",
        lora=None,
        max_context=4096,
        source="random weights in the shapes of SmolLM2-135M",
    )


def group(rng: np.random.Generator, num: int, prompt: int, response: int) -> list[Action]:
    """One task: `num` responses of equal length to one prompt."""
    shared = rng.integers(3, VOCAB, prompt).tolist()
    return [(shared + rng.integers(3, VOCAB, response).tolist(), prompt) for _ in range(num)]


def agent_group(
    rng: np.random.Generator, num: int, prompt: int, response: int, observation: int, turns: int
) -> list[Action]:
    """One task of several turns: each call's prompt is everything before it."""
    shared = rng.integers(3, VOCAB, prompt).tolist()
    actions: list[Action] = []
    for _ in range(num):
        history = list(shared)
        for _ in range(turns):
            sequence = history + rng.integers(3, VOCAB, response).tolist()
            actions.append((sequence, len(history)))
            history = sequence + rng.integers(3, VOCAB, observation).tolist()
    return actions


def to_batch(actions: Sequence[Action], rng: np.random.Generator) -> Batch:
    """Random credit, every action a rollout."""
    lengths_A = np.asarray([len(sequence) - prompt for sequence, prompt in actions])
    N = int(lengths_A.sum())
    return Batch(
        sequences=[np.asarray(sequence, np.int32) for sequence, _ in actions],
        prompt_len_A=np.asarray([prompt for _, prompt in actions], np.int32),
        rollout_A=np.arange(len(actions), dtype=np.int32),
        temperature_A=np.ones(len(actions), np.float32),
        action_N=np.repeat(np.arange(len(actions)), lengths_A).astype(np.int32),
        offset_N=np.concatenate([np.arange(n) for n in lengths_A]).astype(np.int32),
        token_N=np.concatenate([sequence[prompt:] for sequence, prompt in actions]).astype(np.int32),
        logp_sampler_N=np.full(N, np.nan, np.float32),
        credit_N=rng.normal(size=N).astype(np.float32),
        weight_N=np.full(N, 1 / N, np.float32),
        num_rollouts=len(actions),
    )


def clear(loaded: LoadedModel) -> None:
    """Zero gradients in place, as the trainer does after each step."""
    for parameter in loaded.trainable().values():
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        parameter.grad.zero_()


def gradient(loaded: LoadedModel, trainer: Trainer, batch: Batch) -> torch.Tensor:
    """All gradients of one update, as one vector."""
    clear(loaded)
    trainer.accumulate(batch, Objective())
    parts = [p.grad.detach().flatten().clone() for p in loaded.trainable().values() if p.grad is not None]
    clear(loaded)
    return torch.cat(parts)


def measure(loaded: LoadedModel, batch: Batch, repeats: int, say: Callable[[str], None]) -> dict[str, Any]:
    """Median seconds and tokens of each layout."""
    trainers = {layout: Trainer(loaded, LearnConfig(layout=layout, token_budget=4096)) for layout in LAYOUTS}
    seconds: dict[str, list[float]] = {layout: [] for layout in LAYOUTS}
    for repetition in range(-1, repeats):
        for layout in LAYOUTS:
            clear(loaded)
            start = time.perf_counter()
            trainers[layout].accumulate(batch, Objective())
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            taken = time.perf_counter() - start
            if repetition >= 0:
                seconds[layout].append(taken)
    clear(loaded)
    median = {layout: statistics.median(values) for layout, values in seconds.items()}
    tokens = {layout: sum(p.num_tokens for p in plan_passes(batch, layout, 4096)) for layout in LAYOUTS}
    for layout in LAYOUTS:
        spread = f"{min(seconds[layout]):.2f} to {max(seconds[layout]):.2f}"
        say(f"    {layout:8} {tokens[layout]:6} tokens {median[layout]:7.2f} s  ({spread})")
    return {"seconds": median, "tokens": tokens}


def difference(batch: Batch, loaded: LoadedModel) -> float:
    """|tree - padded| / |padded| over all gradients, in float32: bfloat16 would show its rounding."""
    modules = [m for m in loaded.model.modules() if type(m).__name__ == "LowLinear"]
    for module in modules:
        module.__class__ = torch.nn.Linear
    loaded.dtype = "float32"
    try:
        reference = gradient(loaded, Trainer(loaded, LearnConfig(layout="padded")), batch)
        other = gradient(loaded, Trainer(loaded, LearnConfig(layout="tree")), batch)
    finally:
        from leyden.learning.backends.embedded.precision import LowLinear

        for module in modules:
            module.__class__ = LowLinear
        loaded.dtype = "bfloat16"
    return float((other - reference).norm() / reference.norm())


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table and the JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="the first shape only, 3 repetitions")
    parser.add_argument("--model", type=Path, help="folder of a model with the vocabulary of SmolLM2")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args(arguments)
    loaded = load_model(options.model) if options.model else random_smollm2()
    rng = np.random.default_rng(0)
    shapes = {
        "G=8 P=120 R=40": (group(rng, 8, 120, 40), 8 * 160 / (120 + 8 * 40)),
        "G=8 P=400 R=60": (group(rng, 8, 400, 60), 8 * 460 / (400 + 8 * 60)),
        "G=8 P=200, 3 turns of R=40 and 40 observed": (
            agent_group(rng, 8, 200, 40, 40, 3),
            8 * 400 / (200 + 8 * 200),
        ),
    }
    if options.quick:
        shapes = dict(list(shapes.items())[:1])
    repeats = min(3, options.repeats) if options.quick else options.repeats
    print(f"{loaded.source}, {torch.get_num_threads()} threads, {repeats} repetitions", flush=True)
    results: dict[str, dict[str, Any]] = {}
    for name, (actions, bound) in shapes.items():
        print(f"  {name} (bound {bound:.2f})", flush=True)
        batch = to_batch(actions, rng)
        found = measure(loaded, batch, repeats, lambda line: print(line, flush=True))
        seconds = found["seconds"]
        over_padded = seconds["padded"] / seconds["tree"]
        results[name] = {
            "speedup_over_padded": round(over_padded, 3),
            "speedup_over_packed": round(seconds["packed"] / seconds["tree"], 3),
            "bound": round(bound, 3),
            "share_of_bound": round(over_padded / bound, 3),
            "max_rel_grad_diff": float(f"{difference(batch, loaded):.2e}"),
            "seconds": {layout: round(value, 3) for layout, value in seconds.items()},
            "tokens": found["tokens"],
        }
        line = results[name]
        print(
            f"    tree is {line['speedup_over_padded']:.2f}x padded and {line['speedup_over_packed']:.2f}x "
            f"packed, {line['share_of_bound']:.0%} of the bound; gradients differ by "
            f"{line['max_rel_grad_diff']:.1e}",
            flush=True,
        )
    first, *rest = results
    print(json.dumps({"shape": first, **results[first], "shapes": {name: results[name] for name in rest}}))


if __name__ == "__main__":
    main()

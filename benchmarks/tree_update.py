"""Time and memory of one update (forward and backward) by layout, on the shapes of SmolLM2-135M in bfloat16.

    python benchmarks/tree_update.py [--quick] [--model FOLDER] [--repeats 3] [--shapes 1,2,3,4]

Layouts: rows padded to the longest, rows packed, rows merged by linear prefix (`peers/linear_prefix.py`: the rule of
Agent Lightning), the tree, and the tree depth first under an eighth of the token budget. Shapes: (1) a GRPO group, (2)
agents of 20 turns, (3) agents that ask a sub-agent in between and whose history is compacted after three turns, each
with the calls of one task's group, as the gateway records them; (4) four groups of the first shape, as a step has them.

Random weights are used unless a model is given; the time does not depend on their values. Layouts are timed in turn,
repetition by repetition, so that a change in the load of the machine meets all of them; medians are reported, of wall
time and (in the JSON line) of CPU time, which other processes disturb less. A repetition before measures memory: the
high-water mark of the resident set (of allocated memory on CUDA) above weights and gradients, after the allocator has
given back what it could.

Two bounds. `bound` is the ratio of tokens, padded to tree: for a group of G with prompt P and response R that is
G(P+R)/(P+GR). `reachable` takes the output layer and the loss out of it, which depend on the labels and not on the
layout: their time is measured alone, and only the rest of the padded time is divided by the ratio. Neither takes out
the attention, whose pairs of query and key are not divided by that ratio, nor the reading of weights and writing of
gradients in each pass.

Gradients of all layouts are compared with those of padded rows in float32 on two layers of the same shapes: bfloat16
would show its rounding. The last line is one JSON object.
"""

import argparse
import ctypes
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import leyden.learning.backends.embedded  # noqa: F401 - before torch: it says how threads wait

# isort: split

import numpy as np
import torch
from benchmarks.peers.linear_prefix import LinearPrefix
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from leyden.base.config import LearnConfig
from leyden.learning.backends.base import Layout, Objective
from leyden.learning.backends.embedded import precision
from leyden.learning.backends.embedded.attention import ATTENTION_NAME
from leyden.learning.backends.embedded.model import ComputeType, LoadedModel, load_model, wrap
from leyden.learning.backends.embedded.planner import shape_of
from leyden.learning.backends.embedded.trainer import Trainer
from leyden.learning.batch import Batch

VOCAB = 49152
BUDGET = 4096
LAYOUTS = ("padded", "packed", "linear_prefix", "tree", "depth_first")
Call = tuple[Sequence[int], int]
"""(prompt and response, tokens of the prompt)."""


class _NoTokenizer:
    eos_token_id = 2
    chat_template = ""


def random_smollm2(num_layers: int = 30, dtype: ComputeType = "bfloat16") -> LoadedModel:
    """Random weights in the shapes of SmolLM2-135M."""
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=num_layers,
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
        dtype=dtype,
        lora=None,
        max_context=4096,
        source="random weights in the shapes of SmolLM2-135M",
    )


class Texts:
    """Random tokens."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)

    def new(self, num: int) -> list[int]:
        """`num` tokens that nobody else has."""
        ids: list[int] = self.rng.integers(3, VOCAB, num).tolist()
        return ids


def group(texts: Texts, num: int, prompt: int, response: int) -> list[list[Call]]:
    """Calls of each rollout: one response to the prompt that all share."""
    shared = texts.new(prompt)
    return [[(shared + texts.new(response), prompt)] for _ in range(num)]


def turns(texts: Texts, history: list[int], num: int, response: int, observation: int) -> list[Call]:
    """Calls of a conversation that goes on from `history`: each prompt is everything before it."""
    calls: list[Call] = []
    for _ in range(num):
        sequence = history + texts.new(response)
        calls.append((sequence, len(history)))
        history = sequence + texts.new(observation)
    return calls


def agents(texts: Texts, num: int, prompt: int, num_turns: int, response: int, observation: int) -> list[list[Call]]:
    """Calls of each rollout: a conversation of many turns from one prompt."""
    shared = texts.new(prompt)
    return [turns(texts, shared, num_turns, response, observation) for _ in range(num)]


def compacting_agents(texts: Texts, num: int) -> list[list[Call]]:
    """Calls of each rollout, in time: three turns that alternate with two of a sub-agent, then the history is replaced
    by a summary and three more turns follow."""
    system, sub_system = texts.new(160), texts.new(120)
    rollouts = []
    for _ in range(num):
        main = turns(texts, system, 3, 20, 20)
        sub = turns(texts, sub_system + texts.new(20), 2, 20, 20)
        after = turns(texts, system + texts.new(50), 3, 20, 20)
        rollouts.append([main[0], sub[0], main[1], sub[1], main[2], *after])
    return rollouts


def shapes_of(quick: bool) -> dict[str, list[list[Call]]]:
    """The calls of each shape, by name."""
    texts = Texts(0)
    if quick:
        return {
            "GRPO: G=4 P=160 R=40": group(texts, 4, 160, 40),
            "agents: G=2 P=200 and 20 turns of 8 + 8": agents(texts, 2, 200, 20, 8, 8),
            "compaction and sub-agents: G=2": compacting_agents(texts, 2),
            "a step of 2 groups: G=4 P=160 R=40": [one for _ in range(2) for one in group(texts, 4, 160, 40)],
        }
    return {
        "GRPO: G=8 P=256 R=48": group(texts, 8, 256, 48),
        "agents: G=3 P=400 and 20 turns of 12 + 12": agents(texts, 3, 400, 20, 12, 12),
        "compaction and sub-agents: G=3": compacting_agents(texts, 3),
        "a step of 4 groups: G=8 P=256 R=48": [one for _ in range(4) for one in group(texts, 8, 256, 48)],
    }


def to_batch(rollouts: Sequence[Sequence[Call]], seed: int = 0) -> Batch:
    """One optimizer step with random credit; calls of a rollout in time order."""
    rng = np.random.default_rng(seed)
    calls = [call for rollout in rollouts for call in rollout]
    lengths_A = np.asarray([len(sequence) - prompt for sequence, prompt in calls])
    N = int(lengths_A.sum())
    return Batch(
        sequences=[np.asarray(sequence, np.int32) for sequence, _ in calls],
        prompt_len_A=np.asarray([prompt for _, prompt in calls], np.int32),
        rollout_A=np.repeat(np.arange(len(rollouts)), [len(rollout) for rollout in rollouts]).astype(np.int32),
        temperature_A=np.ones(len(calls), np.float32),
        action_N=np.repeat(np.arange(len(calls)), lengths_A).astype(np.int32),
        offset_N=np.concatenate([np.arange(n) for n in lengths_A]).astype(np.int32),
        token_N=np.concatenate([sequence[prompt:] for sequence, prompt in calls]).astype(np.int32),
        logp_sampler_N=np.full(N, np.nan, np.float32),
        credit_N=rng.normal(size=N).astype(np.float32),
        weight_N=np.full(N, 1 / N, np.float32),
        num_rollouts=len(rollouts),
    )


def trainer_for(loaded: LoadedModel, layout: str) -> Trainer:
    """A trainer that lays out steps in this way."""
    if layout == "linear_prefix":
        trainer = Trainer(loaded, LearnConfig(layout="packed", token_budget=BUDGET))
        trainer.planner = LinearPrefix(BUDGET, shape_of(loaded))
        return trainer
    ours: Layout = layout  # type: ignore[assignment]
    return Trainer(loaded, LearnConfig(layout=ours, token_budget=BUDGET // 8 if layout == "depth_first" else BUDGET))


def clear(loaded: LoadedModel) -> None:
    """No gradients, and memory for them, as the trainer leaves it after each step."""
    precision.clear_gradients(loaded.model, loaded.trainable().values())


def timed(action: Callable[[], Any]) -> tuple[float, float]:
    """(seconds, seconds of all CPU cores together)."""
    start, cpu = time.perf_counter(), time.process_time()
    action()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - start, time.process_time() - cpu


def _status_bytes(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise AssertionError(f"/proc/self/status has no {name}")


def peak_bytes(action: Callable[[], Any]) -> int | None:
    """Most memory that `action` needs beyond what is there before; None where it cannot be measured."""
    if torch.cuda.is_available():
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        action()
        return torch.cuda.max_memory_allocated() - before
    if sys.platform != "linux":
        action()
        return None
    ctypes.CDLL(None).malloc_trim(0)  # otherwise what the layout before has freed counts as resident
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark begins anew
    before = _status_bytes("VmRSS")
    action()
    return _status_bytes("VmHWM") - before


def label_seconds(trainer: Trainer, batch: Batch) -> float:
    """Median seconds of the output layer and the loss of a step, forward and backward."""
    (one, *more) = trainer.planner.plan(batch).passes
    assert not more
    width = int(trainer.loaded.config.hidden_size)
    hidden_BTE = torch.randn(*one.ids_BT.shape, width, device=trainer.loaded.device, requires_grad=True)

    def once() -> None:
        logp_L, _ = trainer._labels_of(hidden_BTE, batch, one, entropy=False)
        logp_L.mean().backward()  # type: ignore[no-untyped-call]

    return statistics.median(timed(once)[0] for _ in range(3))


def measure(loaded: LoadedModel, batch: Batch, repeats: int) -> dict[str, Any]:
    """Median seconds, tokens, passes and peak bytes of each layout, and the seconds that no layout can save."""
    trainers = {layout: trainer_for(loaded, layout) for layout in LAYOUTS}
    seconds: dict[str, list[float]] = {layout: [] for layout in LAYOUTS}
    cpu_seconds: dict[str, list[float]] = {layout: [] for layout in LAYOUTS}
    peaks: dict[str, int | None] = {}
    for repetition in range(-1, repeats):
        for layout, trainer in trainers.items():
            clear(loaded)
            run = lambda trainer=trainer: trainer.accumulate(batch, Objective())  # noqa: E731
            if repetition < 0:
                peaks[layout] = peak_bytes(run)
            else:
                wall, cpu = timed(run)
                seconds[layout].append(wall)
                cpu_seconds[layout].append(cpu)
    clear(loaded)
    passes = {layout: trainer.planner.plan(batch).passes for layout, trainer in trainers.items()}
    return {
        "seconds": {layout: statistics.median(values) for layout, values in seconds.items()},
        "cpu_seconds": {layout: statistics.median(values) for layout, values in cpu_seconds.items()},
        "spread": {layout: (min(values), max(values)) for layout, values in seconds.items()},
        "tokens": {layout: sum(p.num_tokens for p in passes[layout]) for layout in LAYOUTS},
        "passes": {layout: len(passes[layout]) for layout in LAYOUTS},
        "peak_bytes": peaks,
        "label_seconds": label_seconds(trainers["tree"], batch),
    }


def gradient(loaded: LoadedModel, batch: Batch, layout: str) -> torch.Tensor:
    """All gradients of one update, as one vector."""
    clear(loaded)
    trainer_for(loaded, layout).accumulate(batch, Objective())
    return torch.cat([p.grad.flatten().clone() for p in loaded.trainable().values() if p.grad is not None])


def difference(batch: Batch) -> float:
    """Largest over layouts of |gradient - that of padded rows| / |that of padded rows|, in float32, two layers."""
    loaded = random_smollm2(num_layers=2, dtype="float32")
    reference = gradient(loaded, batch, "padded")
    return max(float((gradient(loaded, batch, x) - reference).norm() / reference.norm()) for x in LAYOUTS[1:])


def summary(found: dict[str, Any], batch: Batch) -> dict[str, Any]:
    """The numbers of one shape."""
    seconds, tokens, peaks = found["seconds"], found["tokens"], found["peak_bytes"]
    over_padded = seconds["padded"] / seconds["tree"]
    bound = tokens["padded"] / tokens["tree"]
    fixed = min(found["label_seconds"], seconds["tree"])
    reachable = seconds["padded"] / (fixed + (seconds["padded"] - fixed) / bound)
    known = peaks["padded"] and peaks["tree"] and peaks["depth_first"]
    return {
        "speedup_over_padded": round(over_padded, 3),
        "speedup_over_packed": round(seconds["packed"] / seconds["tree"], 3),
        "speedup_over_linear_prefix": round(seconds["linear_prefix"] / seconds["tree"], 3),
        "speedup_over_padded_depth_first": round(seconds["padded"] / seconds["depth_first"], 3),
        "bound": round(bound, 3),
        "share_of_bound": round(over_padded / bound, 3),
        "reachable": round(reachable, 3),
        "share_of_reachable": round(over_padded / reachable, 3),
        "peak_memory_ratio": round(peaks["padded"] / peaks["tree"], 3) if known else None,
        "peak_memory_ratio_depth_first": round(peaks["padded"] / peaks["depth_first"], 3) if known else None,
        "max_rel_grad_diff": float(f"{difference(batch):.2e}"),
        "seconds": {layout: round(value, 3) for layout, value in seconds.items()},
        "cpu_seconds": {layout: round(value, 3) for layout, value in found["cpu_seconds"].items()},
        "label_seconds": round(found["label_seconds"], 3),
        "tokens": tokens,
        "passes": found["passes"],
        "peak_bytes": peaks,
    }


def show(found: dict[str, Any], line: dict[str, Any]) -> None:
    """The table of one shape."""
    for layout in LAYOUTS:
        low, high = found["spread"][layout]
        peak = found["peak_bytes"][layout]
        memory = "unknown" if peak is None else f"{peak / 1e6:.0f} MB"
        print(
            f"    {layout:14} {found['tokens'][layout]:6} tokens {found['passes'][layout]:3} passes "
            f"{found['seconds'][layout]:7.2f} s  ({low:.2f} to {high:.2f})  peak {memory}"
        )
    print(
        f"    the tree is {line['speedup_over_padded']:.2f}x padded, {line['speedup_over_packed']:.2f}x packed, "
        f"{line['speedup_over_linear_prefix']:.2f}x linear prefix: {line['share_of_bound']:.0%} of the bound of tokens "
        f"({line['bound']:.2f}), {line['share_of_reachable']:.0%} of what the output layer leaves "
        f"({line['reachable']:.2f}); gradients differ by {line['max_rel_grad_diff']:.1e}",
        flush=True,
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the tables and the JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="smaller groups, 1 repetition")
    parser.add_argument("--model", type=Path, help="folder of a model with the vocabulary of SmolLM2")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--shapes", default="1,2,3,4", help="numbers of the shapes to run")
    options = parser.parse_args(arguments)
    loaded = load_model(options.model) if options.model else random_smollm2()
    repeats = 1 if options.quick else options.repeats
    print(f"{loaded.source}, {torch.get_num_threads()} threads, {repeats} repetitions", flush=True)
    chosen = [int(number) for number in options.shapes.split(",")]
    results: dict[str, dict[str, Any]] = {}
    for number, (name, rollouts) in enumerate(shapes_of(options.quick).items(), 1):
        if number not in chosen:
            continue
        print(f"  {name}", flush=True)
        batch = to_batch(rollouts)
        found = measure(loaded, batch, repeats)
        results[name] = summary(found, batch)
        show(found, results[name])
    first = next(iter(results))
    print(json.dumps({"shape": first, **results[first], "shapes": results}))


if __name__ == "__main__":
    main()

"""Seconds of a whole update (passes and optimizer step) on SmolLM2-135M in bfloat16, and what its layers save.

    python benchmarks/update_seconds.py [--model FOLDER] [--repeats 5] [--batches sft,rl]

Batches: `sft` is four answers of 28 tokens behind prompts of 108; `rl` is eight groups of eight answers of 25 tokens
behind a shared prompt of 250, as a step of GRPO has them. Updates run in a worker thread and keep their memory, as the
backend does. Each batch is updated in turn with the layers computed in few passes over memory (`fused`) and by
their own forward, so that a change in the load of the machine meets both. Least and median are reported, of wall time
and of CPU time. The last line is JSON.
"""

import argparse
import json
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "src"))

import leyden.learning.backends.embedded  # noqa: F401 - before torch: it says how threads wait

# isort: split

import torch
from benchmarks.tree_update import Texts, group, random_smollm2, to_batch

from leyden.base.config import LearnConfig
from leyden.learning.backends.base import Objective
from leyden.learning.backends.embedded import fused, memory
from leyden.learning.backends.embedded.model import load_model
from leyden.learning.backends.embedded.trainer import Trainer
from leyden.learning.batch import Batch

OBJECTIVE = Objective(learning_rate=1e-6)


def batches() -> dict[str, Batch]:
    """Random tokens in the shapes above."""
    texts = Texts(0)
    return {
        "sft": to_batch([one for _ in range(4) for one in group(texts, 1, 108, 28)]),
        "rl": to_batch([one for _ in range(8) for one in group(texts, 8, 250, 25)]),
    }


def timed(trainer: Trainer, batch: Batch, worker: ThreadPoolExecutor, *, plain: bool) -> tuple[float, float]:
    """(seconds, seconds of all CPU cores together) of one update."""

    def update() -> None:
        with patch.object(fused, "fused_scope", nullcontext) if plain else nullcontext():
            trainer.update([batch], OBJECTIVE)
        memory.give_back_if_scarce()

    start, cpu = time.perf_counter(), time.process_time()
    worker.submit(update).result()
    return time.perf_counter() - start, time.process_time() - cpu


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="folder of a model with the vocabulary of SmolLM2")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--batches", default="sft,rl")
    options = parser.parse_args()
    trainer = Trainer(load_model(options.model) if options.model else random_smollm2(), LearnConfig(layout="tree"))
    found: dict[str, dict[str, float]] = {}
    with ThreadPoolExecutor(1) as worker:
        for name, batch in batches().items():
            if name not in options.batches.split(","):
                continue
            times: dict[str, list[tuple[float, float]]] = {"fused": [], "own": []}
            for _ in range(options.repeats + 1):
                for kind, kept in times.items():
                    kept.append(timed(trainer, batch, worker, plain=kind == "own"))
            for kind, kept in times.items():
                wall, cpu = zip(*kept[1:], strict=True)  # the first makes the optimizer's state
                found[f"{name}_{kind}"] = {
                    "least_s": min(wall), "median_s": statistics.median(wall),
                    "least_cpu_s": min(cpu), "median_cpu_s": statistics.median(cpu),
                }  # fmt: skip
                print(name, kind, {key: round(value, 2) for key, value in found[f"{name}_{kind}"].items()}, flush=True)
    print(json.dumps({"threads": torch.get_num_threads(), **found}))


if __name__ == "__main__":
    main()

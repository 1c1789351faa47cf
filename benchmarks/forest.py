"""Time to build forests of many tokens on one core: groups, agents of many turns, compaction, identical prompts.

    python benchmarks/forest.py [--quick] [--tokens 10000000] [--repeats 3]

Each shape has about `--tokens` tokens in all sequences together (`--quick`: 2 million, one repetition). The
reference is one pass over the same tokens that only copies them (`numpy.concatenate`); `times_copy` says how many
such passes a forest costs, which depends less on the machine than seconds do. The best of the repetitions counts,
since anything else only adds. The last line is one JSON object.
"""

import argparse
import json
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from leyden.base.records import IntArray
from leyden.traces.forest import build_forest
from leyden.traces.nodes import compress

VOCAB = 150_000


def groups(rng: np.random.Generator, num_tokens: int) -> list[IntArray]:
    """Groups of 8 rollouts: a prompt of 800 tokens that they share, 200 of their own."""
    rows: list[IntArray] = []
    for _ in range(max(1, num_tokens // 8000)):
        prompt = _ids(rng, 800)
        rows += [np.concatenate((prompt, _ids(rng, 200))) for _ in range(8)]
    return rows


def agents(rng: np.random.Generator, num_tokens: int) -> list[IntArray]:
    """Agents of 40 turns, each call one row that repeats everything before it."""
    rows: list[IntArray] = []
    total = 0
    while total < num_tokens:
        history = _ids(rng, 500)
        for _ in range(40):
            history = np.concatenate((history, _ids(rng, 120)))
            rows.append(history)
            total += len(history)
    return rows


def compactions(rng: np.random.Generator, num_tokens: int) -> list[IntArray]:
    """Agents that rewrite their history every fifth turn behind a system prompt of 1000 tokens."""
    rows: list[IntArray] = []
    total = 0
    system = _ids(rng, 1000)
    while total < num_tokens:
        for _ in range(8):
            history = np.concatenate((system, _ids(rng, 100)))
            for _ in range(5):
                history = np.concatenate((history, _ids(rng, 300)))
                rows.append(history)
                total += len(history)
    return rows


def repeats(rng: np.random.Generator, num_tokens: int) -> list[IntArray]:
    """One prompt of 4000 tokens sampled again and again: the worst case of comparing whole rows."""
    prompt = _ids(rng, 4000)
    return [np.concatenate((prompt, _ids(rng, 16))) for _ in range(max(1, num_tokens // 4016))]


SHAPES: dict[str, Callable[[np.random.Generator, int], list[IntArray]]] = {
    "groups": groups,
    "agents": agents,
    "compactions": compactions,
    "repeats": repeats,
}


def _ids(rng: np.random.Generator, num: int) -> IntArray:
    return rng.integers(0, VOCAB, num, dtype=np.int32)


def _best(run: Callable[[], Any], times: int) -> float:
    best = float("inf")
    for _ in range(times):
        start = time.perf_counter()
        run()
        best = min(best, time.perf_counter() - start)
    return best


def measure(rows: Sequence[IntArray], times: int) -> dict[str, Any]:
    """Seconds of the forest, of its nodes, and of one copy of the tokens."""
    forest = build_forest(rows)
    num_tokens = int(sum(map(len, rows)))
    seconds = _best(lambda: build_forest(rows), times)
    copy = _best(lambda: np.concatenate(rows), times)
    return {
        "rows": len(rows),
        "tokens": num_tokens,
        "unique": len(forest.tokens_U),
        "seconds": round(seconds, 3),
        "nodes_seconds": round(_best(lambda: compress(forest), times), 3),
        "million_tokens_per_s": round(num_tokens / seconds / 1e6, 2),
        "times_copy": round(seconds / max(copy, 1e-9), 1),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table and the JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="2 million tokens, one repetition")
    parser.add_argument("--tokens", type=int, default=10_000_000)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args(arguments)
    num_tokens, times = (2_000_000, 1) if options.quick else (options.tokens, options.repeats)
    found: dict[str, dict[str, Any]] = {}
    for name, make in SHAPES.items():
        found[name] = one = measure(make(np.random.default_rng(0), num_tokens), times)
        print(
            f"  {name:12} {one['rows']:6} rows {one['tokens']:9} tokens {one['unique']:9} unique "
            f"{one['seconds']:7.3f} s  {one['million_tokens_per_s']:6.2f} M tokens/s  {one['times_copy']:5.1f} copies",
            flush=True,
        )
    slowest = min(one["million_tokens_per_s"] for one in found.values())
    print(json.dumps({"tokens": num_tokens, "slowest_million_tokens_per_s": slowest, "shapes": found}))


if __name__ == "__main__":
    main()

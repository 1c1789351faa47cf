"""How often does the gate call two equal policies different? A/A simulations through the real gate, as JSON.

    python benchmarks/calibration.py                10,000 pairs per case
    python benchmarks/calibration.py --pairs 500

Each case draws tasks of very different difficulty (success rates Beta(1/2, 1/2)), lets equal policies try them, and
asks `leyden.release.gate` what it thinks. Since they are equal, every "better" and "worse" is false.

| case | what is simulated | nominal rate |
|---|---|---|
| single | one sample per task: exact McNemar and interval | 5 % |
| several | 4 samples per task: sign-flip permutation and bootstrap | 5 % |
| versions | 4 equal versions side by side, Holm: any false answer | 5 % |
| looks | 5 candidates against one base on the same tasks, spending: any false answer | 5 % |
| unspent | the same 5 looks, each at the full rate: why looks are counted | over 5 % |

With one sample per task a pair is summed up by how many tasks were won and lost, so the gate is asked once for each
such table and the answer is kept; with several samples, once for each multiset of differences.

Letters of shapes: S = simulated pairs, N = tasks, K = samples of a task, V = versions.
"""

import argparse
import json
import math
import sys
import time
from collections.abc import Callable
from functools import cache

import numpy as np
from numpy.typing import NDArray

from leyden.base.multiplicity import holm, spent_at
from leyden.base.power import mcnemar_power
from leyden.release.evaluation import Evaluation, TaskResult
from leyden.release.gate import Comparison, compare

Case = Callable[[int, int, int], int]
"""(simulations, tasks, seed) to the number of simulations with a false answer."""

ALPHA = 0.05
NUM_LOOKS = 5
NUM_VERSIONS = 4
NUM_SAMPLES = 4
RESAMPLES = 1000
"""Of the interval: enough for an answer, and ten times cheaper than the default."""


def evaluation(successes_NK: NDArray[np.bool_]) -> Evaluation:
    """An evaluation of which only the successes matter."""
    tasks = tuple(
        TaskResult(
            task_id=f"t{number:05}", domain="", rewards=(None,) * len(row), successes=tuple(map(bool, row)),
            outcomes=("completed",) * len(row), components={}, num_unscored=0, num_calls=1.0, completion_tokens=1.0,
            latency_s=None,
        )
        for number, row in enumerate(successes_NK)
    )  # fmt: skip
    return Evaluation(
        policy_version="main@0", split="holdout", fingerprint="aa", success="", tasks=tasks, resamples=RESAMPLES
    )


@cache
def verdict_of(num_tasks: int, num_won: int, num_lost: int, alpha: float) -> Comparison:
    """What the gate says of a table of single samples."""
    ours, theirs = np.zeros((2, num_tasks, 1), bool)
    ours[:num_won] = True
    theirs[num_won : num_won + num_lost] = True
    return compare(evaluation(ours), evaluation(theirs), level=1 - alpha)


def is_false(num_tasks: int, num_won: int, num_lost: int, alpha: float = ALPHA) -> bool:
    """Whether the gate calls the two different."""
    return verdict_of(num_tasks, num_won, num_lost, alpha).answer != "not separable"


def draw(rng: np.random.Generator, num_tasks: int, num_policies: int) -> NDArray[np.bool_]:
    """One sample per task of equal policies; shape (V, N)."""
    rates_N = rng.beta(0.5, 0.5, size=num_tasks)
    found: NDArray[np.bool_] = rng.random((num_policies, num_tasks)) < rates_N
    return found


def table(ours_N: NDArray[np.bool_], theirs_N: NDArray[np.bool_]) -> tuple[int, int]:
    """(tasks won, tasks lost)."""
    return int((ours_N & ~theirs_N).sum()), int((~ours_N & theirs_N).sum())


def single(num_pairs: int, num_tasks: int, seed: int) -> int:
    """False answers among pairs of one sample per task, all pairs drawn at once."""
    rng = np.random.default_rng(seed)
    rates_SN = rng.beta(0.5, 0.5, size=(num_pairs, num_tasks))
    ours_SN, theirs_SN = rng.random((2, num_pairs, num_tasks)) < rates_SN
    won_S, lost_S = (ours_SN & ~theirs_SN).sum(axis=1), (~ours_SN & theirs_SN).sum(axis=1)
    return sum(is_false(num_tasks, int(won), int(lost)) for won, lost in zip(won_S, lost_S, strict=True))


def several(num_pairs: int, num_tasks: int, seed: int) -> int:
    """False answers among pairs with `NUM_SAMPLES` samples per task."""
    rng = np.random.default_rng(seed)
    num_false, known = 0, dict[bytes, bool]()
    for _ in range(num_pairs):
        rates_N = rng.beta(0.5, 0.5, size=num_tasks)
        counts_N = rng.binomial(NUM_SAMPLES, rates_N, size=(2, num_tasks))
        # The order of tasks carries nothing, so pairs with the same counts are one case.
        ordered = counts_N[:, np.lexsort((counts_N[1], counts_N[0] - counts_N[1]))]
        key = (ordered[0] - ordered[1]).astype(np.int8).tobytes()
        if key not in known:
            both = np.arange(NUM_SAMPLES) < ordered[:, :, None]
            known[key] = compare(evaluation(both[0]), evaluation(both[1]), level=1 - ALPHA).answer != "not separable"
        num_false += known[key]
    return num_false


def versions(num_pairs: int, num_tasks: int, seed: int) -> int:
    """Simulations of `NUM_VERSIONS` equal versions in which any answer is false after Holm's correction."""
    rng = np.random.default_rng(seed)
    num_false = 0
    for _ in range(num_pairs):
        tried_VN = draw(rng, num_tasks, NUM_VERSIONS)
        found = [
            verdict_of(num_tasks, *table(tried_VN[a], tried_VN[b]), ALPHA)
            for a in range(NUM_VERSIONS)
            for b in range(a)
        ]
        adjusted = holm([one.p_value for one in found])
        num_false += any(p < ALPHA and one.answer != "not separable" for p, one in zip(adjusted, found, strict=True))
    return num_false


def looks(num_pairs: int, num_tasks: int, seed: int, *, spend: bool) -> int:
    """Simulations of `NUM_LOOKS` candidates against one base on the same tasks in which any answer is false."""
    rng = np.random.default_rng(seed)
    num_false = 0
    for _ in range(num_pairs):
        tried_VN = draw(rng, num_tasks, 1 + NUM_LOOKS)
        num_false += any(
            is_false(num_tasks, *table(tried_VN[look], tried_VN[0]), spent_at(look, ALPHA) if spend else ALPHA)
            for look in range(1, NUM_LOOKS + 1)
        )
    return num_false


def report(num_pairs: int, seed: int) -> dict[str, object]:
    """The rate of each case with two standard errors."""
    cases: dict[str, Callable[[], int]] = {
        "single, 30 tasks": lambda: single(num_pairs, 30, seed),
        "single, 300 tasks": lambda: single(num_pairs, 300, seed + 1),
        "several, 40 tasks": lambda: several(num_pairs, 40, seed + 2),
        "versions, 100 tasks": lambda: versions(num_pairs, 100, seed + 3),
        "looks, 100 tasks": lambda: looks(num_pairs, 100, seed + 4, spend=True),
        "unspent, 100 tasks": lambda: looks(num_pairs, 100, seed + 4, spend=False),
    }
    rows: dict[str, object] = {}
    for name, run in cases.items():
        begun = time.monotonic()
        rate = run() / num_pairs
        rows[name] = {"rate": rate, "two_se": 2 * math.sqrt(rate * (1 - rate) / num_pairs)}
        print(f"{name}: {100 * rate:.2f} % ({time.monotonic() - begun:.0f} s)", file=sys.stderr, flush=True)
    # Beta(1/2, 1/2): E[2 p (1 - p)] = 1/4 of the tasks differ, independently, so the rate has a closed form.
    exact = {f"single, {n} tasks": mcnemar_power(n, 0.25, 0.0, alpha=ALPHA) for n in (30, 300)}
    return {"alpha": ALPHA, "pairs": num_pairs, "seed": seed, "cases": rows, "mcnemar_alone_exact": exact}


def main() -> None:
    """Print progress on the error output and one JSON object last."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--pairs", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    print(json.dumps(report(arguments.pairs, arguments.seed)))


if __name__ == "__main__":
    main()

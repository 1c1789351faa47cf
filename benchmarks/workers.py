"""What a second worker brings.

Two workers, an engine and a load generator want four cores. With fewer the rates say how the machine is shared and
nothing about the gateway; then the ratio is a projection: twice the calls that one worker can serve with a core of its
own, by the processor time of a call with one worker and with two. It leaves out the waiting for each other's commits.
"""

import os
from typing import Any

from benchmarks import serving

NUM_CLIENTS = 64
"""The kernel spreads connections by chance, so there are many."""


def measure(seconds: float) -> dict[str, Any]:
    """Rates and processor time of one and of two workers."""
    available = tuple(sorted(os.sched_getaffinity(0)))
    enough = len(available) >= 4
    found: dict[int, serving.Result] = {}
    for workers in (1, 2):
        own = available[:workers] if enough else available
        others = available[workers:] if enough else available
        with serving.engine(others) as (url, _), serving.gateway(url, own, workers=workers) as room:
            name = f"{workers} worker{'s' if workers > 1 else ''}"
            results = serving.measure(name, room.port, room.pids, room.targets, seconds, others, (NUM_CLIENTS,))
            found[workers] = results[NUM_CLIENTS]
    measured = found[2]["rps"] / found[1]["rps"]
    projected = 2 * found[1]["cpu_ms"] / found[2]["cpu_ms"]
    kind = "measured" if enough else "projected"
    print(
        f"{'':28} two workers: {measured:.2f} times the rate with {len(available)} cores in all, "
        f"{projected:.2f} by processor time; workers2_ratio is {kind}",
        flush=True,
    )
    return {
        "workers2_ratio": measured if enough else projected,
        "workers2_ratio_is": kind,
        "workers2_rps_ratio_here": measured,
        "cores": len(available),
        "workers_errors": found[1]["errors"] + found[2]["errors"],
    }

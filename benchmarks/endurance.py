"""Whether the gateway's memory stays flat over many calls."""

from typing import Any

from benchmarks import serving
from benchmarks.serving import BODY, Cores

WARM = 0.2
"""Share of the calls before the first look: pools, caches and the heap find their size meanwhile."""
LIMIT_S = 240.0
"""Longest that the calls may take."""


def measure(cores: Cores, num_calls: int) -> dict[str, Any]:
    """Growth of resident memory per call, 32 clients with one attempt each."""
    with serving.engine(cores.others) as (url, _), serving.gateway(url, cores.server) as room:
        clients = room.targets(32)
        answered, sizes = [], []
        for calls in (int(WARM * num_calls), int((1 - WARM) * num_calls)):
            found = serving.load(
                "load", cores.others, port=room.port, clients=clients, body=BODY, warmup_s=0.0, seconds=LIMIT_S,
                calls=calls,
            )  # fmt: skip
            answered.append(found["answered"])
            sizes.append(serving.resident_bytes(room.pids[0]))
        growth = (sizes[1] - sizes[0]) / answered[1]
    print(
        f"{'memory':28} {sum(answered):.0f} calls: {sizes[0] / 2**20:.1f} MiB after {answered[0]:.0f}, "
        f"{sizes[1] / 2**20:.1f} MiB at the end, {growth:.1f} bytes a call",
        flush=True,
    )
    return {"rss_growth_bytes_per_call": growth, "rss_mib": sizes[1] / 2**20, "rss_calls": sum(answered)}

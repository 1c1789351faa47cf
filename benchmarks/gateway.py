"""Requests per second, latency, streams and memory of the gateway with durable capture, beside the bare engine,
agentlightning and LiteLLM's proxy.

Same fake engine behind each: a request of 10 messages, 500 prompt ids, 100 completion ids with
log-probabilities. The measured server has one core to itself; engine and load generator share another. The
last line is JSON. A full run takes about seven minutes, `--quick` two.

    python benchmarks/gateway.py [--quick] [--no-peers] [--profile FILE]
"""

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from benchmarks import endurance, serving, streams, workers  # noqa: E402 - the path is set above
from benchmarks.peers import agentlightning, litellm  # noqa: E402
from benchmarks.serving import Cores, Result  # noqa: E402

ENVIRONMENTS = ROOT / ".benchmark-venv"


def bare(seconds: float, cores: Cores) -> dict[int, Result]:
    """The fake engine alone."""
    path = {"path": "/v1/chat/completions", "key": "none"}
    with serving.engine(cores.server) as (url, pid):
        port = serving.port_of(url)
        return serving.measure("bare engine", port, [pid], lambda n: [path] * n, seconds, cores.others)


def leyden(seconds: float, cores: Cores, synchronous: str, profile: str, counts: tuple[int, ...]) -> dict[int, Result]:
    """The gateway with durable capture."""
    with (
        serving.engine(cores.others) as (url, _),
        serving.gateway(url, cores.server, synchronous=synchronous, profile=profile) as room,
    ):
        name = f"leyden ({synchronous})"
        results = serving.measure(name, room.port, room.pids, room.targets, seconds, cores.others, counts)
        recorded = room.store.read(lambda c: c.exec_driver_sql("select count(*) from completions").scalar())
        size = sum(path.stat().st_size for path in room.folder.iterdir())
        print(f"{'':28} {recorded} calls recorded, {size / max(1, recorded or 0):.0f} bytes each", flush=True)
        return results


def peers(seconds: float, cores: Cores) -> dict[str, dict[int, Result]]:
    """The peers that can be had here, by name."""
    results: dict[str, dict[int, Result]] = {}
    python = agentlightning.python_of(ENVIRONMENTS / "agentlightning")
    if python is None:
        print("no Python 3.12 was found, so agentlightning is not measured")
    else:
        with tempfile.TemporaryDirectory() as folder, serving.engine(cores.others) as (url, _):
            server, port = agentlightning.start(python, url, core=cores.server[0], folder=Path(folder))
            try:
                results["agentlightning"] = serving.measure(
                    f"agentlightning {agentlightning.VERSION}", port, [server.pid],
                    lambda n: agentlightning.targets(port, n), seconds, cores.others,
                )  # fmt: skip
            finally:
                server.kill()
                server.wait(30)
    python = litellm.python_of(ENVIRONMENTS / "litellm")
    with tempfile.TemporaryDirectory() as folder, serving.engine(cores.others) as (url, _):
        server, port = litellm.start(python, url, core=cores.server[0], folder=Path(folder))
        try:
            name = f"litellm {litellm.VERSION}"
            results["litellm"] = serving.measure(name, port, [server.pid], litellm.targets, seconds, cores.others)
        finally:
            server.kill()
            server.wait(30)
    return results


def ratio(ours: dict[int, Result], theirs: dict[int, Result] | None, what: str) -> float | None:
    """Of a figure at 32 clients; None without the peer, or if it answered nothing."""
    if theirs is None or not theirs[32][what]:
        return None
    return ours[32][what] / theirs[32][what]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="2 s per measurement instead of 8, 10,000 calls")
    parser.add_argument("--no-peers", action="store_true", help="leave agentlightning and LiteLLM out")
    parser.add_argument("--profile", default="", help="write a cProfile of the gateway to this file, and end")
    options = parser.parse_args()
    began = time.monotonic()
    seconds = 2.0 if options.quick else 8.0
    available = sorted(os.sched_getaffinity(0))
    cores = Cores(server=(available[0],), others=(available[-1],))
    if options.profile:
        leyden(seconds, cores, "full", options.profile, (1, 32))
        return
    alone = bare(seconds, cores)
    ours = leyden(seconds, cores, "full", "", (1, 32))
    lazier = leyden(seconds, cores, "normal", "", (1, 32))
    theirs = {} if options.no_peers else peers(seconds, cores)
    streamed = streams.measure(cores, rounds=4 if options.quick else 15)
    memory = endurance.measure(cores, 10_000 if options.quick else 100_000)
    two = workers.measure(seconds)
    lightning, lite = theirs.get("agentlightning"), theirs.get("litellm")
    summary: dict[str, Any] = {
        "rps_ratio_agentlightning_c32": ratio(ours, lightning, "rps"),
        "rps_ratio_litellm_c32": ratio(ours, lite, "rps"),
        "p99_ratio_agentlightning_c32": ratio(ours, lightning, "p99_ms"),
        "p99_ratio_litellm_c32": ratio(ours, lite, "p99_ms"),
        "cpu_ratio_agentlightning_c32": ratio(ours, lightning, "cpu_ms"),
        "cpu_ratio_litellm_c32": ratio(ours, lite, "cpu_ms"),
        "overhead_p50_ms_c1": ours[1]["p50_ms"] - alone[1]["p50_ms"],
        "overhead_p50_ms_c1_normal": lazier[1]["p50_ms"] - alone[1]["p50_ms"],
        **streamed,
        **memory,
        **two,
        "rps_c32": ours[32]["rps"],
        "rps_c32_normal": lazier[32]["rps"],
        "p50_ms_c32": ours[32]["p50_ms"],
        "p99_ms_c32": ours[32]["p99_ms"],
        "cpu_ms_c1": ours[1]["cpu_ms"],
        "cpu_ms_c32": ours[32]["cpu_ms"],
        "rps_bare_engine_c32": alone[32]["rps"],
        "errors": ours[1]["errors"] + ours[32]["errors"] + lazier[1]["errors"] + lazier[32]["errors"],
        "load_average": os.getloadavg()[0],
        "seconds": time.monotonic() - began,
    }
    print(json.dumps(summary))


if __name__ == "__main__":
    main()

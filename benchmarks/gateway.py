"""Requests per second and latency of the gateway with durable capture, beside the bare engine and
agentlightning.

Same fake engine behind each: a request of 10 messages, 500 prompt ids, 100 completion ids with
log-probabilities. The measured server has one core to itself; engine and load generator share another. The
last line is JSON.

    python benchmarks/gateway.py [--quick] [--no-peer] [--synchronous full]
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from benchmarks.peers import agentlightning  # noqa: E402 - the path is set above

from leyden.store import open_store  # noqa: E402
from leyden.testing.running import start_attempt  # noqa: E402

Targets = Callable[[int], list[dict[str, str]]]
Result = dict[str, float]

MESSAGES = [
    {
        "role": "system" if k == 0 else "user" if k % 2 else "assistant",
        "content": f"message {k}: ".ljust(42, "x"),
    }
    for k in range(10)
]
"""Byte tokens of the fake engine: 10 x (2 markers + role + 43) and the begin of the answer, about 500."""
BODY = {"model": "main", "messages": MESSAGES, "temperature": 1.0, "max_tokens": 100}
COMPLETION_TOKENS = 100
SERVE = """
import os, sys
from pathlib import Path
from leyden.base.config import from_tree
from leyden.gateway import serve
from leyden.store import open_store
folder, engine, synchronous, profile = Path(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4]
policy = {"engine": engine, "sampling": {"max_tokens": 100}}
config = from_tree({"policies": {"main": policy}}, base_dir=folder)
store = open_store(f"sqlite:///{folder / 'leyden.db'}", synchronous=synchronous)
def run():
    serve(config, store, on_ready=lambda where: print(where.url, flush=True))
if profile:
    import cProfile
    try:
        cProfile.runctx("run()", globals(), {}, profile)
    except KeyboardInterrupt:
        pass
else:
    try:
        run()
    except KeyboardInterrupt:
        pass
store.close()
"""


@contextmanager
def process(command: list[str], *, core: int) -> Iterator[tuple[str, int]]:
    """A process on one core; the first line that it prints, and its id."""
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'src'}"}
    child = subprocess.Popen(
        command, stdout=subprocess.PIPE, env=environment, preexec_fn=lambda: os.sched_setaffinity(0, {core})
    )
    assert child.stdout is not None
    try:
        yield child.stdout.readline().decode().strip(), child.pid
    finally:
        child.send_signal(signal.SIGINT)
        try:
            child.wait(30)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait(30)
        child.stdout.close()


def engine(core: int, path: str = "") -> Any:
    """A fake engine; yields its URL."""
    command = [
        sys.executable,
        "-m",
        "leyden.testing.fake_engine",
        "--tokens",
        str(COMPLETION_TOKENS),
        "--canned",
    ]
    return process(command, core=core)


def load(port: int, targets: list[dict[str, str]], seconds: float, core: int) -> Result:
    """Run the load generator in a process of its own."""
    job = {
        "host": "127.0.0.1",
        "port": port,
        "clients": targets,
        "body": BODY,
        "warmup_s": min(1.0, seconds / 3),
        "seconds": seconds,
    }
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks/peers/load.py")],
        input=json.dumps(job).encode(),
        stdout=subprocess.PIPE,
        check=True,
        preexec_fn=lambda: os.sched_setaffinity(0, {core}),
    )
    result: Result = json.loads(done.stdout)
    return result


def measure(name: str, port: int, pid: int, targets: Targets, seconds: float, core: int) -> dict[int, Result]:
    """Results by number of clients."""
    results = {}
    for num_clients in (1, 32):
        callers = targets(num_clients)
        before_s = cpu_seconds(pid)
        result = results[num_clients] = load(port, callers, seconds, core)
        result["cpu_ms"] = 1000 * (cpu_seconds(pid) - before_s) / max(1, result["answered"])
        print(
            f"{name:28} {num_clients:3} clients: {result['rps']:8.0f} req/s   "
            f"p50 {result['p50_ms']:7.2f} ms   p99 {result['p99_ms']:7.2f} ms   "
            f"cpu {result['cpu_ms']:6.3f} ms/req   errors {result['errors']:.0f}",
            flush=True,
        )
    return results


def cpu_seconds(pid: int) -> float:
    """Processor time of a process so far: it depends less than rates do on what else the machine does."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def bare(seconds: float, cores: tuple[int, int]) -> dict[int, Result]:
    """The fake engine alone."""
    path = {"path": "/v1/chat/completions", "key": "none"}
    # Token ids and log-probabilities are asked for by gateways; here the body has to ask itself, which
    # changes the first answer only, and that is the one that is kept.
    with engine(cores[0]) as (url, pid):
        _prime(url)
        return measure("bare engine", _port(url), pid, lambda n: [path] * n, seconds, cores[1])


def leyden(seconds: float, cores: tuple[int, int], synchronous: str, profile: str) -> dict[int, Result]:
    """The gateway with durable capture."""
    with tempfile.TemporaryDirectory(dir=ROOT) as folder, engine(cores[1]) as (engine_url, _):
        _prime(engine_url)
        store = open_store(f"sqlite:///{folder}/leyden.db")

        def targets(num_clients: int) -> list[dict[str, str]]:
            started = [start_attempt(store) for _ in range(num_clients)]
            return [{"path": s.base_url("") + "/chat/completions", "key": s.token} for s in started]

        command = [sys.executable, "-c", SERVE, folder, engine_url, synchronous, profile]
        with process(command, core=cores[0]) as (url, pid):
            results = measure(f"leyden ({synchronous})", _port(url), pid, targets, seconds, cores[1])
        recorded = store.read(lambda c: c.exec_driver_sql("select count(*) from completions").scalar())
        size = sum(path.stat().st_size for path in Path(folder).iterdir())
        print(f"{'':28} {recorded} calls recorded, {size / max(1, recorded or 0):.0f} bytes each", flush=True)
        store.close()
        return results


def peer(seconds: float, cores: tuple[int, int]) -> dict[int, Result] | None:
    """agentlightning's server, or None without Python 3.12."""
    python = agentlightning.python_of(ROOT / ".benchmark-venv" / "agentlightning")
    if python is None:
        print("no Python 3.12 was found, so agentlightning is not measured")
        return None
    with tempfile.TemporaryDirectory() as folder, engine(cores[1]) as (url, _):
        _prime(url)
        server, port = agentlightning.start(python, url, core=cores[0], folder=Path(folder))
        try:
            name = f"agentlightning {agentlightning.VERSION}"
            return measure(name, port, server.pid, lambda n: agentlightning.targets(port, n), seconds, cores[1])
        finally:
            server.kill()
            server.wait(30)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="2 s per measurement instead of 10")
    parser.add_argument("--no-peer", action="store_true", help="leave agentlightning out")
    parser.add_argument("--synchronous", choices=("normal", "full"), default="full")
    parser.add_argument("--profile", default="", help="write a cProfile of the gateway to this file")
    options = parser.parse_args()
    seconds = 2.0 if options.quick else 10.0
    available = sorted(os.sched_getaffinity(0))
    cores = (available[0], available[-1])
    engine_alone = bare(seconds, cores)
    ours = leyden(seconds, cores, options.synchronous, options.profile)
    theirs = None if options.no_peer else peer(seconds, cores)
    summary: dict[str, Any] = {
        "rps": ours[32]["rps"],
        "p50_ms_c32": ours[32]["p50_ms"],
        "p99_ms_c32": ours[32]["p99_ms"],
        "rps_bare_engine_c32": engine_alone[32]["rps"],
        "overhead_p50_ms_c1": ours[1]["p50_ms"] - engine_alone[1]["p50_ms"],
        "cpu_ms_c32": ours[32]["cpu_ms"],
        "cpu_ratio_agentlightning_c32": ours[32]["cpu_ms"] / theirs[32]["cpu_ms"] if theirs else None,
        "errors": ours[1]["errors"] + ours[32]["errors"],
        "synchronous": options.synchronous,
        "rps_ratio_agentlightning_c32": ours[32]["rps"] / theirs[32]["rps"] if theirs else None,
        "p99_ratio_agentlightning_c32": ours[32]["p99_ms"] / theirs[32]["p99_ms"] if theirs else None,
    }
    print(json.dumps(summary))


def _prime(url: str) -> None:
    """Ask once with everything a gateway asks for, so that this answer is the one that is repeated."""
    import urllib.request

    body = {**BODY, "logprobs": True, "return_token_ids": True}
    request = urllib.request.Request(
        f"{url}/v1/chat/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=10) as response:
        answer = json.load(response)
    assert len(answer["choices"][0]["token_ids"]) == COMPLETION_TOKENS


def _port(url: str) -> int:
    return int(url.rpartition(":")[2])


if __name__ == "__main__":
    main()

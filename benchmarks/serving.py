"""Servers that the gateway benchmarks start, each on cores of its own, and what is read of their processes."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from leyden.store import open_store
from leyden.store.base import Store
from leyden.testing.running import start_attempt

ROOT = Path(__file__).resolve().parent.parent
Targets = Callable[[int], list[dict[str, str]]]
"""Path and key of the calls of so many clients."""
Result = dict[str, float]

MESSAGES = [
    {
        "role": "system" if k == 0 else "user" if k % 2 else "assistant",
        "content": f"message {k}: ".ljust(42, "x"),
    }
    for k in range(10)
]
"""Byte tokens of the fake engine: 10 x (2 markers + role + 43) and the begin of the answer, about 500."""
BODY: dict[str, Any] = {"model": "main", "messages": MESSAGES, "temperature": 1.0, "max_tokens": 100}
COMPLETION_TOKENS = 100
SERVE = """
import sys
from pathlib import Path
from leyden.base.config import from_tree
from leyden.gateway import serve
from leyden.gateway.siblings import Siblings
from leyden.store import open_store
folder, engine, synchronous, profile, port, index, size = sys.argv[1:]
tree = {
    "policies": {"main": {"engine": engine, "sampling": {"max_tokens": 100}}},
    "gateway": {"port": int(port), "client_timeout_s": 600},
}
config = from_tree(tree, base_dir=Path(folder))
store = open_store(f"sqlite:///{folder}/leyden.db", synchronous=synchronous)
siblings = Siblings("benchmark", int(index), int(size)) if int(size) > 1 else None
def run():
    serve(config, store, siblings=siblings, on_ready=lambda where: print(where.url, flush=True))
try:
    if profile:
        import cProfile
        cProfile.runctx("run()", globals(), {}, profile)
    else:
        run()
except KeyboardInterrupt:
    pass
store.close()
"""


@dataclass(frozen=True, slots=True)
class Cores:
    """Who runs where. With two cores the engine and the load share one."""

    server: tuple[int, ...]
    """Of the server that is measured."""
    others: tuple[int, ...]
    """Of the engine and of the load generator."""


@dataclass(frozen=True, slots=True)
class Gateway:
    """A gateway that runs."""

    port: int
    """Where."""
    pids: tuple[int, ...]
    """Its processes."""
    store: Store
    """What it records into."""
    folder: Path
    """Where that is."""

    def targets(self, num_clients: int) -> list[dict[str, str]]:
        """One attempt per client."""
        started = [start_attempt(self.store) for _ in range(num_clients)]
        return [{"path": s.base_url("") + "/chat/completions", "key": s.token} for s in started]


def pinned(cores: Sequence[int]) -> Callable[[], None]:
    """For `preexec_fn`: run on these cores."""
    return lambda: os.sched_setaffinity(0, set(cores))


@contextmanager
def process(command: list[str], *, cores: Sequence[int]) -> Iterator[tuple[str, int]]:
    """A process on some cores; the first line that it prints, and its id."""
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'src'}"}
    child = subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, preexec_fn=pinned(cores))
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


@contextmanager
def engine(cores: Sequence[int]) -> Iterator[tuple[str, int]]:
    """A fake engine that repeats one answer; its URL and process."""
    module = [sys.executable, "-m", "leyden.testing.fake_engine"]
    with process([*module, "--tokens", str(COMPLETION_TOKENS), "--canned"], cores=cores) as (url, pid):
        _prime(url)
        yield url, pid


@contextmanager
def gateway(
    engine_url: str, cores: Sequence[int], *, synchronous: str = "full", profile: str = "", workers: int = 1
) -> Iterator[Gateway]:
    """A gateway in front of an engine, with durable capture on the disk of the repository."""
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(dir=ROOT))
        store = open_store(f"sqlite:///{folder}/leyden.db")
        stack.callback(store.close)
        port, pids = 0, []
        for index in range(workers):
            command = [sys.executable, "-c", SERVE, folder, engine_url, synchronous, profile]
            command += [str(port), str(index), str(workers)]
            url, pid = stack.enter_context(process(command, cores=cores))
            port = port_of(url)
            pids.append(pid)
        yield Gateway(port, tuple(pids), store, Path(folder))


def load(generator: str, cores: Sequence[int], **job: Any) -> dict[str, Any]:
    """What a load generator of `peers` found in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-m", f"benchmarks.peers.{generator}"], cwd=ROOT,
        input=json.dumps({"host": "127.0.0.1", **job}).encode(),
        stdout=subprocess.PIPE, check=True, preexec_fn=pinned(cores),
    )  # fmt: skip
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def measure(
    name: str, port: int, pids: Sequence[int], targets: Targets, seconds: float, cores: Sequence[int],
    counts: Sequence[int] = (1, 32),
) -> dict[int, Result]:  # fmt: skip
    """Results by number of clients, each printed."""
    results = {}
    for num_clients in counts:
        clients = targets(num_clients)
        before_s = cpu_seconds(pids)
        result = results[num_clients] = load(
            "load", cores, port=port, clients=clients, body=BODY, warmup_s=min(1.0, seconds / 3), seconds=seconds
        )
        result["cpu_ms"] = 1000 * (cpu_seconds(pids) - before_s) / max(1, result["answered"])
        print(
            f"{name:28} {num_clients:3} clients: {result['rps']:8.0f} req/s   "
            f"p50 {result['p50_ms']:7.2f} ms   p99 {result['p99_ms']:7.2f} ms   "
            f"cpu {result['cpu_ms']:6.3f} ms/req   errors {result['errors']:.0f}",
            flush=True,
        )
    return results


def cpu_seconds(pids: Sequence[int]) -> float:
    """Processor time of processes so far: it depends less than rates do on what else the machine does."""
    ticks = 0
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def resident_bytes(pid: int) -> int:
    """Memory of a process."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def port_of(url: str) -> int:
    """Of a URL without a path."""
    return int(url.rpartition(":")[2])


def _prime(url: str) -> None:
    """Ask once with everything a gateway asks for, so that this answer is the one that is repeated."""
    body = {**BODY, "logprobs": True, "return_token_ids": True}
    request = urllib.request.Request(
        f"{url}/v1/chat/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=10) as response:
        answer = json.load(response)
    assert len(answer["choices"][0]["token_ids"]) == COMPLETION_TOKENS

"""The peer: a virtual environment with LiteLLM's proxy, started and made ready for calls."""

import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

from benchmarks.peers import environment

VERSION = "1.108.7"
KEY = "sk-benchmark"
MODEL = "main"
START_S = 120.0
"""It imports for ten seconds on an idle core."""


def python_of(folder: Path) -> Path:
    """The interpreter of an environment with the peer, made if need be."""
    return environment.make(folder, sys.executable, [f"litellm[proxy]=={VERSION}"])


def start(python: Path, engine_url: str, *, core: int, folder: Path) -> tuple[subprocess.Popen[bytes], int]:
    """(process, port) of a proxy with one worker in front of `engine_url`, without a database and without logs."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    path = folder / "litellm.yaml"
    served = {"model": f"openai/{MODEL}", "api_base": f"{engine_url}/v1", "api_key": "none"}
    tree = {
        "model_list": [{"model_name": MODEL, "litellm_params": served}],
        "general_settings": {"master_key": KEY},
        "litellm_settings": {"telemetry": False, "set_verbose": False},
    }
    path.write_text(json.dumps(tree), encoding="utf-8")  # JSON is YAML
    run = "from litellm import run_server; run_server()"
    process = subprocess.Popen(
        [str(python), "-c", run, "--config", str(path), "--host", "127.0.0.1", "--port", str(port)],
        cwd=folder,
        env={**os.environ, "LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_LOG": "ERROR", "PYTHONPATH": ""},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        preexec_fn=lambda: os.sched_setaffinity(0, {core}),
    )
    deadline = time.monotonic() + START_S
    while True:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health/liveliness", timeout=5):
                return process, port
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            if time.monotonic() > deadline or process.poll() is not None:
                process.kill()
                raise TimeoutError(f"LiteLLM's proxy did not start within {START_S:.0f} s") from None
            time.sleep(0.2)


def targets(num_clients: int) -> list[dict[str, str]]:
    """Path and key, the same for every client."""
    return [{"path": "/v1/chat/completions", "key": KEY}] * num_clients

"""The peer: a virtual environment with agentlightning's server, started and made ready for calls."""

import glob
import json
import os
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

VERSION = "1.0.2"
KEY = "benchmark-key"
MODEL = "main"


def python_of(folder: Path) -> Path | None:
    """The interpreter of an environment with the peer, made if need be; None without Python 3.12."""
    python = folder / "bin" / "python"
    if (folder / "ready").exists():
        return python
    base = _python312()
    if base is None:
        return None
    print(f"making an environment with agentlightning {VERSION} (once, a minute or two) ...", flush=True)
    subprocess.run([base, "-m", "venv", str(folder)], check=True)
    subprocess.run([str(python), "-m", "pip", "install", "-q", f"agentlightning=={VERSION}"], check=True)
    (folder / "ready").write_text(VERSION)
    return python


def start(python: Path, engine_url: str, *, core: int, folder: Path) -> tuple[subprocess.Popen[bytes], int]:
    """(process, port) of a server that has `engine_url` registered; its log files go to `folder`."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    process = subprocess.Popen(
        [
            str(python),
            "-m",
            "agentlightning.server",
            "host=127.0.0.1",
            f"port={port}",
            f"key={KEY}",
            f"default_proxy.model_name={MODEL}",
            "hydra.run.dir=.",
            "hydra.output_subdir=null",
        ],
        cwd=folder,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        preexec_fn=lambda: os.sched_setaffinity(0, {core}),
    )
    deadline = time.monotonic() + 60
    while True:
        try:
            _post(port, "/api/models", [{"model": MODEL, "endpoint": f"{engine_url}/v1", "version": 0}])
            return process, port
        except (urllib.error.URLError, ConnectionError):
            if time.monotonic() > deadline or process.poll() is not None:
                process.kill()
                raise TimeoutError("agentlightning's server did not start within 60 s") from None
            time.sleep(0.2)


def targets(port: int, num_clients: int) -> list[dict[str, str]]:
    """One rollout per client: path and key of its calls."""
    made = _post(port, "/api/rollouts", [{"input": {}} for _ in range(num_clients)])
    return [
        {
            "path": f"/proxy/rollout/{item['rollout_id']}/attempt/0/mode/train/openai/v1/chat/completions",
            "key": KEY,
        }
        for item in made
    ]


def _post(port: int, path: str, body: Any) -> Any:
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}{path}", json.dumps(body).encode(),
        {"content-type": "application/json", "authorization": f"Bearer {KEY}"},
    )  # fmt: skip
    with urllib.request.urlopen(request, timeout=10) as response:
        return json.load(response)


def _python312() -> str | None:
    """A Python 3.12 that runs: on the path (a version manager's shim may refuse), or among a version
    manager's."""
    candidates = [
        shutil.which("python3.12"),
        *glob.glob(str(Path.home() / ".pyenv/versions/3.12*/bin/python")),
    ]
    for candidate in candidates:
        if candidate and subprocess.run([candidate, "-c", ""], capture_output=True, check=False).returncode == 0:
            return candidate
    return None

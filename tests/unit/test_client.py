"""What a harness author may import."""

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from leyden import client


@pytest.fixture
def gateway(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[str, str, Any]]]:
    seen: list[tuple[str, str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            seen.append((self.path, self.headers["authorization"], body))
            data = b'{"error": "rewards.from_agent is false"}' if body.get("name") == "refused" else b"{}"
            self.send_response(403 if body.get("name") == "refused" else 201)
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: Any) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    url = f"http://127.0.0.1:{server.server_address[1]}"
    monkeypatch.setenv("AGL_EVENT_URL", f"{url}/api/rollouts/r1/attempt/a1/events")
    monkeypatch.setenv("AGL_KEY", "token")
    monkeypatch.setenv("LEYDEN_ROLLOUT", "r1")
    monkeypatch.setenv("LEYDEN_ATTEMPT", "a1")
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    yield seen
    server.shutdown()
    server.server_close()
    thread.join()


def test_a_reward_goes_to_the_attempt_with_its_key(gateway: list[tuple[str, str, Any]]) -> None:
    client.reward(0.5)
    client.reward(1.0, name="step", call_id="c1")
    assert gateway == [
        ("/api/rollouts/r1/attempts/a1/rewards", "Bearer token", {"name": "reward", "value": 0.5}),
        (
            "/api/rollouts/r1/attempts/a1/rewards",
            "Bearer token",
            {"name": "step", "value": 1.0, "call_id": "c1"},
        ),
    ]


def test_a_span_carries_its_attributes(gateway: list[tuple[str, str, Any]]) -> None:
    client.span("search", query="x", hits=3)
    path, _, body = gateway[0]
    assert path == "/api/rollouts/r1/attempts/a1/spans"
    assert body["name"] == "search" and body["attributes"] == {"query": "x", "hits": 3}


def test_a_refusal_says_what_the_gateway_said(gateway: list[tuple[str, str, Any]]) -> None:
    with pytest.raises(client.Refused, match=r"403.*rewards\.from_agent is false"):
        client.reward(1.0, name="refused")


def test_a_gateway_that_is_gone_is_named(gateway: list[tuple[str, str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGL_EVENT_URL", "http://127.0.0.1:1/api/rollouts/r1/attempt/a1/events")
    with pytest.raises(client.Refused, match=r"no gateway at http://127\.0\.0\.1:1"):
        client.span("x")


def test_the_task_comes_from_the_variable_or_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LEYDEN_TASK", '{"id": "t"}')
    assert client.task() == {"id": "t"}
    (tmp_path / "task.json").write_text('{"id": "large"}')
    monkeypatch.setenv("LEYDEN_TASK_FILE", str(tmp_path / "task.json"))
    assert client.task() == {"id": "large"}


def test_outside_an_attempt_the_error_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LEYDEN_TASK", "LEYDEN_TASK_FILE", "LEYDEN_ROLLOUT"):
        monkeypatch.delenv(name, raising=False)
    for call in (client.task, lambda: client.reward(1.0), lambda: client.span("x")):
        with pytest.raises(client.OutsideAttempt, match="leyden run"):
            call()


def test_only_the_standard_library_is_imported() -> None:
    program = (
        "import sys; import leyden.client; print([m for m in ('pydantic', 'numpy', 'sqlalchemy') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONPATH": ":".join(sys.path)},
    )
    assert done.stdout == "[]\n"

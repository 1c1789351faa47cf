"""A gateway stand-in: answers chat completions and records each as a call, as the gateway does."""

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np

from leyden.base.records import CallCompletion, CallIntent, Choice, Provenance, Span, new_id
from leyden.store.base import Store
from leyden.traces.recorder import Recorder

ANSWER = {
    "id": "c", "object": "chat.completion", "created": 0, "model": "main",
    "choices": [{"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "fine"}}],
    "usage": {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5},
}  # fmt: skip


class StandIn:
    """What the stand-in does and has seen."""

    def __init__(self, store: Store) -> None:
        self.recorder = Recorder(store)
        self.status = 200
        """Answer of every call."""
        self.seen: list[tuple[str, str, Any]] = []
        """(path, authorization, body) of every request."""
        self.url = ""

    def answer(self, path: str, authorization: str, body: Any) -> tuple[int, Any]:
        self.seen.append((path, authorization, body))
        if "/openai/" not in path:
            return 200, {}
        parts = path.split("/")
        rollout_id, attempt_id = parts[3], parts[5]
        if self.status == 403:
            self.recorder.span(
                Span(
                    id=new_id("span"), rollout_id=rollout_id, attempt_id=attempt_id,
                    name="gateway_refusal",
                    attributes={"message": "no policy is called 'gpt-9'"}, started_at=time.time(),
                )
            ).result()  # fmt: skip
            return 403, {"error": {"message": "no policy is called 'gpt-9'"}}
        call_id = new_id("call")
        self.recorder.intent(
            CallIntent(
                call_id=call_id, rollout_id=rollout_id, attempt_id=attempt_id, seq=len(self.seen),
                digest=call_id, occurrence=0, origin="rollout", dialect="openai_chat",
                alias="main", policy="main",
                policy_version=0, engine="", stream=False, request=body, sampling={}, started_at=time.time(),
            )
        ).result()  # fmt: skip
        ok = self.status == 200
        answer: dict[str, Any] = ANSWER if ok else {"error": {"message": f"status {self.status}"}}
        choice = Choice(
            index=0, completion_ids=np.array([7, 8], np.int32), logprobs=np.zeros(2, np.float32),
            finish_reason="stop", text="fine",
        )  # fmt: skip
        self.recorder.completion(
            CallCompletion(
                call_id=call_id, status="ok" if ok else "error", http_status=self.status, response=answer,
                provenance=Provenance.SERVED, prompt_ids=np.array([1, 2, 3], np.int32),
                choices=[choice] if ok else [],
                error=None if ok else f"status {self.status}", ended_at=time.time(),
            )
        ).result()  # fmt: skip
        return self.status, answer


@contextmanager
def stand_in(store: Store) -> Iterator[StandIn]:
    """A running stand-in on a free port."""
    gateway = StandIn(store)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            status, answer = gateway.answer(self.path, self.headers.get("authorization", ""), body)
            data = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    gateway.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield gateway
    finally:
        server.shutdown()
        server.server_close()
        thread.join()

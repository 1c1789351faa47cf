"""What is left when something dies: the gateway at every phase of a call, the client or the engine at every event of a
stream; and retries that race with the first answer."""

import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from tests.contract.gateway_room import HELLO, Room, gateway_room
from tests.contract.test_gateway_ledger import in_thread, text_of, until

from leyden.base.records import Call
from leyden.store import open_store
from leyden.testing.crashing import PHASES
from leyden.testing.fake_engine import FakeEngine
from leyden.testing.running import Started, start_attempt
from leyden.testing.scripted import Faults, Reply
from leyden.traces.reader import Reader

BODY = {"model": "main", "messages": HELLO}
POINTS = [f"{phase}:after" for phase in PHASES] + ["_write_intent:before"]
RECORDED = {"record:after", "answer:after"}
"""Points behind which the answer is durable."""


@pytest.fixture
def room(tmp_path: Path) -> Iterator[Room]:
    with gateway_room(tmp_path) as room:
        yield room


class Doomed:
    """A gateway in a process of its own, from a nursery that has imported everything."""

    def __init__(
        self, nursery: "subprocess.Popen[str]", folder: Path, engine: str, port: int = 0, point: str = "", call: int = 1
    ) -> None:
        self._nursery = nursery
        order = {"folder": str(folder), "engine": engine, "port": port, "point": point, "call": call}
        assert nursery.stdin is not None
        nursery.stdin.write(json.dumps(order) + "\n")
        nursery.stdin.flush()
        facts = self._line()
        self.url, self.pid = facts["url"], facts["pid"]

    def wait(self) -> int:
        code: int = self._line()["code"]
        return code

    def end(self) -> int:
        os.kill(self.pid, signal.SIGTERM)
        return self.wait()

    def _line(self) -> Any:
        assert self._nursery.stdout is not None
        ready, _, _ = select.select([self._nursery.stdout], [], [], 30)
        assert ready, "the nursery said nothing for 30 s"
        return json.loads(self._nursery.stdout.readline())


@pytest.fixture(scope="module")
def nursery() -> Iterator["subprocess.Popen[str]"]:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, "-m", "leyden.testing.crashing"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env) as process:
        try:
            yield process
        finally:
            for child in psutil.Process(process.pid).children():
                child.kill()
            process.kill()


def ask(url: str, started: Started, body: dict[str, Any], retry: int) -> bytes | None:
    """Everything that came back, None if the connection broke."""
    headers = {"authorization": f"Bearer {started.token}", "x-stainless-retry-count": str(retry)}
    try:
        answer = httpx.post(f"{started.base_url(url)}/chat/completions", json=body, headers=headers, timeout=30)
    except httpx.TransportError:
        return None
    assert answer.status_code == 200, answer.text
    return answer.content


@pytest.mark.parametrize("stream", [False, True])
def test_a_kill_at_any_phase_of_a_call_loses_no_answer_and_doubles_none(
    nursery: "subprocess.Popen[str]", tmp_path: Path, stream: bool
) -> None:
    store = open_store(f"sqlite:///{tmp_path / 'leyden.db'}")
    started = start_attempt(store)
    counter = iter(range(10_000))
    received: list[bytes] = []
    with FakeEngine() as engine:
        engine.behaviour.reply = lambda body: Reply(text=f"answer {next(counter)}")
        process = Doomed(nursery, tmp_path, engine.url, 0, POINTS[0], 1)
        port = int(process.url.rpartition(":")[2])
        for number, point in enumerate(POINTS):
            body = {**BODY, "user": str(number), "stream": stream}
            sampled = len(engine.requests)
            first = ask(process.url, started, body, 0)
            assert process.wait() == -signal.SIGKILL, point
            # The next one answers the retry, then dies at the next point with the call after it. A replay does not
            # pass the phases from `choose` on.
            following = POINTS[number + 1] if number + 1 < len(POINTS) else ""
            passed = 0 if point in RECORDED and following.partition(":")[0] not in PHASES[:2] else 1
            process = Doomed(nursery, tmp_path, engine.url, port, following, passed + 1)
            again = ask(process.url, started, body, 1)
            assert again is not None, point
            if point in RECORDED:
                assert len(engine.requests) == sampled + 1, "what is durable is replayed, not sampled again"
            whole = first is not None and (b"[DONE]" in first if stream else True)
            if whole:
                assert point == "answer:after"
            received.append(again)
        assert process.end() == 0
    calls = Reader(store).trace(started.rollout.id).calls
    store.close()
    check(calls, received, [body_number(call) for call in calls])


def body_number(call: Call) -> int:
    return int(call.request["user"])


def said(raw: bytes) -> str:
    """The text of an answer, whole or streamed."""
    if raw.startswith(b"{"):
        return str(json.loads(raw)["choices"][0]["message"]["content"])
    events = [json.loads(line[6:]) for line in raw.splitlines() if line.startswith(b"data: {")]
    return "".join(c["delta"].get("content") or "" for event in events for c in event["choices"])


def check(calls: Any, received: list[bytes], numbers: list[int]) -> None:
    """One finished call for each answer, with its text; what was cut off is open and never trained."""
    finished = [call for call in calls if call.status == "ok"]
    assert sorted(body_number(call) for call in finished) == list(range(len(received)))
    for call in finished:
        assert said(received[body_number(call)]) == call.choices[0].text
        assert call.choices[0].logprobs.size and call.refusal is None
    assert {call.status for call in calls} <= {"ok", "open"}
    assert all(call.refusal == "open" and not call.choices for call in calls if call.status == "open")
    assert len({call.seq for call in calls}) == len(calls) == len(numbers)


def cut_after(room: Room, started: Started, num_events: int, user: str) -> bytes:
    """Send a streamed call by hand and hang up after so many events; what was seen."""
    host, port = room.url.removeprefix("http://").split(":")
    body = b'{"model": "main", "messages": [{"role": "user", "content": "hi"}], "stream": true, "user": "%b"}' % (
        user.encode()
    )
    with socket.create_connection((host, int(port)), 20) as connection:
        connection.sendall(
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer %b\r\n"
            b"content-length: %d\r\n\r\n%b" % (started.token.encode(), len(body), body)
        )
        seen = b""
        while seen.count(b"data: ") < num_events:
            part = connection.recv(4096)
            assert part, seen
            seen += part
    return seen


def test_a_client_that_hangs_up_at_any_event_leaves_a_record_that_says_so(room: Room) -> None:
    started = room.start()
    room.chat(started, {**BODY, "user": "warm"})
    room.engine.behaviour.reply = lambda body: Reply(text="abcdef")
    room.engine.behaviour.chunk_delay_s = 0.03
    num_whole = room.chat(started, {**BODY, "stream": True, "user": "whole"}).raw.count(b"data: ")
    for number in range(1, num_whole + 1):
        cut_after(room, started, number, str(number))
        until(
            lambda n=number: len(room.calls(started)) == n + 2 and room.calls(started)[-1].status != "open",  # type: ignore[misc]
            f"the record of the call that was cut after event {number}",
        )
        call = room.calls(started)[-1]
        if call.status == "ok":  # the engine was through before the cut was noticed
            assert call.num_sampled == 7
        else:
            assert call.status == "aborted" and not call.delivered and call.num_sampled <= 7
            assert call.choices[0].finish_reason == "abort"
        if number == num_whole:
            assert call.status == "ok" and call.delivered, "whoever saw the end can rely on the record"
        if number <= 3:
            assert call.status == "aborted"


def test_an_engine_that_dies_at_any_event_ends_the_stream_with_an_error_and_a_record(room: Room) -> None:
    started = room.start()
    whole = room.chat(started, {**BODY, "stream": True})
    assert b"[DONE]" in whole.raw
    with httpx.stream("POST", f"{room.engine.url}/v1/chat/completions", json={
        **room.engine.requests[-1], "stream": True,
    }) as direct:  # fmt: skip
        events = [event + b"\n\n" for event in direct.read().split(b"\n\n") if event]
    offset = 0
    for number, event in enumerate(events[:-1]):
        offset += len(event)
        room.engine.behaviour.faults = Faults(cut_after_bytes=offset)
        answer = room.chat(started, {**BODY, "stream": True, "user": str(number)})
        call = room.calls(started)[-1]
        assert b'"error"' in answer.raw and b"[DONE]" not in answer.raw, number
        assert call.status == "error" and call.error


def test_retries_that_race_with_the_first_answer_get_that_answer(room: Room) -> None:
    started = room.start()
    counter = iter(range(10_000))
    room.engine.behaviour.reply = lambda body: Reply(text=f"answer {next(counter)}")
    room.chat(started, {**BODY, "user": "warm"})
    room.engine.behaviour.delay_s = 0.1
    for number in range(8):
        body = {**BODY, "user": str(number)}
        before = len(room.engine.requests)
        first, firsts = in_thread(lambda body=body: room.chat(started, body))  # type: ignore[misc]
        until(lambda n=before: len(room.engine.requests) > n, "the engine to be asked")  # type: ignore[misc]
        time.sleep(0.02 * number)  # from well before the answer to after it; the claim holds for any pause
        retries = [
            in_thread(lambda body=body: room.chat(started, body, x_stainless_retry_count="1"))  # type: ignore[misc]
            for _ in range(3)
        ]
        for thread in (first, *(thread for thread, _ in retries)):
            thread.join(20)
        texts = {text_of(firsts[0]), *(text_of(answers[0]) for _, answers in retries)}
        assert len(texts) == 1 and len(room.engine.requests) == before + 1
    calls = room.calls(started)
    assert len(calls) == 9 and all(call.status == "ok" and call.delivered for call in calls)


def test_equal_calls_at_once_that_are_no_retries_are_samples_of_their_own(room: Room) -> None:
    started = room.start()
    counter = iter(range(10_000))
    room.engine.behaviour.reply = lambda body: Reply(text=f"answer {next(counter)}")
    room.engine.behaviour.delay_s = 0.05
    barrier = threading.Barrier(12)

    def call() -> str:
        barrier.wait(20)
        return text_of(room.chat(started, BODY, x_stainless_retry_count="0"))

    threads = [in_thread(call) for _ in range(12)]
    for thread, _ in threads:
        thread.join(30)
    texts = [texts[0] for _, texts in threads]
    calls = room.calls(started)
    assert len(set(texts)) == len(room.engine.requests) == len(calls) == 12
    assert sorted(call.choices[0].text for call in calls) == sorted(texts)
    assert len({call.sampling["seed"] for call in calls}) == 12


def test_a_stop_signal_lets_calls_end_and_loses_none(nursery: "subprocess.Popen[str]", tmp_path: Path) -> None:
    store = open_store(f"sqlite:///{tmp_path / 'leyden.db'}")
    started = start_attempt(store)
    with FakeEngine() as engine:
        process = Doomed(nursery, tmp_path, engine.url)
        assert ask(process.url, started, {**BODY, "user": "0"}, 0) is not None
        engine.behaviour.delay_s, engine.behaviour.chunk_delay_s = 0.4, 0.05
        bodies = [{**BODY, "user": "1"}, {**BODY, "user": "2", "stream": True}]
        threads = [in_thread(lambda b=body: ask(process.url, started, b, 0)) for body in bodies]  # type: ignore[misc]
        until(lambda: len(engine.requests) == 3, "both calls to be in flight")
        os.kill(process.pid, signal.SIGTERM)
        for thread, _ in threads:
            thread.join(20)
        assert all(answers[0] is not None for _, answers in threads)
        assert b"[DONE]" in threads[1][1][0]
        assert process.wait() == 0
    calls = Reader(store).trace(started.rollout.id).calls
    assert [call.status for call in calls] == ["ok", "ok", "ok"] and all(call.delivered for call in calls)
    store.close()


def test_calls_that_outlast_the_patience_of_a_stop_are_recorded_with_what_came(
    nursery: "subprocess.Popen[str]", tmp_path: Path
) -> None:
    store = open_store(f"sqlite:///{tmp_path / 'leyden.db'}")
    started = start_attempt(store)
    with FakeEngine() as engine:
        process = Doomed(nursery, tmp_path, engine.url)
        assert ask(process.url, started, {**BODY, "user": "0"}, 0) is not None
        engine.behaviour.chunk_delay_s = 0.2
        engine.behaviour.reply = lambda body: Reply(text="x" * 200)
        thread, answers = in_thread(lambda: ask(process.url, started, {**BODY, "user": "1", "stream": True}, 0))
        until(lambda: len(engine.requests) == 2, "the stream to begin")
        assert process.end() == 0
        thread.join(20)
        assert answers[0] is not None and b'"type":"aborted"' in answers[0] and b"[DONE]" not in answers[0]
    call = Reader(store).trace(started.rollout.id).calls[-1]
    assert call.status == "aborted" and 0 < call.num_sampled < 200
    assert call.error is not None and "shut down" in call.error
    store.close()

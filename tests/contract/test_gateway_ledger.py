"""Exactly once: retries join or replay, equal requests are new samples, a killed gateway loses and doubles
nothing."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from tests.contract.gateway_room import HELLO, Answer, Room, gateway_room

from leyden.store import open_store, queue
from leyden.testing.fake_engine import FakeEngine
from leyden.testing.running import start_attempt
from leyden.testing.scripted import Faults, Reply
from leyden.traces.reader import Reader

BODY = {"model": "main", "messages": HELLO}


@pytest.fixture
def room(tmp_path: Path) -> Iterator[Room]:
    with gateway_room(tmp_path) as room:
        counter = iter(range(10_000))
        room.engine.behaviour.reply = lambda body: Reply(text=f"answer {next(counter)}")
        yield room


def until(condition: Callable[[], bool], what: str) -> None:
    """Wait for `condition`, at most 20 s."""
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, f"waited 20 s for {what}"
        time.sleep(0.005)


def in_thread(function: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(function()))
    thread.start()
    return thread, results


def text_of(answer: Answer) -> str:
    text: str = answer.json["choices"][0]["message"]["content"]
    return text


def test_equal_unmarked_requests_are_new_samples(room: Room) -> None:
    started = room.start()
    answers = {text_of(room.chat(started, BODY, x_stainless_retry_count="0")) for _ in range(3)}
    assert len(answers) == 3
    assert len(room.calls(started)) == 3


def test_a_retry_of_a_finished_call_replays_the_stored_answer(room: Room) -> None:
    started = room.start()
    first = room.chat(started, BODY)
    again = room.chat(started, BODY, x_stainless_retry_count="1")
    assert again.json == first.json
    assert again.headers["x-leyden-call"] == first.headers["x-leyden-call"]
    assert len(room.engine.requests) == 1 and len(room.calls(started)) == 1


def test_a_retry_with_keys_in_another_order_is_the_same_request(room: Room) -> None:
    started = room.start()
    first = room.chat(started, BODY)
    again = room.chat(started, dict(reversed(list(BODY.items()))), x_stainless_retry_count="1")
    assert text_of(again) == text_of(first)


def test_a_retry_of_another_attempt_is_a_new_sample(room: Room) -> None:
    first, second = room.start(), room.start()
    assert text_of(room.chat(first, BODY)) != text_of(room.chat(second, BODY, x_stainless_retry_count="1"))


def test_a_retry_joins_the_call_in_flight(room: Room) -> None:
    started = room.start()
    room.chat(started, {**BODY, "user": "warm"})
    room.engine.behaviour.delay_s = 0.5
    thread, first = in_thread(lambda: room.chat(started, BODY))
    until(lambda: len(room.engine.requests) == 2, "the engine to be asked")
    again = room.chat(started, BODY, x_stainless_retry_count="2")
    thread.join(20)
    assert text_of(again) == text_of(first[0])
    assert len(room.engine.requests) == 2
    assert room.calls(started)[-1].retry_count == 2


def test_a_retry_of_a_stream_in_flight_gets_every_byte(room: Room) -> None:
    started = room.start()
    room.chat(started, {**BODY, "user": "warm"})
    room.engine.behaviour.chunk_delay_s = 0.05
    body = {**BODY, "stream": True}
    thread, first = in_thread(lambda: room.chat(started, body))
    until(lambda: len(room.engine.requests) == 2, "the engine to be asked")
    again = room.chat(started, body, x_stainless_retry_count="1")
    thread.join(20)
    assert again.raw == first[0].raw and again.raw.endswith(b"data: [DONE]\n\n")
    assert len(room.engine.requests) == 2


def test_a_retry_of_a_finished_stream_is_replayed_as_a_stream(room: Room) -> None:
    started = room.start()
    sdk = room.sdk(started)

    def ask(**extra: Any) -> tuple[str, str | None]:
        stream = sdk.chat.completions.create(
            model="main", messages=HELLO, stream=True, stream_options={"include_usage": True}, **extra
        )
        chunks = list(stream)
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        reasons = [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices]
        assert chunks[-1].usage is not None
        return text, reasons[-1]

    first = ask()
    assert ask(extra_headers={"x-stainless-retry-count": "1"}) == first
    assert first[1] == "stop" and len(room.engine.requests) == 1


def test_a_retry_of_a_failed_call_is_a_new_sample(room: Room) -> None:
    started = room.start()
    room.chat(started, {**BODY, "user": "warm"})
    room.engine.behaviour.faults = Faults(status=500)
    assert room.chat(started, BODY).status == 502
    room.engine.behaviour.faults = Faults()
    assert room.chat(started, BODY, x_stainless_retry_count="1").status == 200
    assert [call.status for call in room.calls(started)] == ["ok", "error", "ok"]


def test_an_sdk_that_times_out_gets_the_answer_of_its_first_try(room: Room) -> None:
    started = room.start()
    room.chat(started, {**BODY, "user": "warm"})
    room.engine.behaviour.delay_s = 0.9
    sdk = room.sdk(started, max_retries=4, timeout=0.5)
    answer = sdk.chat.completions.create(model="main", messages=HELLO)
    assert answer.choices[0].message.content is not None
    assert len(room.engine.requests) == 2, "the engine sampled once"
    calls = room.calls(started)
    assert len(calls) == 2 and calls[-1].delivered and calls[-1].retry_count >= 1


def leave_early(room: Room, token: str, body: bytes, *, wait_for: bytes = b"") -> None:
    """Send a request by hand and close the connection, after `wait_for` was seen in the answer."""
    host, port = room.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        connection.settimeout(20)
        connection.sendall(
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer %b\r\n"
            b"content-length: %d\r\n\r\n%b" % (token.encode(), len(body), body)
        )
        if not wait_for:
            until(lambda: len(room.engine.requests) == 2, "the engine to be asked")
        seen = b""
        while wait_for and wait_for not in seen:
            seen += connection.recv(4096)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_stops_the_generation_and_the_call_is_undelivered(room: Room, stream: bool) -> None:
    started = room.start()
    room.chat(started, {**BODY, "user": "warm"})
    room.engine.behaviour.delay_s = 0.0 if stream else 30.0
    room.engine.behaviour.chunk_delay_s = 0.1
    room.engine.behaviour.reply = lambda body: Reply(text="x" * 200)
    body = b'{"model": "main", "messages": [{"role": "user", "content": "hi"}], "stream": %b}'
    leave_early(room, started.token, body % (b"true" if stream else b"false"), wait_for=b'"x"' if stream else b"")
    until(lambda: room.engine.num_aborted == 1, "the engine to be left")
    until(lambda: room.calls(started)[-1].status == "aborted", "the record")
    call = room.calls(started)[-1]
    assert not call.delivered and call.error is not None and "left" in call.error
    if stream:
        assert 0 < call.num_sampled < 200
        assert call.choices[0].finish_reason == "abort"
    else:
        assert call.num_sampled == 0


def test_an_ended_attempt_is_refused_at_once(room: Room) -> None:
    started = room.start()
    assert room.chat(started, BODY).status == 200
    end(room, started)
    answer = room.chat(started, BODY)
    assert answer.status == 409 and answer.error["type"] == "attempt_ended"
    assert len(room.calls(started)) == 1


def end(room: Room, started: Any) -> None:
    from dataclasses import replace

    from leyden.base.records import Outcome

    ended = replace(started.attempt, ended_at=time.time(), outcome=Outcome.COMPLETED)
    room.store.write(lambda connection: queue.end_attempt(connection, room.store, ended)).result(10)


SERVE = """
import sys
from pathlib import Path
from leyden.base.config import from_tree
from leyden.gateway import serve
from leyden.store import open_store
folder, engine = Path(sys.argv[1]), sys.argv[2]
config = from_tree({"policies": {"main": {"engine": engine}}}, base_dir=folder)
store = open_store(f"sqlite:///{folder / 'leyden.db'}")
serve(config, store, on_ready=lambda where: print(where.url, flush=True))
"""


class Process:
    """A gateway in a process of its own, which can be killed."""

    def __init__(self, folder: Path, engine_url: str) -> None:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        self.process = subprocess.Popen(
            [sys.executable, "-c", SERVE, str(folder), engine_url], stdout=subprocess.PIPE, env=environment
        )
        assert self.process.stdout is not None
        self.url = self.process.stdout.readline().decode().strip()
        assert self.url.startswith("http://")

    def end(self, number: int = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        assert self.process.stdout is not None
        code = self.process.wait(20)
        self.process.stdout.close()
        return code


def test_after_a_kill_each_delivered_call_is_there_once_and_the_one_in_flight_reads_as_open(
    tmp_path: Path,
) -> None:
    store = open_store(f"sqlite:///{tmp_path / 'leyden.db'}")
    started = start_attempt(store)
    counter = iter(range(10_000))
    with FakeEngine() as engine:
        engine.behaviour.reply = lambda body: Reply(text=f"answer {next(counter)}")

        def ask(url: str, text: str, retry: int = 0) -> str | None:
            with openai.OpenAI(base_url=started.base_url(url), api_key=started.token, max_retries=0) as sdk:
                answer = sdk.chat.completions.create(
                    model="main", messages=[{"role": "user", "content": text}],
                    extra_headers={"x-stainless-retry-count": str(retry)},
                )  # fmt: skip
                return answer.choices[0].message.content

        first = Process(tmp_path, engine.url)
        delivered = [ask(first.url, "same"), ask(first.url, "same"), ask(first.url, "other")]
        engine.behaviour.delay_s = 30.0

        def expect_failure() -> None:
            with pytest.raises(openai.APIConnectionError):
                ask(first.url, "in flight")

        thread, _ = in_thread(expect_failure)
        until(lambda: len(engine.requests) == 4, "the engine to be asked")
        first.end(signal.SIGKILL)
        thread.join(20)
        engine.behaviour.delay_s = 0.0

        second = Process(tmp_path, engine.url)
        assert ask(second.url, "same", retry=1) == delivered[1], "the newest of the two is replayed"
        assert ask(second.url, "other", retry=1) == delivered[2]
        fresh = ask(second.url, "in flight", retry=1)
        assert fresh not in delivered
        assert ask(second.url, "same") not in delivered, "an unmarked request is a new sample"
        assert second.end() in (0, -signal.SIGTERM)
    calls = Reader(store).trace(started.rollout.id).calls
    assert [call.status for call in calls] == ["ok", "ok", "ok", "open", "ok", "ok"]
    assert [call.seq for call in calls] == list(range(6))
    assert [call.choices[0].text for call in calls[:3]] == delivered
    store.close()

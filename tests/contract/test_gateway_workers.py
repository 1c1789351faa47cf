"""`leyden serve --workers 2`: what one process is told all do, and a call belongs to one of them only."""

import json
import os
import signal
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
from tests.contract.gateway_room import HELLO
from tests.contract.test_gateway_ledger import in_thread, until

from leyden.base.records import Call
from leyden.gateway.sampling import seed_of
from leyden.store import ledger, open_store
from leyden.store.base import Store
from leyden.testing.fake_engine import FakeEngine
from leyden.testing.running import Started, start_attempt
from leyden.testing.scripted import Reply
from leyden.traces.reader import Reader

ADMIN = "admin-key-of-the-test"
BODY: dict[str, Any] = {"model": "main", "messages": HELLO}


class Crew:
    """A gateway of two workers, as a user starts it."""

    def __init__(self, folder: Path, engine: FakeEngine) -> None:
        self.engine = engine
        config = folder / "leyden.toml"
        config.write_text(f'[policies.main]\nengine = "{engine.url}"\n', encoding="utf-8")
        env = {
            **os.environ, "LEYDEN_ADMIN_KEY": ADMIN,
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        }  # fmt: skip
        options = ["--config", str(config), "--workers", "2", "--json"]
        command = [sys.executable, "-m", "leyden.cli.main", "serve", *options]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, env=env, text=True)
        assert self.process.stdout is not None
        self.url = json.loads(self.process.stdout.readline())["url"]
        self.store: Store = open_store(f"sqlite:///{folder / 'leyden.db'}")

    def workers(self) -> list[psutil.Process]:
        return [child for child in psutil.Process(self.process.pid).children() if child.is_running()]

    def admin(self, method: str, path: str, body: Any = None) -> Any:
        headers = {"authorization": f"Bearer {ADMIN}"}
        answer = httpx.request(method, self.url + path, json=body, headers=headers, timeout=60)
        assert answer.status_code == 200, answer.text
        return answer.json() if "json" in answer.headers["content-type"] else answer.text

    def call(self, started: Started, body: dict[str, Any], retry: int = 0) -> httpx.Response:
        """On a connection of its own, so that the kernel chooses a worker."""
        headers = {"authorization": f"Bearer {started.token}", "x-stainless-retry-count": str(retry)}
        url = f"{started.base_url(self.url)}/chat/completions"
        return httpx.post(url, json=body, headers=headers, timeout=60)

    def many(self, started: Started, bodies: list[dict[str, Any]], retry: int = 0) -> list[httpx.Response]:
        threads = [in_thread(lambda body=body: self.call(started, body, retry)) for body in bodies]  # type: ignore[misc]
        for thread, _ in threads:
            thread.join(60)
        return [answers[0] for _, answers in threads]

    def calls(self, started: Started) -> list[Call]:
        return list(Reader(self.store).trace(started.rollout.id).calls)


@pytest.fixture(scope="module")
def crew(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Crew]:
    with FakeEngine() as engine:
        counter = iter(range(100_000))
        engine.behaviour.reply = lambda body: Reply(text=f"answer {next(counter)}")
        crew = Crew(tmp_path_factory.mktemp("crew"), engine)
        try:
            yield crew
        finally:
            family = psutil.Process(crew.process.pid).children(recursive=True) if crew.process.poll() is None else []
            crew.process.kill()
            crew.process.wait(20)
            for child in family:
                child.kill()
            assert crew.process.stdout is not None
            crew.process.stdout.close()
            crew.store.close()


def maker(answer: httpx.Response) -> str:
    """What the ids of one worker's calls begin with."""
    return answer.headers["x-leyden-call"].rpartition("_")[0]


def test_both_workers_answer_and_no_two_calls_get_one_number_or_seed(crew: Crew) -> None:
    started = start_attempt(crew.store)
    crew.engine.behaviour.delay_s = 0.02
    answers = crew.many(started, [BODY] * 12 + [{**BODY, "user": str(n)} for n in range(12)])
    assert all(answer.status_code == 200 for answer in answers)
    assert len({maker(answer) for answer in answers}) == 2
    calls = crew.calls(started)
    assert [call.seq for call in calls] == list(range(24)), "no gaps, whichever worker answered"
    rollout, attempt = started.rollout, started.attempt
    assert [call.sampling["seed"] for call in calls] == [
        seed_of(rollout.seed, attempt.number, seq) for seq in range(24)
    ]
    seeds = {body["seed"] for body in list(crew.engine.requests)[-24:]}
    assert seeds == {call.sampling["seed"] for call in calls}, "the engine got the seed that is recorded"
    later = crew.call(started, BODY)
    assert later.status_code == 200
    assert crew.calls(started)[-1].id == later.headers["x-leyden-call"], "a later call has a higher number"


def test_a_pause_holds_calls_of_every_worker_until_the_resume(crew: Crew) -> None:
    started = start_attempt(crew.store)
    crew.engine.behaviour.delay_s = 0.0
    assert crew.admin("POST", "/proxy/pause", {"reason": "weights"})["workers"] == 2
    answers: list[httpx.Response] = []
    thread = threading.Thread(
        target=lambda: answers.extend(crew.many(started, [{**BODY, "user": str(n)} for n in range(12)]))
    )
    thread.start()
    until(lambda: crew.admin("GET", "/proxy/state")["waiting"] == 12, "every call to wait")
    drained = crew.admin("POST", "/proxy/drain", {"timeout_s": 5})
    assert drained["drained"] and drained["aborted"] == 0 and drained["paused"]
    assert not answers
    assert not crew.admin("POST", "/proxy/resume")["paused"]
    thread.join(60)
    assert [answer.status_code for answer in answers] == [200] * 12
    assert len({maker(answer) for answer in answers}) == 2


def test_retries_that_reach_the_other_worker_get_the_answer_of_the_first_try(crew: Crew) -> None:
    started = start_attempt(crew.store)
    crew.engine.behaviour.delay_s = 0.0
    crew.many(started, [{**BODY, "user": f"warm {n}"} for n in range(12)])
    crew.engine.behaviour.delay_s = 3.0
    before = len(crew.engine.requests)
    body = {**BODY, "user": "slow"}
    thread, firsts = in_thread(lambda: crew.call(started, body))
    until(lambda: len(crew.engine.requests) > before, "the engine to be asked")
    answers = crew.many(started, [body] * 12, retry=1)
    thread.join(60)
    answers.append(firsts[0])
    assert {answer.status_code for answer in answers} == {200}
    assert len({answer.headers["x-leyden-call"] for answer in answers}) == 1
    assert len({answer.json()["choices"][0]["message"]["content"] for answer in answers}) == 1
    replayed = [answer for answer in answers if "x-leyden-replayed" in answer.headers]
    assert replayed, "some came to the other worker than the one that had the call"
    assert len(crew.engine.requests) == before + 1
    call = crew.calls(started)[-1]
    assert call.status == "ok" and call.delivered
    crew.engine.behaviour.delay_s = 0.0


def test_metrics_of_all_workers_are_on_one_page(crew: Crew) -> None:
    started = start_attempt(crew.store)
    crew.many(started, [{**BODY, "user": str(n)} for n in range(12)])
    page = crew.admin("GET", "/metrics")
    lines = [line for line in page.splitlines() if line.startswith("leyden_calls_total{")]
    assert {worker for worker in ("0", "1") if any(f'worker="{worker}"' in line for line in lines)} == {"0", "1"}
    assert page.count("# TYPE leyden_calls_total") == 1
    total = sum(float(line.rpartition(" ")[2]) for line in lines)
    assert total == crew.store.read(lambda c: c.exec_driver_sql("select count(*) from completions").scalar_one())


def test_a_worker_that_dies_is_replaced_and_begins_as_the_others_are(crew: Crew) -> None:
    started = start_attempt(crew.store)
    crew.admin("POST", "/proxy/pause", {"reason": "weights"})
    before = set(makers(crew))
    victim = crew.workers()[0]
    victim.kill()
    deadline = time.monotonic() + 80  # a fresh process imports everything first
    while len(set(makers(crew)) - before) != 1:
        assert time.monotonic() < deadline, "no new worker took part"
        time.sleep(0.1)
    assert crew.admin("GET", "/proxy/state")["paused"], "the fresh worker is paused as well"
    crew.admin("POST", "/proxy/resume")
    answers = crew.many(started, [{**BODY, "user": str(n)} for n in range(12)])
    assert [answer.status_code for answer in answers] == [200] * 12
    assert len({maker(answer) for answer in answers}) == 2


def makers(crew: Crew) -> list[str]:
    found = crew.store.read(lambda c: ledger.control_below(c, "gateway."))
    return [str(value) for name, value in found.items() if ".worker." in name]


def test_the_end_of_the_parent_is_the_end_of_all_and_leaves_nothing(crew: Crew) -> None:
    workers = crew.workers()
    began = time.monotonic()
    crew.process.send_signal(signal.SIGTERM)
    assert crew.process.wait(40) == 0
    assert time.monotonic() - began < 40 and not any(worker.is_running() for worker in workers)
    left = crew.store.read(lambda c: ledger.control_below(c, "gateway."))
    assert set(left) <= {"gateway.ready"}

"""The local controller of agentlightning 1.0.2, unchanged, against our gateway (`scripts/test_agentlightning.sh`)."""

import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.contract.gateway_room import Room, gateway_room

from leyden.base.records import Provenance, Trace
from leyden.testing.scripted import Reply
from leyden.traces.reader import Reader

ROOT = Path(__file__).parents[2]
AGENT = ROOT / "tests" / "integrations" / "agentlightning"
VENV = Path(os.environ.get("LEYDEN_AGENTLIGHTNING_VENV", ROOT / ".benchmark-venv" / "agentlightning"))
pytestmark = pytest.mark.skipif(
    not (VENV / "ready").exists(),
    reason=f"no environment with agentlightning in {VENV}; scripts/test_agentlightning.sh makes it (needs Python 3.12)",
)
BOUND_S = 90.0
"""Longest wait for rollouts; a controller starts in two seconds on a machine that has time."""


def reply(body: Mapping[str, Any]) -> Reply:
    messages = body["messages"]
    if messages[-1]["role"] == "tool":
        return Reply(text=f"it is {messages[-1]['content']}")
    return Reply(text="", tool_calls=(("add", '{"a": 2, "b": 3}'),))


@contextmanager
def controller(room: Room, folder: Path, **options: Any) -> Iterator[Path]:
    """Their controller in local mode; the path of its log."""
    settings = {
        "runner_type": "local", "agl_server.url": room.url, "agl_server.key": room.gateway.admin_key,
        "local_runner.poll_interval": 0.2, "hydra.run.dir": ".", "hydra.output_subdir": "null", **options,
    }  # fmt: skip
    log = folder / "controller.log"
    with log.open("wb") as file:
        words = [f"{name}={value}" for name, value in settings.items()]
        process = subprocess.Popen(
            [str(VENV / "bin" / "python"), "-m", "agentlightning.controller", *words],
            cwd=folder, stdout=file, stderr=subprocess.STDOUT, start_new_session=True,
            env={**os.environ, "PYTHONPATH": str(AGENT), "NO_PROXY": "127.0.0.1"},
        )  # fmt: skip
        try:
            yield log
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait(10)


def enqueue(room: Room, questions: list[str], **config: Any) -> list[str]:
    local = {"agent_class": "calculator.Calculator", "env_map": {"QUESTION": "input.question", "EXPECTED": "5"}}
    body = [
        {
            "input": {"data_id": f"d{n}", "question": question},
            "is_train": n % 2 == 0,
            "config": {"local": local, **config},
        }
        for n, question in enumerate(questions)
    ]
    answer = room.admin("POST", "/api/rollouts", body)
    assert answer.status == 201, answer
    return [rollout["rollout_id"] for rollout in answer.json]


def wait_for(room: Room, number: int, log: Path) -> dict[str, str]:
    """State by rollout once `number` of them are over."""
    deadline = time.monotonic() + BOUND_S
    while True:
        page = room.admin("GET", "/api/rollouts/terminal").json
        if page["total_terminal"] >= number:
            return {item["rollout_id"]: item["state"] for item in page["items"]}
        assert time.monotonic() < deadline, log.read_text(errors="replace")[-3000:]
        time.sleep(0.1)


def test_rollouts_of_their_controller_succeed_and_the_trace_is_complete(tmp_path: Path) -> None:
    with gateway_room(tmp_path) as room:
        room.engine.behaviour.reply = reply
        ids = enqueue(room, [f"2 + 3? ({n})" for n in range(4)])
        with controller(room, tmp_path) as log:
            states = wait_for(room, len(ids), log)
        assert states == dict.fromkeys(ids, "succeeded"), log.read_text(errors="replace")[-3000:]
        traces = Reader(room.store).traces(ids)
        events = [room.admin("GET", f"/api/rollouts/{rollout_id}/events").json for rollout_id in ids]
        triplets = [room.admin("GET", f"/api/rollouts/{rollout_id}/events?format=triplet").json for rollout_id in ids]
    for trace in traces:
        check(trace)
    for told, short in zip(events, triplets, strict=True):
        assert [event["event_type"] for event in told] == ["model_request", "model_request", "note", "reward"]
        assert {event["attempt_id"] for event in told} == {"0"}
        for event in short[:2]:
            data = event["data"]
            assert len(data["response_token_ids"]) == len(data["response_log_probs"]) > 0 and data["prompt_token_ids"]


def check(trace: Trace) -> None:
    first, second = trace.calls
    assert {call.provenance for call in trace.calls} == {Provenance.SERVED} and first.refusal is second.refusal is None
    assert [message["role"] for message in second.request["messages"]] == ["user", "assistant", "tool"]
    assert second.choices[0].text == "it is 5"
    assert [(reward.name, reward.value) for reward in trace.rewards] == [("reward", 1.0)]
    assert [span.name for span in trace.spans if span.kind == "event"] == ["note", "reward"]
    assert trace.attempt.id == f"{trace.rollout.id}.0"


def test_a_crash_and_a_timeout_of_their_agent_end_as_failed(tmp_path: Path) -> None:
    with gateway_room(tmp_path) as room:
        room.engine.behaviour.reply = reply
        room.engine.behaviour.delay_s = 60.0
        [crashed] = enqueue(room, ["crash"])
        [late] = enqueue(room, ["too slow"], timeout_seconds=3)
        with controller(room, tmp_path) as log:
            states = wait_for(room, 2, log)
        assert states == {crashed: "failed", late: "failed"}
        messages = {
            rollout_id: room.admin("GET", f"/api/rollouts/{rollout_id}").json["rollout"]["status"]["error_message"]
            for rollout_id in (crashed, late)
        }
        trace = Reader(room.store).trace(late)
    assert messages == {crashed: "subprocess exited with code 1", late: "local subprocess timed out"}
    assert [call.delivered for call in trace.calls] in ([], [False])

"""OTLP of live traffic: a service reports calls that did not pass the gateway, and live calls are exported and come
back as they were."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from tests.contract.gateway_room import HELLO, Answer, Room, gateway_room
from tests.contract.test_gateway_otlp import CHAT, PROTOBUF, post, request_with, told
from tests.contract.test_otlp_round_trip import call_text
from typer.testing import CliRunner

from leyden.base.records import Call, Provenance
from leyden.cli.main import app
from leyden.testing.scripted import Reply
from leyden.traces.reader import Reader
from leyden.traces.telemetry.live import live_request_of
from leyden.traces.telemetry.wire import to_json


@pytest.fixture
def room(tmp_path: Path) -> Iterator[Room]:
    with gateway_room(tmp_path) as room:
        yield room


def service(room: Room, name: str = "web") -> str:
    key: str = room.admin("POST", "/api/keys", {"name": name}).json["key"]
    return key


def ask(room: Room, key: str, **headers: str) -> Answer:
    answer = room.request("POST", "/v1/chat/completions", {"model": "main", "messages": HELLO}, key=key, **headers)
    assert answer.status == 200, answer.raw
    return answer


def live(room: Room) -> list[Call]:
    return Reader(room.store).live_calls()


def test_a_service_reports_calls_and_they_are_its_live_traffic(room: Room) -> None:
    key = service(room)
    who = {"session.id": "s-1", "user.id": "u-7", "leyden.purpose": "support"}
    request = request_with({**CHAT, **who}, CHAT)
    for _ in range(2):
        assert told(post(room, request, key=key)).partial_success.rejected_spans == 0
    first, second = live(room)
    assert first.live is not None and second.live is not None, "an exporter that sends again makes no more calls"
    assert (first.live.service, first.live.session, first.live.subject) == ("web", "s-1", "u-7")
    assert first.live.purpose == "support" and second.live.session is None
    assert (first.dialect, first.provenance, first.attempt_id) == ("otlp", Provenance.RETOKENIZED, None)
    assert first.request["messages"] and first.choices[0].text


def test_what_is_no_call_is_refused_by_name_and_rewards_are_not_taken(room: Room) -> None:
    request = request_with({"x": 1}, {**CHAT, "leyden.reward.correct": 1.0}, {**CHAT, "session.id": "x" * 129})
    answer = told(post(room, request, key=service(room))).partial_success
    assert answer.rejected_spans == 2
    for said in ("model calls only", "without its rewards (correct)", "attribute session.id has 129 bytes"):
        assert said in answer.error_message
    assert len(live(room)) == 1


def test_a_call_that_the_gateway_relayed_is_not_made_a_second_time(room: Room) -> None:
    room.engine.behaviour.reply = lambda body: Reply(text="hello")
    key, other = service(room), service(room, "mobile")
    answer = ask(room, key)
    [call] = live(room)

    def report(key: str, **more: Any) -> None:
        said = json.dumps([{"role": "assistant", "parts": [{"type": "text", "content": "hello"}]}])
        attributes = {**CHAT, "gen_ai.request.model": "main", "gen_ai.output.messages": said, **more}
        attributes.pop("gen_ai.usage.output_tokens")
        request = request_with(attributes)
        span = request.resource_spans[0].scope_spans[0].spans[0]
        span.start_time_unix_nano = span.end_time_unix_nano = int(call.started_at * 1e9)
        assert told(post(room, request, key=key)).partial_success.rejected_spans == 0

    report(key, **{"leyden.call": call.id})
    report(key, **{"gen_ai.response.id": answer.json["id"]})
    assert len(live(room)) == 1
    report(other, **{"leyden.call": call.id})
    assert [one.live.service for one in live(room) if one.live] == ["web", "mobile"], "nobody claims another's call"


def test_a_service_key_tells_nothing_of_an_attempt(room: Room) -> None:
    started, key = room.start(), service(room)
    path = f"/proxy/rollout/{started.rollout.id}/attempt/{started.attempt.id}/v1/traces"
    named = {"leyden.rollout": started.rollout.id, "leyden.attempt": started.attempt.id, "leyden.reward.correct": 1.0}
    assert post(room, request_with({"x": 1}), key=key, path=path).status == 403
    assert told(post(room, request_with(named), key=key)).partial_success.rejected_spans == 1
    trace = room.trace(started)
    assert not (trace.spans or trace.rewards or trace.calls)


@pytest.mark.parametrize("media", [PROTOBUF, "application/json"])
def test_live_calls_are_the_same_in_another_store_and_when_they_are_sent_twice(tmp_path: Path, media: str) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "there").mkdir()
    with gateway_room(tmp_path / "here") as here, gateway_room(tmp_path / "there") as there:
        key = service(here)
        ask(here, key, x_leyden_session="a", x_leyden_subject="u", x_leyden_purpose="p")
        ask(here, key, x_leyden_session="a")
        ask(here, key)
        ask(here, here.gateway.admin_key)
        before = live(here)
        request = live_request_of(before)
        traces = [span.trace_id for span in request.resource_spans[0].scope_spans[0].spans]
        assert len(traces) == 4 and len(set(traces)) == 3 and traces[0] == traces[1], "a session is one trace"
        raw = request.SerializeToString() if media == PROTOBUF else to_json(request)
        for _ in range(2):
            answer = post(there, raw, key=there.gateway.admin_key, media=media)
            assert answer.raw in (b"", b"{}"), answer
        after = live(there)
        mine = service(there, "other")
        assert told(post(there, request, key=mine)).partial_success.rejected_spans == 0
        copies = [call for call in live(there) if call.live and call.live.service == "other"]
    assert [call_text(call) for call in after] == [call_text(call) for call in before]
    assert [call.live for call in after] == [call.live for call in before]
    assert {call.provenance for call in after} == {Provenance.RETOKENIZED}
    assert len(copies) == 4 and not {call.id for call in copies} & {call.id for call in before}


def test_the_verb_writes_live_calls_and_says_where_they_do_not_belong(tmp_path: Path) -> None:
    with gateway_room(tmp_path) as room:
        key = service(room)
        for session in ("a", "a", "b"):
            ask(room, key, x_leyden_session=session)
        ask(room, key)
        before = live(room)
    config = tmp_path / "leyden.toml"
    config.write_text("", encoding="utf-8")
    out = tmp_path / "live.jsonl"
    common = ["export", str(out), "--config", str(config)]
    done = CliRunner().invoke(app, [*common, "--format", "otlp", "--live", "--json"])
    assert done.exit_code == 0, done.output
    assert json.loads(done.output) == {"file": str(out), "calls": 4, "sessions": 2}
    [line] = out.read_text(encoding="utf-8").splitlines()
    spans = json.loads(line)["resourceSpans"][0]["scopeSpans"][0]["spans"]
    named = [{one["key"]: one["value"] for one in span["attributes"]}["leyden.call"]["stringValue"] for span in spans]
    assert named == [call.id for call in before]
    framed = tmp_path / "live.pb"
    done = CliRunner().invoke(app, ["export", str(framed), "--config", str(config), "--format", "otlp", "--live"])
    assert done.exit_code == 0 and "4 live calls of 2 sessions" in done.output
    raw = framed.read_bytes()
    request = ExportTraceServiceRequest.FromString(raw[4 : 4 + int.from_bytes(raw[:4], "big")])
    assert len(request.resource_spans[0].scope_spans[0].spans) == 4
    for wrong in (["--live"], ["--live", "--format", "otlp", "--run", "r"]):
        refused = CliRunner().invoke(app, [*common, *wrong])
        assert refused.exit_code != 0


def test_pages_of_live_calls_miss_none_and_repeat_none(room: Room) -> None:
    key = service(room)
    for _ in range(5):
        ask(room, key)
    found: list[str] = []
    after: tuple[float, str] | None = None
    while page := Reader(room.store).live_calls(after=after, limit=2):
        found += [call.id for call in page]
        after = (page[-1].started_at, page[-1].id)
    assert found == [call.id for call in live(room)] and len(set(found)) == 5

"""Traces as a file of OTLP, as collectors write and read it.

`.jsonl` has one request in OTLP's JSON per line; `.pb` has requests in protobuf, each after its length in four bytes,
big end first. One request holds one attempt, or up to 512 live calls, so a reader needs memory for those, and a line
can be posted to `/v1/traces` as it is.
"""

import json
from pathlib import Path
from typing import BinaryIO

import typer
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from leyden.base.config import Config
from leyden.base.errors import ConfigError
from leyden.cli import wiring
from leyden.store import queue
from leyden.traces.reader import Reader
from leyden.traces.telemetry.live import live_request_of
from leyden.traces.telemetry.wire import to_json
from leyden.traces.telemetry.writing import request_of

TRACES_AT_ONCE = 64
"""Rollouts that are read together: a handful of queries for all of them, and memory stays flat."""
CALLS_AT_ONCE = 512
"""Live calls in one request: a few MB with long conversations."""


def write(settings: Config, out: Path, run_id: str | None, *, json_output: bool) -> None:
    """Write the rollouts of finished groups, of training and of evaluation. Raises ConfigError, StoreError."""
    _check(out)
    store = wiring.store_of(settings, create=False)
    counted = {"rollouts": 0, "spans": 0}
    try:
        groups = store.read(lambda connection: queue.finished_groups(connection, run_id=run_id))
        ids = [rollout_id for group in groups for rollout_id in group]
        reader = Reader(store)
        with out.open("wb") as file:
            for start in range(0, len(ids), TRACES_AT_ONCE):
                for trace in reader.traces(ids[start : start + TRACES_AT_ONCE]):
                    request = request_of([trace])
                    if not request.resource_spans:
                        continue
                    counted["rollouts"] += 1
                    counted["spans"] += len(request.resource_spans[0].scope_spans[0].spans)
                    _add(file, out, request)
    finally:
        store.close()
    if json_output:
        typer.echo(json.dumps({"file": str(out), **counted}))
    else:
        typer.echo(f"Wrote {counted['spans']} spans of {counted['rollouts']} rollouts to {out}, as OTLP")


def write_live(settings: Config, out: Path, *, json_output: bool) -> None:
    """Write every call of live traffic, a bounded number of them in one request. Raises ConfigError, StoreError."""
    _check(out)
    store = wiring.store_of(settings, create=False)
    counted = {"calls": 0, "sessions": 0}
    sessions: set[tuple[str, str]] = set()
    after: tuple[float, str] | None = None
    try:
        reader = Reader(store)
        with out.open("wb") as file:
            while found := reader.live_calls(after=after, limit=CALLS_AT_ONCE):
                after = (found[-1].started_at, found[-1].id)
                _add(file, out, live_request_of(found))
                counted["calls"] += len(found)
                sessions |= {(c.live.service, c.live.session) for c in found if c.live and c.live.session is not None}
    finally:
        store.close()
    counted["sessions"] = len(sessions)
    if json_output:
        typer.echo(json.dumps({"file": str(out), **counted}))
    else:
        typer.echo(f"Wrote {counted['calls']} live calls of {counted['sessions']} sessions to {out}, as OTLP")


def _check(out: Path) -> None:
    if out.suffix not in (".jsonl", ".pb"):
        raise ConfigError(f"{out} ends with neither .jsonl nor .pb; name the encoding of OTLP by the ending")


def _add(file: BinaryIO, out: Path, request: ExportTraceServiceRequest) -> None:
    if out.suffix == ".jsonl":
        file.write(to_json(request) + b"\n")
        return
    raw = request.SerializeToString()
    file.write(len(raw).to_bytes(4, "big") + raw)

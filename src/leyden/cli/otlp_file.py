"""Traces as a file of OTLP, as collectors write and read it.

`.jsonl` has one request in OTLP's JSON per line; `.pb` has requests in protobuf, each after its length in four bytes,
big end first. One request holds one attempt, so a reader needs memory for one, and a line can be posted to `/v1/traces`
as it is.
"""

import json
from pathlib import Path

import typer

from leyden.base.config import Config
from leyden.base.errors import ConfigError
from leyden.cli import wiring
from leyden.store import queue
from leyden.traces.reader import Reader
from leyden.traces.telemetry.wire import to_json
from leyden.traces.telemetry.writing import request_of

TRACES_AT_ONCE = 64
"""Rollouts that are read together: a handful of queries for all of them, and memory stays flat."""


def write(settings: Config, out: Path, run_id: str | None, *, json_output: bool) -> None:
    """Write the rollouts of finished groups, of training and of evaluation. Raises ConfigError, StoreError."""
    if out.suffix not in (".jsonl", ".pb"):
        raise ConfigError(f"{out} ends with neither .jsonl nor .pb; name the encoding of OTLP by the ending")
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
                    if out.suffix == ".jsonl":
                        file.write(to_json(request) + b"\n")
                    else:
                        raw = request.SerializeToString()
                        file.write(len(raw).to_bytes(4, "big") + raw)
    finally:
        store.close()
    if json_output:
        typer.echo(json.dumps({"file": str(out), **counted}))
    else:
        typer.echo(f"Wrote {counted['spans']} spans of {counted['rollouts']} rollouts to {out}, as OTLP")

"""How long the gateway keeps the events of a stream, and how many streams one process holds at once."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from benchmarks import serving
from benchmarks.serving import BODY, Cores

NUM_HELD = 500
"""Streams at once, of 20 events in 5 s each: 2000 events a second."""


def measure(cores: Cores, rounds: int) -> dict[str, Any]:
    """First byte and later events against the bare engine, one client; then many streams at once."""
    with _engine(cores.others, tokens=100, chunk_delay_s=0.005) as (url, _):
        path = {"path": "/v1/chat/completions", "key": "none"}
        asked = {**BODY, "logprobs": True, "return_token_ids": True}
        bare = _run(cores.others, serving.port_of(url), [path], asked, rounds)
        with serving.gateway(url, cores.server) as room:
            ours = _run(cores.others, room.port, room.targets(1), BODY, rounds)
    with (
        _engine(cores.others, tokens=20, chunk_delay_s=0.25) as (url, _),
        serving.gateway(url, cores.server) as room,
    ):
        many = _run(cores.others, room.port, room.targets(NUM_HELD), BODY, 1)
        query = "select count(*) from completions where status = 'ok' and delivered"
        recorded = room.store.read(lambda c: c.exec_driver_sql(query).scalar_one())
    found = {
        "first_byte_delay_ms": ours["first_ms"] - bare["first_ms"],
        "event_delay_ms": ours["event_ms"] - bare["event_ms"],
        "event_p99_delay_ms": ours["event_p99_ms"] - bare["event_p99_ms"],
        "streams_held": min(many["held"], many["done"], recorded),
        "streams_event_ms": many["event_ms"],
        "streams_event_p99_ms": many["event_p99_ms"],
        "stream_errors": ours["errors"] + many["errors"],
    }
    print(
        f"{'streams':28}   1 client : first byte +{found['first_byte_delay_ms']:.2f} ms, later events "
        f"+{found['event_delay_ms']:.3f} ms (p99 +{found['event_p99_delay_ms']:.2f})\n"
        f"{'':28} {NUM_HELD} at once: {found['streams_held']} held, whole and recorded, events after "
        f"{many['event_ms']:.2f} ms (p99 {many['event_p99_ms']:.1f})",
        flush=True,
    )
    return found


def _run(cores: Sequence[int], port: int, clients: Any, body: Any, rounds: int) -> dict[str, Any]:
    return serving.load("stream_load", cores, port=port, clients=clients, body=body, rounds=rounds)


@contextmanager
def _engine(cores: Sequence[int], *, tokens: int, chunk_delay_s: float) -> Iterator[tuple[str, int]]:
    script = [sys.executable, str(serving.ROOT / "benchmarks/peers/stamping_engine.py")]
    options = ["--tokens", str(tokens), "--chunk-delay-s", str(chunk_delay_s)]
    with serving.process([*script, *options], cores=cores) as started:
        yield started

"""What a marked retry gets: the answer of the call in flight that it belongs to, or the stored one."""

import orjson

from leyden.base.errors import RequestRefused
from leyden.base.records import Call
from leyden.gateway.client import EVENT_STREAM, JSON, Client, Headers
from leyden.gateway.ledger import Flight
from leyden.gateway.road import Translated


async def follow(flight: Flight, client: Client) -> None:
    """Give a retry the answer of the call that it belongs to. Raises what that call raised."""
    await flight.started()
    if flight.head is None:
        raise flight.error or RequestRefused(
            "the call that this retry belongs to was stopped",
            status=503,
            kind="aborted",
            hint="send it again",
        )
    await client.start(flight.head[0], list(flight.head[1]))
    index = 0
    while (part := await flight.part(index)) is not None:
        await client.part(part)
        index += 1
    await client.end()


async def replay(translated: Translated, call: Call) -> None:
    """Answer a retry from the store."""
    arrival, request = translated.called.arrival, translated.request
    response = dict(call.response or {})
    headers: Headers = [
        (b"x-leyden-call", call.id.encode()),
        (b"x-leyden-policy", f"{call.policy}@{call.policy_version}".encode("latin-1", "replace")),
        (b"x-leyden-rewrites", ",".join(call.rewrites).encode()),
        (b"x-leyden-replayed", b"1"),
        (arrival.address.dialect.id_header, call.id.encode()),
    ]
    if not request.stream:
        await arrival.client.whole(200, [JSON, *headers], orjson.dumps(response))
        return
    await arrival.client.start(200, [EVENT_STREAM, *headers])
    await arrival.client.end(arrival.address.dialect.replay(response, request))

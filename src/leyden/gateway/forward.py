"""One model call, start to finish: identify, translate, choose, send, record, answer.

Each phase is one function with one record in and one out. What a phase cannot honour it raises; `forward`
turns that into an error in the shape of the dialect. From `send` on a call has a durable intent, so whatever
happens then ends in `record`, not in an exception. A stream is relayed while `send` runs; its last events are
released by `answer`.
"""

import asyncio
import math
import time
from dataclasses import replace
from functools import partial

import orjson
from msgspec import structs

from leyden.base.errors import Conflict, EngineError, LeydenError, RequestRefused, StoreError
from leyden.base.records import Call, CallCompletion, CallIntent, Choice
from leyden.gateway import numbering, splicing, upstream
from leyden.gateway.auth import KnownAttempt
from leyden.gateway.callers import attempt_of, live_origin
from leyden.gateway.client import EVENT_STREAM, JSON, ClientLeftError, Headers
from leyden.gateway.client_headers import limits_of
from leyden.gateway.dialects.chat_engine import ChatEngine
from leyden.gateway.engine_answers import error_of, fault_of, read_chat
from leyden.gateway.journal import log_call
from leyden.gateway.ledger import Book, Flight, digest_of, note_texts
from leyden.gateway.matching import NEUTRAL
from leyden.gateway.providers import Response
from leyden.gateway.providers.faults import told
from leyden.gateway.refusals import refuse
from leyden.gateway.requests import check_needs, json_object, refusal_of, resolved
from leyden.gateway.retries import follow, replay
from leyden.gateway.road import Arrival, Called, Chosen, Gateway, Recorded, Sent, Translated
from leyden.gateway.sampling import effective_sampling, seed_of
from leyden.gateway.stream import Relay, read_json
from leyden.traces.tokens import checked

MAX_CONFLICTS = 64
"""Occurrences tried for one intent: another gateway on the same store can have taken at most as many as it
served."""


async def forward(gateway: Gateway, arrival: Arrival) -> None:
    """Answer one model call."""
    called: Called | None = None
    try:
        called = await identify(gateway, arrival)
        translated = await translate(gateway, called)
        book = called.known.book if called.known is not None else gateway.live
        place = await book.place(
            gateway.reader, translated.digest, arrival.retry_count, arrival.from_sdk, gateway.settle
        )
        if isinstance(place, Call):
            gateway.metrics.retried()
            await replay(translated, place)
            return
        arrival.client.watch(place.left)
        if place.mine():
            await fly(gateway, book, translated, place)
        else:
            gateway.metrics.retried()
            await follow(place, arrival.client)
    except ClientLeftError:
        pass
    except LeydenError as error:
        await refuse(gateway, arrival, called, error)


async def fly(gateway: Gateway, book: Book, translated: Translated, flight: Flight) -> None:
    """Take a new call through the phases that may be waited for by several clients."""
    gateway.flights.add(flight)
    failure: LeydenError | None = None
    try:
        chosen = await choose(gateway, book, translated, flight)
        try:
            sent = await send(gateway, chosen)
            recorded = await record(gateway, sent)
        finally:
            gateway.hold.leave()
        await answer(recorded)
    except LeydenError as error:
        failure = error
        raise
    finally:
        gateway.flights.discard(flight)
        book.close(flight)
        flight.finish(failure)


async def identify(gateway: Gateway, arrival: Arrival) -> Called:
    """Who calls, for which attempt, with what body. Raises RequestRefused."""
    caller = await gateway.keys.caller(arrival.key)
    known = await attempt_of(gateway.keys, caller, arrival.address)
    if known is not None:
        gateway.keys.still_runs(known)
    raw = await arrival.client.body(gateway.config.gateway.max_body_bytes)
    live = live_origin(caller, arrival.live_headers) if known is None else None
    return Called(arrival=arrival, known=known, raw=raw, live=live)


async def translate(gateway: Gateway, called: Called) -> Translated:
    """The request with sampling parameters from their one place, and every change named. Raises
    RequestRefused."""
    dialect = called.arrival.address.dialect
    request = dialect.parse(json_object(called.raw))
    matchers = gateway.router.matchers
    if request.alias not in matchers.models:
        await gateway.router.policy(request.alias)  # an unknown name is refused before anything is looked up for it
    if request.previous is not None or request.recalls:
        request = await resolved(gateway.reader, called.known, dialect, request)
    name = matchers.policy_of(request.alias, lambda: dialect.engine_body(request, NEUTRAL, request.alias))
    policy = await gateway.router.policy(name)
    used, rewrites = effective_sampling(request, policy, called.known.rollout if called.known else None)
    if request.needs:
        check_needs(request, policy, used, name)
    return Translated(
        called=called,
        request=request,
        used=used,
        rewrites=[*rewrites, *request.rewrites, *(["model"] if name != request.alias else [])],
        policy=name,
        digest=digest_of(dialect.path, request.body),
    )


async def choose(gateway: Gateway, book: Book, translated: Translated, flight: Flight) -> Chosen:
    """Wait while the gateway is paused, then pick policy version, replica and seed. Raises LeydenError.

    Counts the call as in flight; whoever gets a Chosen must let `hold.leave` be called.
    """
    held = await flight.interruptible(gateway.hold.enter())
    flight.entered = True
    try:
        called = translated.called
        if held and called.known is not None:  # its rollout may have been pinned to the new weights meanwhile
            await gateway.keys.refresh(called.known)
        rollout = called.known.rollout if called.known is not None else None
        session = called.live.session or "" if called.live is not None else ""
        route = await gateway.router.route(translated.policy, rollout, session)
        model = await gateway.upstream.name(route)
        await gateway.upstream.require(route, called.arrival.address.dialect, model)
        used, rewrites = dict(translated.used), list(translated.rewrites)
        gateway.upstream.check(route, called.arrival.address.dialect, translated.request, used, model)
        dialect = called.arrival.address.dialect
        replaced = await gateway.prompts.replace(route, lambda: dialect.engine_body(translated.request, used, model))
        await book.number(gateway.reader, flight, gateway.worker)  # last: a call that is refused takes no number
        if (
            "seed" not in used
            and route.wire.takes_seed
            and rollout is not None
            and used["temperature"] != 0
            and called.known is not None
        ):
            used["seed"] = seed_of(rollout.seed, called.known.attempt.number, flight.seq)
            rewrites.append("seed")
        rewrites += replaced.rewrites
    except BaseException:
        gateway.hold.leave()
        raise
    return Chosen(
        translated=translated, flight=flight, route=route, model=model, used=used, rewrites=rewrites, replaced=replaced
    )


async def send(gateway: Gateway, chosen: Chosen) -> Sent:
    """Make the intent durable, then ask the engine; a stream is relayed as it comes.

    Raises StoreError if the intent cannot be written; then nothing was sampled. Never raises for the engine.
    """
    chosen = await _write_intent(gateway, chosen)
    flight, arrival = chosen.flight, chosen.translated.called.arrival
    dialect = arrival.address.dialect
    request = chosen.translated.request
    relay = Relay(dialect, request, flight.call_id) if request.stream else None
    try:
        return await flight.interruptible(_ask(gateway, chosen, relay))
    except RequestRefused as stopped:
        assert stopped.kind == "aborted", stopped
        return Sent(
            chosen=chosen, status="aborted", http_status=503, answer=relay.assembled() if relay else {},
            error=str(stopped), kind="aborted", relay=relay,
        )  # fmt: skip
    except (EngineError, *upstream.BROKEN, TimeoutError) as error:
        reason = str(error) or f"engine {chosen.route.endpoint}: {type(error).__name__}"
        http_status, kind, retry_after_s = told(error)
        return Sent(
            chosen=chosen, status="error", http_status=http_status, answer=relay.assembled() if relay else {},
            error=reason, kind=kind, retry_after_s=retry_after_s, relay=relay,
        )  # fmt: skip


async def _write_intent(gateway: Gateway, chosen: Chosen) -> Chosen:
    called, flight = chosen.translated.called, chosen.flight
    known, request = called.known, chosen.translated.request
    intent = CallIntent(
        call_id=flight.call_id,
        rollout_id=known.rollout.id if known else None,
        attempt_id=known.attempt.id if known else None,
        seq=flight.seq,
        digest=flight.digest,
        occurrence=flight.occurrence,
        origin="rollout" if known else "live",
        dialect=request.dialect,
        alias=request.alias,
        policy=chosen.route.policy,
        policy_version=chosen.route.version,
        engine=chosen.route.endpoint,
        stream=request.stream,
        request=request.body,
        sampling={"asked": dict(request.asked), "used": dict(chosen.used)},
        rewrites=tuple(chosen.rewrites),
        slots=chosen.replaced.record,
        started_at=called.arrival.started_at,
        live=called.live,
    )
    if numbering.by_store(gateway, chosen):
        return await numbering.write(gateway, chosen, intent)
    for _ in range(MAX_CONFLICTS):
        try:
            # Lazily: nobody was answered yet, and the completion that will be is on disk no sooner than this.
            await gateway.quay.durable(partial(gateway.recorder.hand_in_intent, intent, lazily=True))
            return chosen
        except Conflict:
            flight.occurrence += 1  # another gateway on this store has taken that occurrence
            intent = structs.replace(intent, occurrence=flight.occurrence)
    raise Conflict(f"call {flight.call_id}: {MAX_CONFLICTS} occurrences of its request are taken in the store")


async def _ask(gateway: Gateway, chosen: Chosen, relay: Relay | None) -> Sent:
    """The engine's answer. Raises EngineError."""
    called = chosen.translated.called
    dialect = called.arrival.address.dialect
    body = chosen.replaced.body(dialect.engine_body(chosen.translated.request, chosen.used, chosen.model))
    deadline = time.monotonic() + _seconds_left(gateway, called.known)
    headers = splicing.headers(gateway, chosen)
    response = await gateway.upstream.post(
        chosen.route, dialect.engine_path, body, deadline=deadline, headers=headers, request=chosen.translated.request
    )
    if chosen.route.provider is not None:
        chosen.flight.passed = limits_of(response.headers)
    try:
        first_byte_ms = (time.monotonic() - called.arrival.began) * 1000
        if response.status == 200 and relay is not None:
            # The session's own limit covers reading; a harness that stops reading must not hold a call for ever.
            async with asyncio.timeout(max(0.0, deadline - time.monotonic())):
                return await _relay(chosen, relay, response, first_byte_ms)
        raw = await upstream.read(response, chosen.route)
        whole_chat = response.status == 200 and dialect.engine_path == ChatEngine.engine_path
        answer = read_chat(raw, chosen.translated.request) if whole_chat else read_json(raw)
    finally:
        response.close() if not response.content.at_eof() else response.release()
    if response.status != 200:
        message, kind = error_of(answer, response.status, chosen.route.endpoint)
        status = response.status if 400 <= response.status < 500 else 502
        return Sent(chosen=chosen, status="error", http_status=status, answer={}, error=message, kind=kind)
    fault = fault_of(answer)
    if fault is not None or not isinstance(answer, dict):
        raise EngineError(f"engine {chosen.route.endpoint} {fault}")
    given, wanted = len(answer["choices"]), chosen.translated.request.num_choices
    if given != wanted:
        error = f"engine {chosen.route.endpoint} gave {given} choices, {wanted} were asked for"
        return Sent(chosen=chosen, status="error", http_status=502, answer=answer, error=error)
    return Sent(chosen=chosen, status="ok", http_status=200, answer=answer, first_byte_ms=first_byte_ms)


async def _relay(chosen: Chosen, relay: Relay, response: Response, first_byte_ms: float) -> Sent:
    """Pass a stream on, up to the events that wait for the record."""
    flight, client = chosen.flight, chosen.translated.called.arrival.client
    headers = [EVENT_STREAM, (b"cache-control", b"no-cache"), *_headers(chosen)]
    flight.start(200, headers)
    await client.start(200, list(headers))
    async for data in response.content.iter_any():
        public = relay.feed(data)
        if public:
            flight.release(public)
            await client.part(public)
        if relay.done or relay.error is not None:
            break
    if relay.complete:
        return Sent(
            chosen=chosen, status="ok", http_status=200, answer=relay.assembled(), relay=relay,
            first_byte_ms=first_byte_ms,
        )  # fmt: skip
    if relay.error is not None:
        error = f"the engine reported an error in its stream: {relay.error.get('message', relay.error)}"
    else:
        error = f"engine {chosen.route.endpoint} ended its stream before the last event"
    return Sent(
        chosen=chosen, status="error", http_status=502, answer=relay.assembled(), error=error,
        relay=relay, first_byte_ms=first_byte_ms,
    )  # fmt: skip


async def record(gateway: Gateway, sent: Sent) -> Recorded:
    """Check the tokens and make the completion durable. Raises StoreError; then the last byte is not
    released."""
    chosen = sent.chosen
    flight, called = chosen.flight, chosen.translated.called
    dialect, request = called.arrival.address.dialect, chosen.translated.request
    capture = dialect.capture(sent.answer)
    tokens = checked(capture.prompt_ids, capture.choices, capture.usage)
    choices = tokens.choices if sent.status == "ok" else [_unfinished(choice) for choice in tokens.choices]
    public = dialect.public(sent.answer, request, flight.call_id) if sent.answer.get("choices") else {}
    if sent.status != "ok" and not public:
        public = dialect.error_body(sent.error or "", sent.kind, None, None)
    if capture.texts and called.known is not None:
        note_texts(called.known.book.texts, capture.texts)
    delivered = await flight.settled()
    completion = CallCompletion(
        call_id=flight.call_id,
        status=sent.status,
        http_status=sent.http_status,
        response=public,
        provenance=splicing.provenance(gateway, chosen, tokens.provenance, capture),
        refusal=tokens.refusal or (refusal_of(request, chosen.used, choices) if request.needs else None),
        prompt_ids=tokens.prompt_ids,
        choices=choices,
        usage=upstream.priced(chosen.route, capture.usage),
        delivered=delivered,
        retry_count=flight.retry_count,
        error=sent.error,
        latency_ms=(time.monotonic() - called.arrival.began) * 1000,
        first_byte_ms=sent.first_byte_ms,
        ended_at=time.time(),
    )
    began = time.monotonic()
    try:
        await gateway.quay.durable(partial(gateway.recorder.hand_in_completion, completion))
        gateway.metrics.recorded(dialect.name, chosen.route.policy, completion, time.monotonic() - began)
        log_call(chosen, completion)
    except StoreError as error:
        if flight.head is not None and sent.relay is not None:  # a stream is under way: the error goes into it
            await _end(sent, sent.relay.failure(str(error), "store"))
        raise
    return Recorded(sent=sent, public=public)


async def answer(recorded: Recorded) -> None:
    """Release what was held back until the call was durable."""
    sent = recorded.sent
    flight, called = sent.chosen.flight, sent.chosen.translated.called
    dialect = called.arrival.address.dialect
    if flight.head is not None:
        assert sent.relay is not None
        good = sent.status == "ok"
        await _end(
            sent,
            sent.relay.terminal(recorded.public) if good else sent.relay.failure(sent.error or "", sent.kind),
        )
        return
    if sent.status == "ok":
        body = orjson.dumps(recorded.public)
    else:
        hint = "send the request again: nothing was delivered" if sent.status == "aborted" else None
        body = orjson.dumps(dialect.error_body(sent.error or "", sent.kind, None, hint))
    headers = [JSON, *_headers(sent.chosen)]
    if sent.retry_after_s is not None:
        headers.append((b"retry-after", b"%d" % math.ceil(sent.retry_after_s)))
    flight.start(sent.http_status, headers)
    flight.release(body)
    await called.arrival.client.whole(sent.http_status, list(headers), body)


async def _end(sent: Sent, last: bytes) -> None:
    sent.chosen.flight.release(last)
    await sent.chosen.translated.called.arrival.client.end(last)


def _seconds_left(gateway: Gateway, known: KnownAttempt | None) -> float:
    """How long an engine may take: the configured limit, or what is left of the attempt if that is less."""
    limit_s = gateway.config.gateway.upstream_timeout_s
    if known is None:
        return limit_s
    attempt_s = known.rollout.config.get("timeout_seconds")
    if not isinstance(attempt_s, int | float) or attempt_s <= 0:
        return limit_s
    return min(limit_s, max(1.0, known.attempt.started_at + attempt_s - time.time()))


def _unfinished(choice: Choice) -> Choice:
    return choice if choice.finish_reason else replace(choice, finish_reason="abort")


def _headers(chosen: Chosen) -> Headers:
    return [
        (b"x-leyden-call", chosen.flight.call_id.encode()),
        (b"x-leyden-policy", f"{chosen.route.policy}@{chosen.route.version}".encode("latin-1", "replace")),
        (b"x-leyden-rewrites", ",".join(chosen.rewrites).encode()),
        (chosen.translated.called.arrival.address.dialect.id_header, chosen.flight.call_id.encode()),
        *chosen.flight.passed,
    ]

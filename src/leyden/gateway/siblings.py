"""Several gateway processes that serve one port: how an order to one of them reaches all, through the store.

`leyden serve --workers N` starts N of them. The kernel spreads connections, so a pause, a drain or a scrape arrives at
any one, which writes the order into the store, where every worker (the writer too) sees it, carries it out and
replies. An order waits for the replies of all workers, with a bound; one that crashed meanwhile replies when it is
back, since a fresh worker first carries out what is outstanding. Whether the gateway is paused is kept apart from
orders, so that a fresh worker begins paused if the others are.

A retry that reaches another worker than its call takes part in it here too: it says so in the store, and the worker
that has the call keeps it going although its own client left.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from leyden.base.errors import RequestRefused, StoreError
from leyden.base.records import Call, new_id
from leyden.gateway.ledger import CALL_IDS
from leyden.store import aio, ledger

if TYPE_CHECKING:
    from leyden.gateway.road import Gateway

log = logging.getLogger("leyden.gateway")

REPLY_S = 20.0
"""Longest wait for a worker's reply beyond what the order itself takes: a crashed one is back within seconds."""
LOOK_S = 0.02
"""Pause between two looks for a reply or for the end of another worker's call."""
WATCH_S = 5.0
"""A change wakes a worker at once; this is the bound of one wait."""

Carry = Callable[["Gateway", dict[str, Any]], Awaitable[dict[str, Any]]]


class Siblings:
    """This process among the workers of its group."""

    def __init__(self, group: str, index: int, size: int) -> None:
        """`group` is unique per `leyden serve`, `index` from 0 to `size` - 1."""
        self.group = group
        self.index = index
        self.size = size
        self._prefix = f"gateway.{group}."
        self._gateway: Gateway | None = None
        self._carry: dict[str, Carry] = {}
        self._done: set[str] = set()
        self._joined: set[str] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self, gateway: "Gateway", carry: dict[str, Carry]) -> None:
        """Take part: adopt the state of the group and say which calls are this process's."""
        self._gateway, self._carry = gateway, carry
        key, value = f"{self._prefix}worker.{self.index}", CALL_IDS
        await aio.write(gateway.store, lambda c: ledger.set_control(c, gateway.store, key, value))
        await self._look()

    async def watch(self) -> None:
        """Carry out orders for ever; ends when it is cancelled."""
        gateway = self._mine()
        while True:
            try:
                seen = gateway.store.count(ledger.CONTROL_TOPIC)
                await self._look()
                await aio.watch(gateway.store, ledger.CONTROL_TOPIC, seen, WATCH_S)
            except StoreError as error:
                log.error("orders of other workers cannot be read", extra={"kind": type(error).__name__})
                await asyncio.sleep(WATCH_S)

    async def order(self, verb: str, arguments: dict[str, Any], patience_s: float = 0.0) -> dict[int, Any]:
        """Have every worker carry `verb` out; the replies by worker. Raises RequestRefused (503) naming the workers
        that did not reply."""
        gateway = self._mine()
        number = f"{time.time_ns():020d}-{new_id('order')}"
        key = f"{self._prefix}order.{number}"
        below = f"{self._prefix}reply.{number}."
        order = {"verb": verb, "arguments": arguments}
        await aio.write(gateway.store, lambda c: ledger.set_control(c, gateway.store, key, order))
        deadline = time.monotonic() + patience_s + REPLY_S
        replies: dict[int, Any] = {}
        try:
            while len(replies) < self.size:
                if time.monotonic() > deadline:
                    late = sorted(set(range(self.size)) - set(replies))
                    raise RequestRefused(
                        f"workers {late} of {self.size} did not carry out {verb!r} within {patience_s + REPLY_S:g} s",
                        status=503, kind="worker_timeout", hint="look at the log of those workers, then ask again",
                    )  # fmt: skip
                await asyncio.sleep(LOOK_S)
                found = await aio.read(gateway.store, lambda c: ledger.control_below(c, below))
                replies = {int(name.removeprefix(below)): value for name, value in found.items()}
        finally:
            spent = [key, *(f"{below}{index}" for index in range(self.size))]
            await aio.write(gateway.store, lambda c: ledger.delete_control(c, spent))
        failed = {index: reply["error"] for index, reply in replies.items() if "error" in reply}
        if failed:
            raise RequestRefused(f"{verb!r} failed in workers {failed}", status=500, kind="worker_failed")
        return dict(sorted(replies.items()))

    async def settle(self, call: Call, retry_count: int) -> Call:
        """The call as it ends, kept going by the worker that has it. As it is, if that worker died or if it has not
        ended after `gateway.upstream_timeout_s`: no call takes longer."""
        gateway = self._mine()
        key = f"{self._prefix}join.{call.id}.{new_id('join')}"
        value = {"call_id": call.id, "retry_count": retry_count}
        deadline = time.monotonic() + gateway.config.gateway.upstream_timeout_s
        await aio.write(gateway.store, lambda c: ledger.set_control(c, gateway.store, key, value))
        try:
            while call.status == "open" and time.monotonic() < deadline and await self._has_owner(call):
                await asyncio.sleep(LOOK_S)
                call = await asyncio.to_thread(gateway.reader.call, call.id)
        finally:
            await aio.write(gateway.store, lambda c: _end_join(c, gateway, key))
        return call

    async def _has_owner(self, call: Call) -> bool:
        """Whether the process that has an open call runs."""
        below = f"{self._prefix}worker."
        found = await aio.read(self._mine().store, lambda c: ledger.control_below(c, below))
        return any(call.id.startswith(ids) for ids in found.values())

    async def _look(self) -> None:
        gateway = self._mine()
        found = await aio.read(gateway.store, lambda c: ledger.control_below(c, self._prefix))
        held = found.get(f"{self._prefix}hold")
        if held is not None and held["paused"] and not gateway.hold.paused:
            gateway.hold.pause(held["reason"], held["retry_after_s"])
        self._follow_joins(found)
        below = f"{self._prefix}order."
        orders = {name.removeprefix(below): value for name, value in found.items() if name.startswith(below)}
        self._done &= orders.keys()
        for number, order in orders.items():
            if number not in self._done:
                self._done.add(number)
                task = asyncio.create_task(self._obey(number, order))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

    def _follow_joins(self, found: dict[str, Any]) -> None:
        below = f"{self._prefix}join."
        joins = {name: value for name, value in found.items() if name.startswith(below)}
        flights = {flight.call_id: flight for flight in self._mine().flights}
        for name, value in joins.items():
            flight = flights.get(value["call_id"])
            if flight is not None and name not in self._joined:
                self._joined.add(name)
                flight.join(value["retry_count"])
        for name in self._joined - joins.keys():
            self._joined.discard(name)
            flight = flights.get(name.removeprefix(below).rpartition(".")[0])
            if flight is not None:
                flight.left()

    async def _obey(self, number: str, order: dict[str, Any]) -> None:
        gateway = self._mine()
        try:
            reply = await self._carry[order["verb"]](gateway, order["arguments"])
        except Exception as error:
            log.exception("an order failed")
            reply = {"error": type(error).__name__}
        key = f"{self._prefix}reply.{number}.{self.index}"
        # Wakes nobody: whoever waits for replies looks for them.
        await aio.write(gateway.store, lambda c: ledger.set_quietly(c, key, reply))

    def _mine(self) -> "Gateway":
        assert self._gateway is not None, "the worker has not started"
        return self._gateway


def hold_key(siblings: Siblings) -> str:
    """Where a group keeps whether it is paused."""
    return f"gateway.{siblings.group}.hold"


def _end_join(connection: Any, gateway: "Gateway", key: str) -> None:
    ledger.delete_control(connection, [key])
    gateway.store.changed(connection, ledger.CONTROL_TOPIC)

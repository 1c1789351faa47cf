"""Which replicas can be asked: what calls and checks in the background found out about each.

A replica that failed `eject_after` times in a row is left out until a check finds it again; where all are out, all
are tried, since nothing is lost by it. Calls tell what they meet; the checks are one small request per replica and
interval, bounded in time. At the start each trainable policy's engine is probed for what it can return, so that a
missing flag is in the log and in `/readyz` before the first rollout.
"""

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from leyden.base.errors import EngineError, EngineIncapable, LeydenError
from leyden.gateway.dialects import DIALECTS
from leyden.store import aio, ledger

if TYPE_CHECKING:
    from leyden.gateway.road import Gateway

log = logging.getLogger("leyden.gateway")

CHECK_TIMEOUT_S = 2.0
"""A server that lists its models slower than this would be no help to a call."""


@dataclass(slots=True)
class Replica:
    """One engine, as it is known here."""

    endpoint: str
    """Its base URL."""
    num_failures: int = 0
    """In a row."""
    ejected: bool = False
    """Whether calls avoid it."""
    draining: bool = False
    """Whether an administrator keeps new calls away from it."""
    incapable: str | None = None
    """What it does not return although a trainable policy needs it."""
    last_error: str | None = None
    """Of the last failure."""
    checked_at: float | None = None
    """Seconds since the epoch; None before the first answer or failure."""

    @property
    def state(self) -> str:
        """`up`, `unknown`, `failing`, `ejected`, `draining` or `incapable`."""
        if self.draining:
            return "draining"
        if self.ejected:
            return "ejected"
        if self.incapable is not None:
            return "incapable"
        if self.checked_at is None:
            return "unknown"
        return "failing" if self.num_failures else "up"


class Health:
    """Every replica that was ever asked. Lives on the event loop."""

    def __init__(self, eject_after: int) -> None:
        self._eject_after = eject_after
        self._replicas: dict[str, Replica] = {}

    def replica(self, endpoint: str) -> Replica:
        """What is known of one."""
        found = self._replicas.get(endpoint)
        if found is None:
            found = self._replicas[endpoint] = Replica(endpoint)
        return found

    def every(self) -> list[Replica]:
        """All of them."""
        return list(self._replicas.values())

    def worked(self, endpoint: str) -> None:
        """It answered."""
        found = self._replicas.get(endpoint)
        if found is None:
            found = self.replica(endpoint)
        elif found.num_failures == 0 and found.checked_at is not None:
            return
        if found.ejected:
            log.warning("a replica is back", extra={"endpoint": endpoint})
        found.num_failures, found.ejected, found.last_error = 0, False, None
        found.checked_at = time.time()

    def failed(self, endpoint: str, reason: str) -> None:
        """It did not answer, or answered that it cannot."""
        found = self.replica(endpoint)
        found.num_failures += 1
        found.last_error, found.checked_at = reason, time.time()
        if not found.ejected and found.num_failures >= self._eject_after:
            found.ejected = True
            log.warning("a replica is left out", extra={"endpoint": endpoint, "failures": found.num_failures})

    def usable(self, endpoint: str) -> bool:
        """Whether calls should go there while there are others."""
        found = self._replicas.get(endpoint)
        return found is None or not (found.ejected or found.draining)

    def set_draining(self, endpoints: Sequence[str]) -> None:
        """Keep new calls away from exactly these."""
        for endpoint in endpoints:
            self.replica(endpoint).draining = True
        for found in self._replicas.values():
            found.draining = found.endpoint in endpoints

    def keep(self, endpoints: Sequence[str]) -> None:
        """Forget every other replica, because it is not registered any more."""
        self._replicas = {name: found for name, found in self._replicas.items() if name in endpoints}


async def watch(gateway: "Gateway") -> None:
    """Probe once, then check for ever; ends when it is cancelled."""
    if gateway.config.gateway.probe_at_start:
        await probe(gateway)
    while True:
        try:
            await check(gateway)
        except LeydenError as error:
            log.error("engines cannot be checked", extra={"kind": type(error).__name__})
        await asyncio.sleep(gateway.config.gateway.health_interval_s)


async def check(gateway: "Gateway") -> None:
    """Ask every replica once, all at the same time."""
    engines = await gateway.router.engines()
    gateway.upstream.health.keep([endpoint for endpoint, _ in engines])
    await asyncio.gather(*(gateway.upstream.check_replica(url, key, CHECK_TIMEOUT_S) for url, key in engines))


async def probe(gateway: "Gateway") -> None:
    """Find out what the engines of trainable policies return. What cannot be reached is left to the first call."""
    for name, policy in gateway.config.policies.items():
        if not policy.trainable or policy.provider:
            continue
        try:
            route = await gateway.router.route(name, None)
            model = await gateway.upstream.name(route)
            await gateway.upstream.require(route, DIALECTS[0], model, remember=False)
        except EngineIncapable as error:
            gateway.upstream.health.replica(route.endpoint).incapable = str(error)
            log.error("an engine cannot return what training needs", extra={"policy": name, "detail": str(error)})
        except EngineError as error:
            log.warning("an engine cannot be probed yet", extra={"policy": name, "kind": type(error).__name__})
        except LeydenError as error:
            log.error("an engine cannot be probed", extra={"policy": name, "kind": type(error).__name__})


async def readiness(gateway: "Gateway") -> tuple[bool, dict[str, Any]]:
    """(whether calls of every trainable policy can be answered and recorded, why and what is known)."""
    reasons: list[str] = []
    try:
        job = aio.write(gateway.store, lambda connection: ledger.touch(connection, "gateway.ready"))
        async with asyncio.timeout(CHECK_TIMEOUT_S):
            await job
    except TimeoutError:
        reasons.append(f"the store did not commit within {CHECK_TIMEOUT_S:g} s")
    except LeydenError as error:
        reasons.append(f"the store cannot be written ({type(error).__name__})")
    for name, policy in gateway.config.policies.items():
        if not policy.trainable or policy.provider:
            continue
        replicas = [gateway.upstream.health.replica(url) for url in await gateway.router.endpoints(name)]
        if not replicas:
            reasons.append(f"no engine serves policy {name}")
        elif not any(replica.state in ("up", "failing") for replica in replicas):
            states = ", ".join(sorted({replica.state for replica in replicas}))
            reasons.append(f"no engine of policy {name} is up ({states})")
    known = [
        {
            "endpoint": one.endpoint, "state": one.state, "failures": one.num_failures, "error": one.last_error,
            "incapable": one.incapable, "checked_at": one.checked_at,
        }
        for one in gateway.upstream.health.every()
    ]  # fmt: skip
    return not reasons, {"ready": not reasons, "reasons": reasons, "replicas": known}

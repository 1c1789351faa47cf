"""Hold and drain: while weights change, new calls wait; they are not refused.

Every wait is bounded: a held call by `hold_timeout_s`, a drain by its own deadline. Single-threaded:
everything here runs on the gateway's event loop.
"""

import asyncio
import time

from leyden.base.errors import RequestRefused


class Hold:
    """Counts calls in flight and holds new ones back while paused."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._open = asyncio.Event()
        self._open.set()
        self._idle = asyncio.Event()
        self._idle.set()
        self.inflight = 0
        """Calls between their release and their record."""
        self.waiting = 0
        """Calls that are held."""
        self.reason = ""
        """Why it is paused, for people."""
        self.retry_after_s = 0.0
        """What the one who paused expects; told to those who ask and to those whose wait is over."""
        self._since = 0.0

    @property
    def paused(self) -> bool:
        """Whether new calls wait."""
        return not self._open.is_set()

    def pause(self, reason: str = "", retry_after_s: float = 0.0) -> None:
        """Make new calls wait. Idempotent; the newest reason counts."""
        if not self.paused:
            self._since = time.monotonic()
        self.reason, self.retry_after_s = reason, retry_after_s
        self._open.clear()

    def resume(self) -> None:
        """Let every held call go on. Idempotent."""
        self.reason, self.retry_after_s = "", 0.0
        self._open.set()

    async def enter(self) -> bool:
        """Wait while paused, then count as in flight; whether it had to wait. Raises RequestRefused (503) when the
        wait is over."""
        waited = self.paused
        if waited:
            self.waiting += 1
            try:
                async with asyncio.timeout(self._timeout_s):
                    # A call that wakes may find the gateway paused again, so it looks again.
                    while self.paused:
                        await self._open.wait()
            except TimeoutError:
                raise RequestRefused(
                    f"the gateway has been paused for {time.monotonic() - self._since:.0f} s "
                    f"(reason: {self.reason or 'none given'}) and this call waited {self._timeout_s:g} s",
                    status=503,
                    kind="hold_timeout",
                    hint="whoever paused it (POST /proxy/pause) must POST /proxy/resume; "
                    "gateway.hold_timeout_s bounds the wait",
                ) from None
            finally:
                self.waiting -= 1
        self.inflight += 1
        self._idle.clear()
        return waited

    def leave(self) -> None:
        """A call that entered is recorded."""
        self.inflight -= 1
        assert self.inflight >= 0
        if self.inflight == 0:
            self._idle.set()

    async def drained(self, timeout_s: float) -> bool:
        """Wait until no call is in flight; False when `timeout_s` is over."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True

"""Prompt policies at the gateway: which slots a policy version has, and what they do to a request.

A version is immutable, so its slots are read once; versions without prompts cost one look into a dictionary per call.
What is found and compared is `leyden.base.prompts`; here it meets the body that the engine would get, so it holds for
every dialect. Promises: a request is changed as its version says or refused by name (422, `slot_conflict`).
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from leyden.base.errors import RequestRefused
from leyden.base.prompts import Path, Slot, name_of, put, slots_from_json, substitute
from leyden.gateway.changes import Changes
from leyden.gateway.dialects import Body
from leyden.gateway.routing import Route
from leyden.store import aio, ledger
from leyden.store.base import Store

REWRITE = "prompt:"
"""Before the name of a slot, among the rewrites of a call."""


@dataclass(frozen=True, slots=True)
class Replaced:
    """What a prompt policy does to one request."""

    texts: dict[Path, str] = field(default_factory=dict)
    """The new text of every place that changes."""
    rewrites: list[str] = field(default_factory=list)
    """`prompt:SLOT` for each slot that changed something."""
    record: dict[str, Any] = field(default_factory=dict)
    """What is kept with the call; empty without a prompt policy."""

    def body(self, body: Body) -> Body:
        """The body as the engine reads it."""
        return put(body, self.texts) if self.texts else body


NOTHING = Replaced()
"""The version has no prompts."""


class Prompts:
    """The slots of policy versions."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._changes = Changes(store, ledger.TOPIC)
        self._known: dict[tuple[str, int], tuple[Slot, ...]] = {}
        self._seen = -1

    async def replace(self, route: Route, body: Callable[[], Body]) -> Replaced:
        """What the route's version does to the body for the engine, which is only made if there are prompts.

        Raises RequestRefused for a conflict of slots.
        """
        slots = await self._slots(route.policy, route.version)
        if not slots:
            return NOTHING
        found = substitute(body(), slots)
        if found.conflicts:
            raise RequestRefused(
                f"the prompts of {route.policy}@{route.version} do not fit this request: {'; '.join(found.conflicts)}",
                status=422,
                kind="slot_conflict",
                hint="make `original` of the slot longer or name its tool, so that it fits one text only",
            )
        return Replaced(
            texts=dict(found.texts),
            rewrites=[REWRITE + name for name in found.changed],
            record={
                "texts": {name_of(path): text for path, text in found.texts.items()},
                "filled": list(found.filled),
                "unmatched": list(found.unmatched),
            },
        )

    async def _slots(self, policy: str, version: int) -> tuple[Slot, ...]:
        changes = self._changes.count()
        if changes != self._seen:  # a version that was not registered may be by now
            self._known = {key: slots for key, slots in self._known.items() if slots}
            self._seen = changes
        known = self._known.get((policy, version))
        if known is None:
            tree = await aio.read(self._store, lambda c: ledger.prompts_of(c, policy, version))
            known = self._known[policy, version] = slots_from_json(tree)
            while len(self._known) > 1000:  # versions go by, so they must not pile up
                del self._known[next(iter(self._known))]
        return known

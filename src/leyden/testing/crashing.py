"""A gateway that kills itself at a chosen point of a call, for tests of what a crash leaves behind.

    echo '{"folder": ".", "engine": "http://...", "port": 0, "point": "record:after", "call": 2}' |
        python -m leyden.testing.crashing

prints its URL and process id, and dies by SIGKILL once its second model call has passed the phase `record`. The product
has no hook for this: the phases of `leyden.gateway.forward` are wrapped from outside.
"""

import functools
import json
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

from leyden.base.config import from_tree
from leyden.base.records import new_id
from leyden.gateway import forward, ledger, serve
from leyden.store import open_store

PHASES = ("identify", "translate", "choose", "_write_intent", "send", "record", "answer")
"""Functions of `forward`, in the order in which a call passes them."""


def crash_at(phase: str, when: str, number: int) -> None:
    """Die before or after the `number`-th call passes `phase`."""
    assert phase in PHASES and when in ("before", "after"), (phase, when)
    inner: Callable[..., Awaitable[Any]] = getattr(forward, phase)
    passed = 0

    @functools.wraps(inner)
    async def wrapped(*arguments: Any) -> Any:
        nonlocal passed
        passed += 1
        mine = passed == number
        if mine and when == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        result = await inner(*arguments)
        if mine:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(forward, phase, wrapped)


def serve_once(order: Mapping[str, Any]) -> None:
    """Serve until killed or stopped."""
    if order["point"]:
        phase, _, when = order["point"].partition(":")
        crash_at(phase, when, order["call"])
    folder = Path(order["folder"])
    tree = {
        "policies": {"main": {"engine": order["engine"]}},
        "gateway": {"port": order["port"], "probe_at_start": False, "shutdown_timeout_s": 1.5},
    }
    store = open_store(f"sqlite:///{folder / 'leyden.db'}")
    try:
        serve(
            from_tree(tree, base_dir=folder), store,
            on_ready=lambda where: print(json.dumps({"url": where.url, "pid": os.getpid()}), flush=True),
        )  # fmt: skip
    finally:
        store.close()


def main() -> None:
    """One gateway per line of standard input, one after another: forked, so that each starts in an instant."""
    for line in sys.stdin:
        child = os.fork()  # no thread runs here, and the store is opened by the child
        if child == 0:
            ledger.CALL_IDS = new_id("call") + "_"  # made when the module was imported, before the fork
            try:
                serve_once(json.loads(line))
            finally:
                os._exit(1 if sys.exc_info()[0] is not None else 0)
        _, status = os.waitpid(child, 0)
        print(json.dumps({"code": os.waitstatus_to_exitcode(status)}), flush=True)


if __name__ == "__main__":
    main()

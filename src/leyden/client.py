"""What a harness author may import: `reward()`, `span()` and `task()`. Standard library only.

None of it is needed: a harness that only calls its model API is complete. Everything here works inside an
attempt, where Leyden's runner has set the environment, and raises `OutsideAttempt` elsewhere.
"""

import json
import os
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

TIMEOUT_S = 30.0
"""Longest wait for the gateway; recording is local work, so this is far above what it takes."""


class OutsideAttempt(RuntimeError):
    """This process was not started by Leyden's runner."""


class Refused(RuntimeError):
    """The gateway refused what was sent, or could not be reached."""


def task() -> dict[str, Any]:
    """The task of this attempt: `id`, `split`, `domain` and `input`."""
    path = os.environ.get("LEYDEN_TASK_FILE")
    text = Path(path).read_text(encoding="utf-8") if path else _env("LEYDEN_TASK")
    value: dict[str, Any] = json.loads(text)
    return value


def reward(value: float, name: str = "reward", call_id: str | None = None) -> None:
    """Post one named number for this attempt, or for one of its calls.

    Refused (`Refused`) unless the configuration says `rewards.from_agent = true`, and for anything but a
    finite number. `call_id` is the `x-leyden-call` header of the answer that is rewarded.
    """
    body: dict[str, Any] = {"name": name, "value": value}
    if call_id is not None:
        body["call_id"] = call_id
    _post("rewards", body)


def span(name: str, **attributes: Any) -> None:
    """Record something that happened in this attempt, for example the use of a tool."""
    now = time.time()
    _post("spans", {"name": name, "attributes": attributes, "started_at": now, "ended_at": now})


def _env(name: str) -> str:
    value = os.environ.get(name)
    if not value:
        raise OutsideAttempt(
            f"{name} is not set: leyden.client works in a process that Leyden's runner started; "
            "start the harness with `leyden run` or `leyden train`"
        )
    return value


def _post(what: str, body: dict[str, Any]) -> None:
    rollout, attempt, key = _env("LEYDEN_ROLLOUT"), _env("LEYDEN_ATTEMPT"), _env("AGL_KEY")
    gateway = _env("AGL_EVENT_URL").split("/api/rollouts/")[0]
    request = urllib.request.Request(
        f"{gateway}/api/rollouts/{rollout}/attempts/{attempt}/{what}",
        data=json.dumps(body).encode(),
        headers={"content-type": "application/json", "authorization": f"Bearer {key}"},
        method="POST",
    )
    # The gateway is near; a proxy for the outside world must not come between.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=TIMEOUT_S):
            pass
    except urllib.error.HTTPError as error:
        detail = error.read().decode(errors="replace")[:1000]
        error.close()
        raise Refused(f"the gateway answered {error.code} to {what} {body!r}: {detail}") from None
    except OSError as error:
        raise Refused(f"no gateway at {gateway}: {error}") from None

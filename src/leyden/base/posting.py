"""One POST of JSON, for code that is no agent and not on the road of a call: bounded, and nothing raised.

An answer of any status is an answer; whoever asked decides what it means. Addresses of this machine are asked
directly: a proxy for the outside world must not come between a process and its own gateway.
"""

import ipaddress
import json
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """What came back."""

    status: int | None
    """HTTP status; None when there was no answer."""
    body: bytes
    """Its body, or why there is none."""

    def tree(self) -> Any:
        """The body read as JSON; None when it is none."""
        try:
            return json.loads(self.body)
        except ValueError:
            return None

    def text(self) -> str | None:
        """What a model said in an answer of Chat Completions; None when it is none."""
        try:
            said = self.tree()["choices"][0]["message"]["content"]
        except (LookupError, TypeError):
            return None
        return said if isinstance(said, str) else None

    def __str__(self) -> str:
        """For a message: status and the beginning of the body."""
        said = self.body[:300].decode("utf-8", "replace")
        return f"no answer ({said})" if self.status is None else f"status {self.status}: {said}"


def post(url: str, body: Mapping[str, Any], *, key: str = "", timeout_s: float) -> Answered:
    """POST `body`; `timeout_s` bounds each wait of the connection."""
    headers = {"content-type": "application/json"}
    if key:
        headers["authorization"] = f"Bearer {key}"
    handlers = [urllib.request.ProxyHandler({})] if _is_near(url) else []
    try:
        request = urllib.request.Request(url, json.dumps(body).encode(), headers, method="POST")
        with urllib.request.build_opener(*handlers).open(request, timeout=timeout_s) as answer:
            return Answered(status=answer.status, body=answer.read())
    except urllib.error.HTTPError as error:
        with error:
            return Answered(status=error.code, body=error.read())
    except (OSError, ValueError) as error:
        return Answered(status=None, body=str(error).encode())


def _is_near(url: str) -> bool:
    try:
        host = urlsplit(url).hostname or ""
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False

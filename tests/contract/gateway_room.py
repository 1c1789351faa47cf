"""A gateway with a fake engine and a real SQLite store, for the contract tests of the gateway."""

import json
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai

from leyden.base.config import from_tree
from leyden.base.records import Call, Trace
from leyden.gateway import Listening
from leyden.store import open_store
from leyden.store.base import Store
from leyden.testing.fake_engine import FakeEngine
from leyden.testing.running import Started, running_gateway, start_attempt
from leyden.traces.reader import Reader

HELLO: list[Any] = [{"role": "user", "content": "hi"}]


@dataclass(slots=True)
class Room:
    """Everything a test of the gateway needs."""

    engine: FakeEngine
    store: Store
    gateway: Listening

    @property
    def url(self) -> str:
        return self.gateway.url

    def start(self, **fields: Any) -> Started:
        return start_attempt(self.store, **fields)

    def sdk(self, started: Started, *, max_retries: int = 0, **options: Any) -> openai.OpenAI:
        base_url = started.base_url(self.url)
        return openai.OpenAI(base_url=base_url, api_key=started.token, max_retries=max_retries, **options)

    def trace(self, started: Started) -> Trace:
        return Reader(self.store).trace(started.rollout.id)

    def calls(self, started: Started) -> list[Call]:
        return list(self.trace(started).calls)

    def chat(self, started: Started, body: Mapping[str, Any], **headers: str) -> "Answer":
        return self.request("POST", started.base_url("") + "/chat/completions", body, key=started.token, **headers)

    def admin(self, method: str, path: str, body: Any = None) -> "Answer":
        return self.request(method, path, body, key=self.gateway.admin_key)

    def request(self, method: str, path: str, body: Any = None, *, key: str | None = None, **headers: str) -> "Answer":
        data = body if isinstance(body, bytes) else None if body is None else json.dumps(body).encode()
        sent = {
            "content-type": "application/json",
            **{name.replace("_", "-"): value for name, value in headers.items()},
        }
        if key is not None:
            sent["authorization"] = f"Bearer {key}"
        request = urllib.request.Request(self.url + path, data, sent, method=method)
        try:
            with urllib.request.urlopen(request, timeout=30) as response:
                return Answer(response.status, dict(response.headers), response.read())
        except urllib.error.HTTPError as error:
            with error:
                return Answer(error.code, dict(error.headers), error.read())


@dataclass(frozen=True, slots=True)
class Answer:
    """What came back."""

    status: int
    headers: dict[str, str]
    raw: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.raw)

    @property
    def error(self) -> Any:
        return self.json["error"]


@contextmanager
def gateway_room(tmp_path: Path, tree: Mapping[str, Any] | None = None) -> Iterator[Room]:
    """A room; `tree` replaces sections of the configuration, policy `main` is at the fake engine unless it
    says otherwise."""
    with ExitStack() as stack:
        engine = stack.enter_context(FakeEngine())
        store = open_store(f"sqlite:///{tmp_path / 'leyden.db'}")
        stack.callback(store.close)
        merged: dict[str, Any] = {"policies": {"main": {"engine": engine.url}}}
        merged.update(tree or {})
        if "policies" in (tree or {}):
            for policy in merged["policies"].values():
                policy.setdefault("engine", engine.url)
        config = from_tree(merged, base_dir=tmp_path)
        yield Room(engine, store, stack.enter_context(running_gateway(config, store)))

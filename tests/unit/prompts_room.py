"""A prompt run without child processes: the real loop, store, gateway and a harness that calls over HTTP.

The engine is scripted: it solves a task when its system message holds the instruction (or demonstration) that the task
needs, so the best prompt is known. `Room.house` is a run; its services run queued rollouts as soon as they are checked.
"""

import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from leyden.base.config import Config, from_tree
from leyden.base.prompt_file import write_slots
from leyden.base.prompts import Slot, make_slot
from leyden.base.records import Attempt, Outcome, PolicyVersion, Reward, Rollout, RolloutState, Task
from leyden.base.tasks import Demo
from leyden.gateway.app import Listening
from leyden.house import House, Learner
from leyden.learning.backends.external import ExternalBackend
from leyden.store import Store, attempts, ledger, open_store, queue, selections
from leyden.testing.fake_engine import FakeEngine
from leyden.testing.running import running_gateway
from leyden.testing.scripted import Reply
from leyden.traces.recorder import Recorder

SYSTEM = "You are an assistant."
BOUND_S = 20.0
PRICE = {"input": 1.0, "output": 2.0}
"""Of the reflection model, in USD per million tokens."""


class Said:
    """Remembers what the loop said."""

    def __init__(self) -> None:
        self.sentences: list[str] = []
        self.rows: list[Mapping[str, Any]] = []

    def say(self, text: str) -> None:
        self.sentences.append(text)

    def begin(self, phase: str, total: int) -> None:
        pass

    def advance(self, done: int, note: str = "") -> None:
        pass

    def end(self) -> None:
        pass

    def metrics(self, row: Mapping[str, Any]) -> None:
        self.rows.append(row)


def tasks(split: Any, count: int, start: int = 0) -> list[Task]:
    """Ask for a word in capitals."""
    words = [f"word{chr(97 + i)}" for i in range(start, start + count)]
    return [Task(id=f"{split}-{word}", split=split, input={"word": word}, answer=word.upper()) for word in words]


Solve = Callable[[str, str], str]
"""(system message, word) to the model's answer."""


def needs(instruction: str) -> Solve:
    """Right when the system message holds the instruction."""
    return lambda system, word: word.upper() if instruction in system else word


class Harness:
    """Runs queued rollouts by calling the gateway: a system message in its source, the word as the user's."""

    def __init__(self, store: Store, gateway: Listening, system: str) -> None:
        self.played: list[Rollout] = []
        self.system = system
        self._store, self._gateway = store, gateway
        self._recorder = Recorder(store)

    def check(self) -> None:
        for rollout in self._store.read(lambda c: selections.select_by_state(c, [RolloutState.QUEUING], 10_000)):
            self._run(rollout)
            self.played.append(rollout)

    async def hold(self) -> None:
        raise AssertionError("prompts move no weights, so nothing is held")

    async def resume(self) -> None:
        raise AssertionError

    def _run(self, rollout: Rollout) -> None:
        now = time.time()
        attempt, token = self._store.write(
            lambda c: queue.start_attempt(c, self._store, rollout.id, "test", now)
        ).result(BOUND_S)
        said = self._ask(rollout, token)
        reward = float(said == rollout.task.answer)
        self._recorder.rewards(rollout.id, attempt.id, [Reward(name="right", value=reward)]).result(BOUND_S)

        def end(connection: Any) -> None:
            ended = Attempt(
                id=attempt.id, rollout_id=rollout.id, number=1, started_at=now, ended_at=time.time(),
                outcome=Outcome.COMPLETED, duration_s=0.0, detail=said,
            )  # fmt: skip
            attempts.end_attempt(connection, self._store, ended)
            queue.finish(
                connection, self._store, rollout.id, state=RolloutState.SUCCEEDED, outcome=Outcome.COMPLETED,
                reward=reward, error_message=None, now=time.time(),
            )  # fmt: skip

        self._store.write(end).result(BOUND_S)

    def _ask(self, rollout: Rollout, token: str) -> str:
        messages = [{"role": "system", "content": self.system}, {"role": "user", "content": rollout.task.input["word"]}]
        body = json.dumps({"model": "main", "messages": messages}).encode()
        headers = {"authorization": f"Bearer {token}", "content-type": "application/json"}
        request = urllib.request.Request(self._gateway.url + "/v1/chat/completions", body, headers)
        try:
            with urllib.request.urlopen(request, timeout=BOUND_S) as answer:
                return str(json.load(answer)["choices"][0]["message"]["content"])
        except urllib.error.HTTPError as error:
            with error:
                return error.read().decode()


class ScriptedReflection:
    """Says what a function of the prompt says, over HTTP: it is a fake engine of its own."""

    def __init__(self, engine: FakeEngine) -> None:
        self.engine = engine

    @property
    def asked(self) -> list[str]:
        return [request["messages"][-1]["content"] for request in self.engine.requests]

    def answers(self, reply: Callable[[str], str]) -> None:
        self.engine.behaviour.reply = lambda body: Reply(text=reply(body["messages"][-1]["content"]))


@dataclass(kw_only=True)
class Room:
    """What a test needs."""

    folder: Path
    store: Store
    engine: FakeEngine
    reflection: ScriptedReflection
    system: str = SYSTEM
    slots: Sequence[Slot] = field(default_factory=lambda: [make_slot("system", SYSTEM)])

    def config(self, algorithm: str, **prompts: Any) -> Config:
        """A configuration with the scripted engine and reflection model."""
        tree = {
            "learn": {"algorithm": algorithm, "step_timeout_s": 60},
            "policies": {
                "main": {"engine": self.engine.url, "trainable": False},
                "bare": {"model": "none"},
                "thinker": {"engine": self.reflection.engine.url, "trainable": False, "usd_per_million": PRICE},
            },
            "prompts": {
                "slots": str(self.folder / "prompts.toml"),
                "reflection": "thinker",
                "reflection_backoff_s": 0.01,
                **prompts,
            },
            "eval": {"resamples": 200},
        }
        return from_tree(tree, base_dir=self.folder)

    @contextmanager
    def house(
        self, config: Config, run_id: str = "run-1", demos: Sequence[Demo] = (), **fields: Any
    ) -> Iterator[House]:
        """A run that is new, or goes on where one of the same name stood."""
        write_slots(self.folder / "prompts.toml", self.slots)
        (self.folder / run_id).mkdir(exist_ok=True)
        known = self.store.read(lambda c: [v for v in ledger.policy_versions(c, "main") if v.run_id == run_id])
        if not known:
            self.store.write(lambda c: ledger.add_run(c, self.store, run_id, {}, {})).result(BOUND_S)
            base = PolicyVersion(policy="main", version=0, run_id=run_id)
            self.store.write(lambda c: ledger.add_policy_version(c, self.store, base, stage="base")).result(BOUND_S)
        with running_gateway(config, self.store) as gateway:
            values: dict[str, Any] = {
                "train_tasks": tasks("train", 6), "val_tasks": tasks("val", 6, 6),
                "holdout_tasks": tasks("holdout", 8, 12), **fields,
            }  # fmt: skip
            yield House(
                learners=[Learner(config=config, backend=ExternalBackend("main", self.engine.url, ""), demos=demos)],
                run_id=run_id, folder=self.folder / run_id, store=self.store,
                services=Harness(self.store, gateway, self.system), progress=Said(), **values,
            )  # fmt: skip

    def solves(self, solve: Solve) -> None:
        """What the policy's model can do."""

        def reply(body: Mapping[str, Any]) -> Reply:
            system = next((m["content"] for m in body["messages"] if m["role"] == "system"), "")
            return Reply(text=solve(system, body["messages"][-1]["content"]))

        self.engine.behaviour.reply = reply


@contextmanager
def prompts_room(folder: Path) -> Iterator[Room]:
    """A room with two scripted engines: the policy's, and the reflection model's."""
    with FakeEngine() as engine, FakeEngine() as thinker:
        store = open_store(f"sqlite:///{folder / 'leyden.db'}")
        try:
            yield Room(folder=folder, store=store, engine=engine, reflection=ScriptedReflection(thinker))
        finally:
            store.close()

"""The one place that builds rooms and puts them together. Verbs call it; rooms never do.

A run is four processes: this one holds the loop and the backend; the gateway and the runner are children
(`processes.Child`); the harness of each attempt is a child of the runner. They meet in the store.
"""

import asyncio
import os
import platform
import re
import secrets
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import leyden
from leyden.base import several
from leyden.base.config import EMBEDDED_KEY_ENV, Config, dump
from leyden.base.errors import ConfigError, Interrupted, LearningError, TaskError
from leyden.base.posting import post
from leyden.base.records import Task
from leyden.base.tasks import Demo, check_splits, load_demos, load_tasks
from leyden.cli.backends import backends_of, learners_of, policy_of
from leyden.cli.external import is_external
from leyden.cli.holdouts import refuse_leaks
from leyden.cli.processes import Child
from leyden.cli.registering import Standing, register, take_up
from leyden.house import House, Progress, sft_steps
from leyden.learning import algorithms
from leyden.learning.shaping import check_sampling
from leyden.store import open_store, queue
from leyden.store.base import Store

ENGINE_KEY_ENV = EMBEDDED_KEY_ENV
"""Variable in which the gateway process finds the key of the embedded sampler."""


Tasks = tuple[list[Task], list[Task], list[Task], list[Demo]]
"""Train, val and holdout tasks, and demonstrations."""


def store_of(config: Config, *, create: bool = True) -> Store:
    """The store that the configuration names; a relative SQLite path is relative to the configuration file."""
    url = config.store.url
    prefix = "sqlite:///"
    if url.startswith(prefix) and not url.startswith("sqlite:////"):
        url = f"{prefix}{config.resolve(url.removeprefix(prefix))}"
    return open_store(url, synchronous=config.store.synchronous, create=create)


def tasks_of(config: Config) -> Tasks:
    """(train, val, holdout, demonstrations) as the configuration names them; those not named are empty."""

    def read(path: str, split: Any) -> list[Task]:
        return load_tasks(config.resolve(path), split=split) if path else []

    train = read(config.tasks.train, "train")
    val = read(config.tasks.val, "val")
    held = read(config.tasks.holdout, "holdout")
    for a, b in ((train, held), (val, held)):
        if a and b:
            check_splits(a, b)
    demos = _demos_of(config)
    refuse_leaks(config, [*train, *val], held, demos)
    if config.eval.max_tasks:
        val, held = val[: config.eval.max_tasks], held[: config.eval.max_tasks]
    return train, val, held, demos


def _demos_of(config: Config) -> list[Demo]:
    """Those of the configuration, each for one policy where this run learns from them."""
    path = config.tasks.demos
    learned = config.sft is not None or config.learn.improves_prompts
    demos = load_demos(config.resolve(path), config.trained if learned else ()) if path else []
    if config.sft and not demos:
        raise ConfigError("[sft] needs demonstrations; set tasks.demos, or remove the section")
    shown = {demo.policy for demo in demos}
    for name, policy in config.policies.items():
        if policy.sft and name not in shown:
            raise ConfigError(f"policies.{name}.sft would do nothing: no line of {path} is for {name!r}; remove it")
    return demos


def versions() -> dict[str, str]:
    """What a result was made with."""
    from importlib import metadata

    found = {"leyden": leyden.__version__, "python": platform.python_version(), "machine": platform.machine()}
    for name in ("torch", "transformers", "peft", "numpy", "openai", "aiohttp", "uvicorn"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


class GatewayClient:
    """The administrator's side of the gateway, for the loop."""

    def __init__(self, url: str, key: str) -> None:
        self.url = url
        self._key = key

    def post(self, path: str, body: Mapping[str, Any], timeout_s: float = 30.0) -> dict[str, Any]:
        """POST JSON. Raises LearningError with what the gateway said."""
        answer = post(self.url + path, body, key=self._key, timeout_s=timeout_s)
        if answer.status is None or answer.status >= 400:
            raise LearningError(f"the gateway at {self.url} did not do POST {path}: {answer}")
        return answer.tree() or {}


class LocalServices:
    """Gateway and runner of one run on this machine."""

    def __init__(
        self, config: Config, store: Store, folder: Path, run_id: str, engines: Mapping[str, str], engine_key: str
    ) -> None:
        """`config` with the engines of policies replaced by those of this process is what the children read."""
        key_env = ENGINE_KEY_ENV if engine_key else ""
        changed = {
            policy: config.policies[policy].model_copy(update={"engine": url, "engine_key_env": key_env})
            for policy, url in engines.items()
        }
        served = config.model_copy(update={"policies": {**config.policies, **changed}})
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "served.json"
        path.write_text(dump(served), encoding="utf-8")
        self.admin_key = os.environ.get(config.gateway.admin_key_env) or f"ley-admin-{secrets.token_urlsafe(24)}"
        env = {**os.environ, config.gateway.admin_key_env: self.admin_key, ENGINE_KEY_ENV: engine_key}
        logs = folder / "logs"
        self.gateway = Child("gateway", ["serve", "--config", str(path)], logs, env)
        self._runner_arguments = ["run", "--config", str(path), "--worker", "--run", run_id]
        runner_env = {k: v for k, v in env.items() if k not in (config.gateway.admin_key_env, ENGINE_KEY_ENV)}
        self.runner = Child("runner", self._runner_arguments, logs, runner_env)
        self._config = config
        self._store = store
        self._run_id = run_id

    def start(self) -> None:
        """The gateway. The runner, which tells harnesses its address, starts when somebody waits for a rollout."""
        facts = self.gateway.start()
        self.client = GatewayClient(facts["url"], self.admin_key)

    def check(self) -> None:
        """Restart what died; the gateway comes back on the port it had, so harnesses find it again."""
        self._check_gateway()
        if not self.runner.facts:
            self.runner.start(["--gateway", self.client.url])
        elif self.runner.check(["--gateway", self.client.url]):
            # The one that died holds leases, and nobody need wait until they are over.
            owner = self.runner.facts["owner"]
            self._store.write(
                lambda connection: queue.expire_leases(connection, self._store, self._run_id, keep=owner)
            ).result(30)

    def _check_gateway(self) -> bool:
        port = self.client.url.rpartition(":")[2]
        return self.gateway.check(["--set", f"gateway.port={port}"])

    async def _ask(self, path: str, body: Mapping[str, Any], timeout_s: float = 30.0) -> None:
        """POST to the gateway; once more if it had died and was replaced. No rollout is open then: none is lost."""
        try:
            await asyncio.to_thread(self.client.post, path, body, timeout_s)
        except LearningError:
            await asyncio.sleep(1.0)  # its end may be seen a moment after its sockets are gone
            if not self._check_gateway():
                raise
            await asyncio.to_thread(self.client.post, path, body, timeout_s)

    async def hold(self) -> None:
        """New calls wait; calls in flight have ended, or were aborted at the drain limit, when this returns."""
        limit_s = self._config.gateway.drain_timeout_s
        await self._ask("/proxy/pause", {"reason": "weight update"})
        await self._ask("/proxy/drain", {"timeout_s": limit_s}, limit_s + 30)

    async def resume(self) -> None:
        """Calls go on."""
        await self._ask("/proxy/resume", {})

    def stop(self) -> None:
        """The runner first, so that no attempt sees its gateway vanish."""
        self.runner.stop()
        self.gateway.stop()


@dataclass
class StopSignal:
    """Ctrl-C and SIGTERM, seen between two units of work; a second one ends the process at once."""

    requested: bool = False
    on_first: Callable[[], None] = field(default=lambda: None)

    def check(self) -> None:
        """Raises Interrupted once somebody asked."""
        if self.requested:
            raise Interrupted("stopped as asked; everything recorded stays, `--resume` goes on from here")

    def install(self) -> None:
        """Take SIGINT and SIGTERM."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._handle)

    def _handle(self, number: int, frame: object) -> None:
        if self.requested:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        self.requested = True
        self.on_first()


def new_run_id(config: Config, training: bool = True) -> str:
    """A readable name that sorts by time."""
    what = re.sub(r"[^A-Za-z0-9_]+", "-", config.learn.algorithm.rpartition("/")[2]) if training else "eval"
    return f"{time.strftime('%Y%m%d-%H%M%S')}-{what}-{secrets.token_hex(2)}"


@contextmanager
def open_house(
    config: Config,
    progress: Progress,
    *,
    resume: Path | None = None,
    stop: StopSignal | None = None,
    training: bool = True,
    tasks: Tasks | None = None,
) -> Iterator[House]:
    """A house ready for `loop.improve`: model loaded, gateway and runner up. Everything is ended on the way out.

    `tasks` are those of the configuration where they were read already. With `training=False` nothing is registered
    as a run that made versions: it can only evaluate.
    """
    from leyden.rewards.verifiers import check_verifier
    from leyden.runner.lease import check_harness

    if config.run.dir == "":
        raise ConfigError("run.dir is empty; name a folder for runs, for example runs")
    policy_of(config, config.learn.policy)
    several.refuse(config)
    train, val, held, demos = tasks or tasks_of(config)
    if training and config.learn.steps and not train:
        raise TaskError("there is nothing to learn from: set tasks.train, or learn.steps=0")
    if training and not held:
        progress.say("No holdout tasks (tasks.holdout): the run can learn, but it cannot prove a gain.")
    if training:
        for name in config.trained:
            check_sampling(config.of(name))
            algorithms.make(config.of(name).learn, config.base_dir)
    check_harness(config)
    check_verifier(config, [*train, *val, *held])
    policy = config.learn.policy
    store = store_of(config)
    run_id = resume.name if resume else new_run_id(config, training)
    folder = resume or config.resolve(config.run.dir) / run_id
    backends = services = None
    standing = Standing()
    try:
        here = [name for name in (*config.trained, *config.frozen) if not is_external(config, name)]
        for model in dict.fromkeys(config.policies[name].model for name in here):
            progress.say(f"Loading {model} ...")
        backends = backends_of(config)
        folder.mkdir(parents=True, exist_ok=True)
        learners = learners_of(config, backends, demos, training=training)
        if training:
            num_sft = sft_steps(learners)
            standing = register(config, store, run_id, folder, num_sft, resume is not None, versions())
            learners = take_up(learners, standing, folder)
        engines = backends.start()
        services = LocalServices(config, store, folder, run_id, engines, backends.engine_key)
        services.start()
        yield House(
            learners=learners,
            run_id=run_id,
            folder=folder,
            store=store,
            services=services,
            progress=progress,
            train_tasks=train,
            holdout_tasks=held,
            val_tasks=val,
            engine_url=engines.get(policy, config.policies[policy].engine),
            frozen=tuple(backends.frozen),
            done_steps=standing.done_steps,
            sft_done=standing.sft_done,
            stop_requested=stop.check if stop else lambda: None,
        )
    finally:
        if services:
            services.stop()
        if backends:
            backends.close()
        store.close()


def raise_open_files() -> None:
    """Hundreds of connections need more than the customary 1,024 descriptors."""
    if sys.platform != "win32":
        import resource

        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, 65536)), hard))

"""The one place that builds rooms and puts them together. Verbs call it; rooms never do.

A run is four processes: this one holds the loop and the backend; the gateway and the runner are children
(`processes.Child`); the harness of each attempt is a child of the runner. They meet in the store.
"""

import asyncio
import json
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

from sqlalchemy import Connection

import leyden
from leyden.base.config import EMBEDDED_KEY_ENV, Config, PolicyConfig, dump
from leyden.base.errors import ConfigError, Interrupted, LearningError, TaskError
from leyden.base.posting import post
from leyden.base.records import PolicyVersion, Task
from leyden.base.tasks import Demo, check_splits, load_demos, load_tasks
from leyden.cli.external import external_backend, is_external
from leyden.cli.holdouts import refuse_leaks
from leyden.cli.processes import Child
from leyden.cli.teachers import teacher_of
from leyden.house import House, Progress, sft_steps
from leyden.learning import algorithms
from leyden.learning.shaping import check_sampling
from leyden.store import ledger, numbering, open_store, queue
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


def policy_of(config: Config, name: str) -> PolicyConfig:
    """The section of a policy. Raises ConfigError when there is none."""
    if name not in config.policies:
        known = ", ".join(sorted(config.policies)) or "none"
        raise ConfigError(f"no section [policies.{name}] (known: {known}); add one with `model = ...`")
    return config.policies[name]


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
    demos = load_demos(config.resolve(config.tasks.demos)) if config.tasks.demos else []
    refuse_leaks(config, [*train, *val], held, demos)
    if config.sft and not demos:
        raise ConfigError("[sft] needs demonstrations; set tasks.demos, or remove the section")
    if config.eval.max_tasks:
        val, held = val[: config.eval.max_tasks], held[: config.eval.max_tasks]
    return train, val, held, demos


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
        self, config: Config, store: Store, folder: Path, run_id: str, engine_url: str, engine_key: str
    ) -> None:
        """`config` with the policy's engine replaced by the embedded sampler is what the children read."""
        policy = config.learn.policy
        key_env = ENGINE_KEY_ENV if engine_key else ""
        changed = config.policies[policy].model_copy(update={"engine": engine_url, "engine_key_env": key_env})
        served = config.model_copy(update={"policies": {**config.policies, policy: changed}})
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


def backend_of(config: Config, policy: str) -> Any:
    """The backend of a policy, not yet serving. Imports torch, unless somebody else serves the policy."""
    settings = policy_of(config, policy)
    if is_external(config, policy):
        return external_backend(policy, settings)
    if settings.provider:
        raise ConfigError(f"policies.{policy} is answered by provider {settings.provider!r}; it cannot be trained here")
    if not settings.model:
        raise ConfigError(f"policies.{policy}.model is empty; name a folder, a hub id or a GGUF file")
    try:
        from leyden.learning.backends.embedded.backend import EmbeddedBackend
    except ModuleNotFoundError as error:
        raise ConfigError(f"training needs {error.name}; install it with: pip install 'leyden[train]'") from error
    local = config.resolve(settings.model)
    template = str(config.resolve(settings.chat_template)) if settings.chat_template else ""
    resolved = settings.model_copy(
        update={"model": str(local) if local.exists() else settings.model, "chat_template": template}
    )
    return EmbeddedBackend(policy, resolved, config.learn, seed=config.run.seed)


def start_version(connection: Connection, store: Store, policy: str, run_id: str, model: str, num_versions: int) -> int:
    """The number of the version that a new run starts from: names are never reused, whatever ran before.

    The `num_versions` that the run may make after it are set aside, so a run that starts while this one is stopped
    does not take them.
    """
    number = numbering.next_version(connection, store, policy, num_after=num_versions)
    version = PolicyVersion(policy=policy, version=number, path=model, run_id=run_id, created_at=time.time())
    ledger.add_policy_version(connection, store, version, stage="base")
    return number


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
    train, val, held, demos = tasks or tasks_of(config)
    if training and config.learn.steps and not train:
        raise TaskError("there is nothing to learn from: set tasks.train, or learn.steps=0")
    if training and not held:
        progress.say("No holdout tasks (tasks.holdout): the run can learn, but it cannot prove a gain.")
    if training:
        check_sampling(config)
        algorithms.make(config.learn, config.base_dir)
    check_harness(config)
    check_verifier(config, [*train, *val, *held])
    policy = config.learn.policy
    store = store_of(config)
    run_id = resume.name if resume else new_run_id(config, training)
    folder = resume or config.resolve(config.run.dir) / run_id
    backend = services = None
    base, sft_done, done_steps = 0, False, 0
    try:
        if not is_external(config, policy):
            progress.say(f"Loading {config.policies[policy].model} ...")
        backend = backend_of(config, policy)
        teacher = teacher_of(config, backend) if training else None
        folder.mkdir(parents=True, exist_ok=True)
        if training:
            base, sft_done, done_steps = _register(config, store, run_id, folder, len(demos), resume is not None)
            version = base + (sft_steps(config, len(demos)) if sft_done else 0) + done_steps
            if version == base:
                backend.serve_as(base)
            else:
                backend.load(folder / "checkpoints" / f"{policy}@{version}", version, full=True)
        engine_url = backend.start()
        services = LocalServices(config, store, folder, run_id, engine_url, backend.engine_key)
        services.start()
        yield House(
            config=config,
            run_id=run_id,
            folder=folder,
            store=store,
            backend=backend,
            services=services,
            progress=progress,
            train_tasks=train,
            holdout_tasks=held,
            val_tasks=val,
            demos=demos,
            engine_url=engine_url,
            teacher=teacher,
            base_version=base,
            done_steps=done_steps,
            sft_done=sft_done,
            stop_requested=stop.check if stop else lambda: None,
        )
    finally:
        if services:
            services.stop()
        if backend:
            backend.close()
        store.close()


def load_version(house: House, number: int) -> None:
    """Make the backend hold a registered version. Raises ConfigError when its weights are gone."""
    if house.backend.version == number and number != 0:
        return
    known = {v.version: v for v in house.store.read(lambda c: ledger.policy_versions(c, house.policy))}
    path = known[number].path if number in known else None
    model = house.config.policies[house.policy].model
    if path is None or path == model:
        house.backend.load_base(number)
    elif Path(path).is_dir():
        house.backend.load(Path(path), number, full=False)
    else:
        raise ConfigError(f"the weights of {house.policy}@{number} are gone: {path} is no folder")


def _register(
    config: Config, store: Store, run_id: str, folder: Path, num_demos: int, resumed: bool
) -> tuple[int, bool, int]:
    """Write down a new run, or find where an old one stood: (base version, supervised stage done, steps done)."""
    policy = config.learn.policy
    if not resumed:
        (folder / "config.json").write_text(dump(config), encoding="utf-8")
        (folder / "versions.json").write_text(json.dumps(versions(), indent=2), encoding="utf-8")

        def start(connection: Connection) -> int:
            ledger.add_run(connection, store, run_id, json.loads(dump(config)), versions(), now=time.time())
            num_versions = 0 if config.learn.improves_prompts else sft_steps(config, num_demos) + config.learn.steps
            return start_version(connection, store, policy, run_id, config.policies[policy].model, num_versions)

        return store.write(start).result(30), False, 0

    def look(connection: Connection) -> list[PolicyVersion]:
        return [v for v in ledger.policy_versions(connection, policy) if v.run_id == run_id]

    mine = store.read(look)
    if not mine:
        raise ConfigError(f"run {run_id} is not in the store {store.url}; give the --config it was started with")
    base = min(v.version for v in mine)
    complete = [v for v in mine if v.version > base and _can_resume(folder / "checkpoints" / v.name)]
    latest = max((v.version for v in complete), default=base)
    imitated = sft_steps(config, num_demos)
    if latest == base:
        return base, False, 0
    return base, config.sft is not None, latest - base - imitated


def _can_resume(checkpoint: Path) -> bool:
    """Whether a checkpoint has the state of the optimizer; the manifest names it only while it is whole."""
    manifest = checkpoint / "leyden.json"
    return manifest.exists() and json.loads(manifest.read_text(encoding="utf-8")).get("num_steps") is not None


def raise_open_files() -> None:
    """Hundreds of connections need more than the customary 1,024 descriptors."""
    if sys.platform != "win32":
        import resource

        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, 65536)), hard))

"""`leyden serve`: the gateway alone, in front of an engine or of the embedded sampler."""

import json
import os
import secrets
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from leyden.base.config import Config
from leyden.base.errors import Conflict
from leyden.cli import wiring
from leyden.cli.processes import Child, die_with_parent, write_ready
from leyden.cli.verbs.options import DEFAULT_CONFIG, ConfigOption, JsonOption, ReadyFile, SetOption, read_config
from leyden.cli.workers import serve_as_worker, serve_with_workers
from leyden.store.base import Store

if TYPE_CHECKING:
    from leyden.gateway.app import Listening

HELP = "Serve the model API: relay and record calls. Needs no torch, unless it must start the embedded sampler."


def command(
    config: ConfigOption = DEFAULT_CONFIG,
    override: SetOption = None,
    version: str = typer.Option("", "--version-of", metavar="POLICY@N", help="Serve this policy version."),
    workers: int = typer.Option(1, "--workers", min=1, max=64, help="Processes that share the port."),
    service_key: str = typer.Option(
        "", "--service-key", metavar="NAME", help="Make a key for this service's live traffic, unless it has one."
    ),
    json_output: JsonOption = False,
    ready_file: ReadyFile = None,
    worker_of: str = typer.Option("", "--worker-of", hidden=True),
) -> None:
    """Run until Ctrl-C."""
    from leyden.gateway import journal
    from leyden.gateway.app import serve

    if ready_file:
        die_with_parent()
    wiring.raise_open_files()
    settings = read_config(config, override)
    journal.set_up(settings.gateway.log_format, settings.gateway.log_level)
    if worker_of:
        serve_as_worker(settings, worker_of, ready_file)
        return
    folder = settings.resolve(settings.run.dir) / "serve"
    engines: list[Child] = []
    store = wiring.store_of(settings)
    try:
        made = _service_key(store, service_key) if service_key else None
        settings = _with_engines(settings, config, override or [], folder, version, engines)

        def say(listening: "Listening") -> None:
            _say(settings, listening, json_output, ready_file, made)

        if workers == 1:
            serve(settings, store, on_ready=say)
        else:
            serve_with_workers(settings, store, folder, workers, say)
    finally:
        for child in engines:
            child.stop()
        store.close()


def _service_key(store: Store, name: str) -> str | None:
    """A fresh key of a service; None if it has one, which is nowhere but with the service."""
    from leyden.gateway.auth import add_service_key

    try:
        return store.write(lambda connection: add_service_key(connection, store, name)[1]).result(30)
    except Conflict:
        typer.echo(f"Service {name!r} has a key already; revoke it (DELETE /api/keys/ID) for a new one.", err=True)
        return None


def _say(
    settings: Config, listening: "Listening", json_output: bool, ready_file: Path | None, service_key: str | None
) -> None:
    """Where it listens and with which administrator's key, for a parent process, a program, or a person."""
    if ready_file:
        write_ready(ready_file, {"url": listening.url, "pid": os.getpid()})
        return
    made = settings.gateway.admin_key_env not in os.environ
    if json_output:
        facts = {"url": listening.url, "admin_key": listening.admin_key if made else None}
        print(json.dumps({**facts, **({"service_key": service_key} if service_key else {})}), flush=True)
        return
    typer.echo(f"Leyden gateway on {listening.url}  (OpenAI base URL: {listening.url}/v1)")
    if made:
        typer.echo(
            f"Administrator's key, made for this process (set {settings.gateway.admin_key_env} to keep one): "
            f"{listening.admin_key}"
        )
    if service_key:
        typer.echo(f"Service key, shown this once: {service_key}")


def _with_engines(
    settings: Config, path: Path, overrides: list[str], folder: Path, version: str, engines: list[Child]
) -> Config:
    """Start the embedded sampler, as a process of its own, for each policy without an engine."""
    policies = dict(settings.policies)
    for name, policy in settings.policies.items():
        if policy.engine or policy.provider:
            continue
        key = secrets.token_urlsafe(24)
        variable = f"{wiring.ENGINE_KEY_ENV}_{name.upper()}"
        arguments = ["engine", "--config", str(path.resolve()), "--policy", name]
        for item in overrides:
            arguments += ["--set", item]
        if version.startswith(f"{name}@"):
            arguments += ["--version-of", version]
        child = Child(f"engine-{name}", arguments, folder, {**os.environ, wiring.ENGINE_KEY_ENV: key})
        engines.append(child)
        typer.echo(f"Loading {policy.model} for policy {name!r} ...", err=True)
        facts = child.start()
        os.environ[variable] = key
        policies[name] = policy.model_copy(update={"engine": facts["url"], "engine_key_env": variable})
    return settings.model_copy(update={"policies": policies})

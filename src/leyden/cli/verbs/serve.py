"""`leyden serve`: the gateway alone, in front of an engine or of the embedded sampler."""

import json
import os
import secrets
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from leyden.base.config import Config
from leyden.cli import wiring
from leyden.cli.processes import Child, die_with_parent, write_ready
from leyden.cli.verbs.options import DEFAULT_CONFIG, ConfigOption, JsonOption, ReadyFile, SetOption, read_config

if TYPE_CHECKING:
    from leyden.gateway.app import Listening

HELP = "Serve the model API: relay and record calls. Needs no torch, unless it must start the embedded sampler."


def command(
    config: ConfigOption = DEFAULT_CONFIG,
    override: SetOption = None,
    version: str = typer.Option("", "--version-of", metavar="POLICY@N", help="Serve this policy version."),
    json_output: JsonOption = False,
    ready_file: ReadyFile = None,
) -> None:
    """Run until Ctrl-C."""
    from leyden.gateway.app import serve

    if ready_file:
        die_with_parent()
    wiring.raise_open_files()
    settings = read_config(config, override)
    folder = settings.resolve(settings.run.dir) / "serve"
    engines: list[Child] = []
    store = wiring.store_of(settings)
    try:
        settings = _with_engines(settings, config, override or [], folder, version, engines)
        serve(settings, store, on_ready=lambda listening: _say(settings, listening, json_output, ready_file))
    finally:
        for child in engines:
            child.stop()
        store.close()


def _say(settings: Config, listening: "Listening", json_output: bool, ready_file: Path | None) -> None:
    """Where it listens and with which administrator's key, for a parent process, a program, or a person."""
    if ready_file:
        write_ready(ready_file, {"url": listening.url, "pid": os.getpid()})
        return
    made = settings.gateway.admin_key_env not in os.environ
    if json_output:
        print(json.dumps({"url": listening.url, "admin_key": listening.admin_key if made else None}), flush=True)
        return
    typer.echo(f"Leyden gateway on {listening.url}  (OpenAI base URL: {listening.url}/v1)")
    if made:
        typer.echo(
            f"Administrator's key, made for this process (set {settings.gateway.admin_key_env} to keep one): "
            f"{listening.admin_key}"
        )


def _with_engines(
    settings: Config, path: Path, overrides: list[str], folder: Path, version: str, engines: list[Child]
) -> Config:
    """Start the embedded sampler, as a process of its own, for each policy without an engine."""
    policies = dict(settings.policies)
    for name, policy in settings.policies.items():
        if policy.engine:
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

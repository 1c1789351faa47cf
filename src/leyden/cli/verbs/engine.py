"""`leyden engine` (hidden): the embedded sampler as a process of its own, for `leyden serve`."""

import os
import signal
import threading
from pathlib import Path

import typer

from leyden.base.errors import ConfigError
from leyden.cli import wiring
from leyden.cli.backends import backend_of
from leyden.cli.processes import die_with_parent, write_ready
from leyden.cli.verbs.options import DEFAULT_CONFIG, ConfigOption, ReadyFile, SetOption, read_config
from leyden.store import ledger


def register(app: typer.Typer) -> None:
    """Add the verb without showing it: people start it through `leyden serve`."""
    app.command("engine", hidden=True)(command)


def command(
    config: ConfigOption = DEFAULT_CONFIG,
    override: SetOption = None,
    policy: str = typer.Option("main", "--policy"),
    version: str = typer.Option("", "--version-of"),
    ready_file: ReadyFile = None,
) -> None:
    """Serve one policy version until told to stop."""
    die_with_parent()
    settings = read_config(config, override)
    backend = backend_of(settings, policy)
    store = wiring.store_of(settings)
    try:
        serving = store.read(lambda connection: ledger.serving(connection, policy))
        number = int(version.rpartition("@")[2]) if version else (serving.version if serving else 0)
        known = {v.version: v for v in store.read(lambda c: ledger.policy_versions(c, policy))}
        if version and number not in known:
            raise ConfigError(f"no policy version {version}; known: {sorted(known)}")
        path = known[number].path if number in known else None
        if path and path != settings.policies[policy].model:
            backend.load(Path(path), number, full=False)
        else:
            backend.serve_as(number)
        backend.engine_key = os.environ[wiring.ENGINE_KEY_ENV]
        url = backend.start()
        write_ready(ready_file, {"url": url, "pid": os.getpid()})
        stop = threading.Event()
        for name in (signal.SIGINT, signal.SIGTERM):
            signal.signal(name, lambda *_: stop.set())
        while not stop.wait(1.0):
            pass
    finally:
        backend.close()
        store.close()

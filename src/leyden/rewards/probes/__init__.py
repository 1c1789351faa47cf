"""Ways to earn a reward without doing the task, and a road for your own (docs/probes.md).

The registry of built-in probes is closed; `own_probes` reads files of the user.
"""

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from leyden.base.config import Config
from leyden.base.errors import ConfigError
from leyden.rewards.probes import answers, inputs, tampering
from leyden.rewards.probes.base import Probe, Reply

BUILT_IN: Mapping[str, Probe] = {
    probe.name: probe for family in (answers, tampering, inputs) for probe in family.PROBES
}
"""By name, in the order in which they are shown."""


def probes_of(config: Config, only: Sequence[str] = (), *, quick: bool = False) -> list[Probe]:
    """The probes that a configuration asks for. Raises ConfigError for a name that there is not."""
    known = {**BUILT_IN}
    for name in config.probes.files:
        for probe in own_probes(config.resolve(name)):
            if probe.name in known:
                raise ConfigError(f"{name} has a probe {probe.name!r}, but that name is taken; choose another")
            known[probe.name] = probe
    for where, names in (
        ("probes.bounds", config.probes.bounds),
        ("probes.skip", config.probes.skip),
        ("--only", only),
    ):
        for name in names:
            if name not in known:
                raise ConfigError(f"{where}: there is no probe {name!r}; there are: {', '.join(known)}")
    chosen = [probe for probe in known.values() if not only or probe.name in only]
    return [p for p in chosen if p.name not in config.probes.skip and (p.quick or not quick)]


def own_probes(path: Path) -> list[Probe]:
    """Probes of a file: `PROBES = {name: function(task, messages) -> text}`. Raises ConfigError."""
    if not path.is_file():
        raise ConfigError(f"probes.files: no file {path}; paths are relative to the configuration")
    spec = importlib.util.spec_from_file_location(f"leyden_probes_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
        functions = dict(module.PROBES)
    except Exception as error:
        raise ConfigError(f"{path} cannot be used as a file of probes: {type(error).__name__}: {error}") from error
    found = []
    for name, function in functions.items():
        if not callable(function) or not str(name).isidentifier():
            raise ConfigError(f"{path}: PROBES[{name!r}] is no function under a name of letters, digits and '_'")
        says = ((function.__doc__ or "").strip().splitlines() or ["a probe of your own"])[0]
        found.append(Probe(name=str(name), says=says, quick=True, replies=(_own(function),)))
    return found


def _own(function: Callable[[Mapping[str, Any], Sequence[Mapping[str, Any]]], Any]) -> Reply:
    return lambda stage: str(function(stage.task, stage.messages))

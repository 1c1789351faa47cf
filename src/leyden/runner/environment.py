"""The environment of a harness (docs/your-agent.md) and the words that start it.

The answer of a task never appears here, and neither do our own keys.
"""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from leyden.base.command import Command, clean_environment, fill, has_placeholder, parse_command
from leyden.base.config import Config
from leyden.base.errors import HarnessError
from leyden.base.records import Attempt, Rollout, Task

MAX_TASK_BYTES = 64 * 1024
"""A larger task goes into a file: Linux allows 128 KiB per variable, and every child copies it."""
CALLABLE_MAIN = Path(__file__).with_name("callable_main.py")


@dataclass(frozen=True, slots=True, kw_only=True)
class Harness:
    """A checked harness."""

    command: Command
    """What is started."""
    path: Sequence[str]
    """First entries of `sys.path` in preloaded programs; empty without preload."""


def read_harness(config: Config) -> Harness:
    """The harness of a configuration. Raises HarnessError that names the command and what to change."""
    harness = config.harness
    folder = config.resolve(harness.cwd)
    if not folder.is_dir():
        raise HarnessError(f"harness.cwd = {harness.cwd!r}: no folder {folder}; mend the path")
    if harness.callable:
        command, script = _callable(harness.callable, folder)
    elif harness.command:
        command = parse_command(harness.command, folder)
        script = command.words[1] if len(command.words) > 1 else ""
    else:
        raise HarnessError('there is no harness; set harness.command, for example "python agent.py"')
    if not harness.preload:
        return Harness(command=command, path=())
    _check_preload(config, command)
    return Harness(command=command, path=(str(Path(script).parent),))


def preload_environment(config: Config) -> dict[str, str]:
    """Environment of the process that preloads: ours without keys, with the PYTHON* ones of `harness.env`."""
    env = clean_environment(config, os.environ)
    env.update({k: v for k, v in config.harness.env.items() if k.startswith("PYTHON")})
    return env


def build_environment(
    config: Config, gateway_url: str, rollout: Rollout, attempt: Attempt, token: str, workspace: Path
) -> dict[str, str]:
    """The whole environment of one attempt. HarnessError when `harness.env` asks for a missing field."""
    gateway = gateway_url.rstrip("/")
    base = _base(gateway, rollout, attempt)
    env = clean_environment(config, os.environ)
    _bypass_proxy(env, gateway)
    env.update(
        OPENAI_BASE_URL=openai_url(gateway, rollout, attempt),
        OPENAI_API_KEY=token,
        ANTHROPIC_BASE_URL=f"{base}/anthropic",
        ANTHROPIC_API_KEY=token,
        AGL_OPENAI_BASE_URL=f"{base}/openai/v1",
        AGL_EVENT_URL=f"{gateway}/api/rollouts/{rollout.id}/attempt/{attempt.id}/events",
        AGL_KEY=token,
        LEYDEN_ROLLOUT=rollout.id,
        LEYDEN_ATTEMPT=attempt.id,
        LEYDEN_SPLIT=rollout.task.split,
        LEYDEN_WORKSPACE=str(workspace),
    )
    if config.harness.telemetry:
        env.update(
            OTEL_EXPORTER_OTLP_TRACES_ENDPOINT=f"{base}/v1/traces",
            OTEL_EXPORTER_OTLP_TRACES_HEADERS=f"authorization=Bearer%20{token}",
            OTEL_EXPORTER_OTLP_TRACES_PROTOCOL="http/protobuf",
        )
    task = json.dumps(public_task(rollout.task), ensure_ascii=True)
    if len(task) <= MAX_TASK_BYTES:
        env["LEYDEN_TASK"] = task
    else:
        file = task_file(workspace)
        file.write_text(task, encoding="ascii")
        env["LEYDEN_TASK_FILE"] = str(file)
    for name, value in config.harness.env.items():
        env[name] = fill(value, rollout.task.input, f"harness.env.{name}")
    return env


def openai_url(gateway_url: str, rollout: Rollout, attempt: Attempt) -> str:
    """The OpenAI base URL of an attempt."""
    return f"{_base(gateway_url.rstrip('/'), rollout, attempt)}/openai/v1"


def _base(gateway: str, rollout: Rollout, attempt: Attempt) -> str:
    return f"{gateway}/proxy/rollout/{rollout.id}/attempt/{attempt.id}/mode/{rollout.mode}"


def public_task(task: Task) -> dict[str, Any]:
    """What a harness may know of a task."""
    return {"id": task.id, "split": task.split, "domain": task.domain, "input": dict(task.input)}


def task_file(workspace: Path) -> Path:
    """Where a large task is written: beside the workspace, so that it is no part of its state."""
    return workspace.with_name(workspace.name + ".task.json")


def _callable(value: str, folder: Path) -> tuple[Command, str]:
    file, _, function = value.rpartition(":")
    path = (folder / file).absolute()
    if not file.endswith(".py") or not function.isidentifier():
        raise HarnessError(f"harness.callable = {value!r} is not of the form file.py:function")
    if not path.is_file():
        raise HarnessError(f"harness.callable = {value!r}: no file {path}; relative paths are read from {folder}")
    words = parse_command("python", folder).words
    # -P: the folder of callable_main.py must not be on the path of the user's function.
    command = Command(template=value, words=(*words, "-P", str(CALLABLE_MAIN), str(path), function), shell=False)
    return command, str(path)


def _check_preload(config: Config, command: Command) -> None:
    harness = config.harness
    for name, value in harness.env.items():
        if name.startswith("PYTHON") and has_placeholder(value):
            raise HarnessError(
                f"harness.env.{name} depends on the task, but with harness.preload Python starts once "
                "for all; remove harness.preload or the variable"
            )
    if harness.callable:
        return
    words = command.words
    if (
        command.shell
        or len(words) < 2
        or words[0] != parse_command("python", Path(".")).words[0]
        or not Path(words[1]).is_file()
    ):
        raise HarnessError(
            f'harness.preload needs harness.command = "python FILE ..." or harness.callable; '
            f"{harness.command!r} is neither: remove harness.preload"
        )


def run_words(harness: Harness, task_input: Mapping[str, Any]) -> list[str]:
    """The words for one task; without interpreter options where the file is run in a preloaded process."""
    words = harness.command.argv(task_input)
    return [word for i, word in enumerate(words) if not (harness.path and i == 1 and word == "-P")]


def _bypass_proxy(env: dict[str, str], gateway: str) -> None:
    """A proxy for the outside world must not come between a harness and the gateway."""
    host = urlsplit(gateway).hostname or ""
    if any(name.lower() in ("http_proxy", "https_proxy", "all_proxy") for name in env):
        for name in ("no_proxy", "NO_PROXY"):
            env[name] = ",".join(part for part in (env.get(name, ""), host) if part)

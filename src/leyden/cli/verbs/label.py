"""`leyden label`: what people say about rollouts, from a file."""

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer
from rich.console import Console

from leyden.base.errors import NotFound, RecordError
from leyden.base.records import Reward, check_reward
from leyden.cli import wiring
from leyden.cli.verbs.options import DEFAULT_CONFIG, ConfigOption, JsonOption, SetOption, read_config
from leyden.store.base import Store
from leyden.traces.reader import Reader
from leyden.traces.recorder import Recorder

HELP = "Import labels that people gave to rollouts, to measure a verifier or a judge against."

KEYS = ("rollout", "call", "components")
"""Keys of a line."""


@dataclass(frozen=True, slots=True)
class Label:
    """One line of a file of labels."""

    rollout: str
    """Id of the rollout."""
    call: str | None
    """Id of one of its calls, for the label of a step."""
    components: Mapping[str, float]
    """Component to number."""


def command(
    file: Path = typer.Argument(
        ..., metavar="FILE", help='JSON Lines, each {"rollout": ID, "components": {NAME: NUMBER}, "call": optional ID}.'
    ),
    config: ConfigOption = DEFAULT_CONFIG,
    override: SetOption = None,
    json_output: JsonOption = False,
) -> None:
    """Record the labels with the last attempt of each rollout, as rewards of source `human`. All or nothing."""
    labels = read_labels(file)
    settings = read_config(config, override)
    store = wiring.store_of(settings, create=False)
    try:
        num = record(store, labels, str(file))
    finally:
        store.close()
    rollouts = len({label.rollout for label in labels})
    if json_output:
        print(json.dumps({"labels": num, "rollouts": rollouts}))
        return
    Console(highlight=False).print(f"{num} labels of {rollouts} rollouts recorded.", soft_wrap=True)


def read_labels(file: Path) -> list[Label]:
    """Every line, checked. Raises RecordError that names the file, the line and the field."""
    try:
        lines = file.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise RecordError(f"{file} cannot be read as UTF-8 text: {error}") from error
    labels = [_label(line, f"{file}, line {number}") for number, line in enumerate(lines, start=1) if line.strip()]
    if not labels:
        raise RecordError(f"{file} holds no label; write one JSON object per line")
    return labels


def record(store: Store, labels: Sequence[Label], where: str) -> int:
    """Record labels; the number of components. Raises RecordError for a rollout or a call that there is not."""
    try:
        traces = {t.rollout.id: t for t in Reader(store).traces(sorted({label.rollout for label in labels}))}
    except NotFound as error:
        raise RecordError(f"{where}: {error}; nothing was recorded") from None
    for label in labels:
        trace = traces[label.rollout]
        if trace.attempt.number == 0:
            raise RecordError(f"{where}: rollout {label.rollout} was never tried; nothing was recorded")
        if label.call and label.call not in {call.id for call in trace.calls}:
            raise RecordError(f"{where}: {label.call} is no call of rollout {label.rollout}; nothing was recorded")
    recorder, now = Recorder(store), time.time()
    num = 0
    for label in labels:
        rewards = [
            Reward(name=name, value=value, source="human", call_id=label.call, created_at=now)
            for name, value in label.components.items()
        ]
        recorder.rewards(label.rollout, traces[label.rollout].attempt.id, rewards).result(30)
        num += len(rewards)
    return num


def _label(line: str, where: str) -> Label:
    try:
        row: Any = json.loads(line)
    except ValueError as error:
        raise RecordError(f"{where}: not JSON ({error})") from None
    if not isinstance(row, dict) or not isinstance(row.get("rollout"), str):
        raise RecordError(f"{where}: give an object with the 'rollout' that the label is about")
    unknown = next((key for key in row if key not in KEYS), None)
    if unknown is not None:
        raise RecordError(f"{where}: unknown key {unknown!r}; known keys: {', '.join(KEYS)}")
    components = row.get("components")
    if not isinstance(components, dict) or not components:
        raise RecordError(f"{where}: 'components' is {components!r}; give an object of names and numbers")
    if row.get("call") is not None and not isinstance(row["call"], str):
        raise RecordError(f"{where}: 'call' is {row['call']!r}; give the id of a call, or leave it out")
    try:
        checked = {name: check_reward(name, value) for name, value in components.items()}
    except RecordError as error:
        raise RecordError(f"{where}: {error}") from None
    return Label(row["rollout"], row.get("call"), checked)

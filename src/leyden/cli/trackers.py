"""Metrics of a run: one JSON object per step in `metrics.jsonl`, and TensorBoard files where that is
installed.

Promises: a line is whole or not there; a step that is written again (a run that was resumed) replaces
itself and every later step of its stage, so no step stands twice; a line that a killed process left
half-written is removed. Does not flush to the platter: metrics can be made again, the store cannot.
"""

import importlib.util
import json
import math
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from leyden.base.errors import RecordError


class MetricsWriter:
    """Appends the metrics of steps to a run folder.

    TensorBoard files lie in `folder/tensorboard/STAGE`, one run per stage, because stages count their steps
    from the beginning. Without the package (extra `trackers`) only the JSON Lines file is written;
    `has_tensorboard` says which it is.
    """

    def __init__(self, folder: Path, *, tensorboard: bool = True) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / "metrics.jsonl"
        """The JSON Lines file."""
        self.has_tensorboard = tensorboard and importlib.util.find_spec("tensorboard") is not None
        """Whether event files are written too."""
        self._folder = folder
        self._events: dict[str, Any] = {}
        self._last: dict[str, int] = {}
        self._keep(lambda _: True)
        self._descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    def write(self, row: Mapping[str, Any]) -> None:
        """Append one step. `row` has its `stage` (a name) and `step` (a number) beside its values. Values
        are numbers, strings, None, or mappings and lists of them.

        A number that is not finite is written as null and named under `not_finite`. Raises RecordError for a
        row without stage and step, a value that has no JSON form or a name that the file itself uses.
        """
        stage, step = row.get("stage"), row.get("step")
        if not isinstance(stage, str) or not stage or not isinstance(step, int):
            raise RecordError(f"metrics of stage {stage!r}, step {step!r}; give a name and a whole number")
        reserved = {"time", "not_finite"} & set(row)
        if reserved:
            raise RecordError(f"metrics named {sorted(reserved)}; the file uses these names itself, choose others")
        values = {name: value for name, value in row.items() if name not in ("stage", "step")}
        if step <= self._last.get(stage, -1):
            self._rewind(stage, step)
        bad: list[str] = []
        tree = {"stage": stage, "step": step, "time": round(time.time(), 3), **_finite(values, "", bad)}
        if bad:
            tree["not_finite"] = bad
        try:
            line = json.dumps(tree, allow_nan=False) + "\n"
        except TypeError as error:
            raise RecordError(f"metrics of step {step} have no JSON form: {error}; pass plain numbers") from error
        os.write(self._descriptor, line.encode())
        self._last[stage] = step
        if self.has_tensorboard:
            self._write_events(stage, step, values)

    def close(self) -> None:
        """Write what is buffered and let go of the files. Idempotent."""
        for writer in self._events.values():
            writer.close()
        self._events.clear()
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __enter__(self) -> "MetricsWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _rewind(self, stage: str, step: int) -> None:
        os.close(self._descriptor)
        self._keep(lambda row: row["stage"] != stage or row["step"] < step)
        self._descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        if self.has_tensorboard:
            from tensorboard.compat.proto.event_pb2 import Event, SessionLog

            # Readers of event files drop everything at or after the step of a START.
            start = Event(wall_time=time.time(), step=step, session_log=SessionLog(status=SessionLog.START))
            self._writer(stage).add_event(start)

    def _keep(self, wanted: Callable[[dict[str, Any]], bool]) -> None:
        """Rewrite the file with the whole lines that are `wanted`, if any line has to go."""
        self._last.clear()
        if not self.path.exists():
            return
        raw = self.path.read_bytes()
        kept = []
        for line in raw.splitlines(keepends=True):
            try:
                row = json.loads(line) if line.endswith(b"\n") else None
            except ValueError:
                row = None
            if row is not None and wanted(row):
                kept.append(line)
                self._last[row["stage"]] = max(row["step"], self._last.get(row["stage"], -1))
        if len(b"".join(kept)) != len(raw):
            beside = self.path.with_suffix(".jsonl.new")
            beside.write_bytes(b"".join(kept))
            beside.replace(self.path)

    def _writer(self, stage: str) -> Any:
        if stage not in self._events:
            from tensorboard.compat.proto.event_pb2 import Event, SourceMetadata
            from tensorboard.summary.writer.event_file_writer import EventFileWriter

            self._events[stage] = EventFileWriter(str(self._folder / "tensorboard" / stage))
            # Purging at a START needs files of at least version 2 to be told so by their first event.
            self._events[stage].add_event(
                Event(
                    wall_time=time.time(),
                    file_version="brain.Event:2",
                    source_metadata=SourceMetadata(writer="leyden"),
                )
            )
        return self._events[stage]

    def _write_events(self, stage: str, step: int, values: Mapping[str, Any]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        numbers = _numbers(values, "")
        summary = Summary(value=[Summary.Value(tag=name, simple_value=number) for name, number in numbers.items()])
        writer = self._writer(stage)
        writer.add_event(Event(wall_time=time.time(), step=step, summary=summary))
        writer.flush()


def _finite(value: Any, name: str, bad: list[str]) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _finite(item, f"{name}/{key}" if name else str(key), bad) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item, f"{name}/{position}", bad) for position, item in enumerate(value)]
    if isinstance(value, float) and not math.isfinite(value):
        bad.append(name)
        return None
    return value


def _numbers(values: Mapping[str, Any], prefix: str) -> dict[str, float]:
    numbers: dict[str, float] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            numbers.update(_numbers(value, f"{prefix}{key}/"))
        elif isinstance(value, int | float) and not isinstance(value, bool):
            numbers[f"{prefix}{key}"] = float(value)
    return numbers

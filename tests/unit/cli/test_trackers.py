import json
import math
import warnings
from pathlib import Path
from typing import Any

import pytest

from leyden.base.errors import RecordError
from leyden.cli.trackers import MetricsWriter


def rows(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def write(writer: MetricsWriter, stage: str, step: int, values: dict[str, Any]) -> None:
    writer.write({"stage": stage, "step": step, **values})


def scalars(folder: Path, tag: str) -> list[tuple[int, float]]:
    with warnings.catch_warnings():
        # TensorBoard's reader imports modules that warn about their own future.
        warnings.simplefilter("ignore", DeprecationWarning)
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        reader = EventAccumulator(str(folder))
        reader.Reload()
        return [(event.step, event.value) for event in reader.Scalars(tag)]


def test_every_step_is_one_json_object(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path, tensorboard=False) as writer:
        write(writer, "sft", 1, {"loss": 0.5})
        write(writer, "rl", 1, {"loss": 0.25, "seconds": {"sample": 2}, "memorised": ["t1"]})
    found = rows(tmp_path)
    assert [(row["stage"], row["step"], row["loss"]) for row in found] == [("sft", 1, 0.5), ("rl", 1, 0.25)]
    assert found[1]["seconds"] == {"sample": 2} and found[1]["memorised"] == ["t1"]
    assert not (tmp_path / "tensorboard").exists()


def test_a_resumed_run_has_no_step_twice(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path, tensorboard=False) as writer:
        write(writer, "sft", 7, {"loss": 9.0})
        for step in (1, 2, 3):
            write(writer, "rl", step, {"loss": step / 2})
    with MetricsWriter(tmp_path, tensorboard=False) as writer:
        write(writer, "rl", 2, {"loss": 5.0})
        write(writer, "rl", 3, {"loss": 6.0})
    found = [(row["stage"], row["step"], row["loss"]) for row in rows(tmp_path)]
    assert found == [("sft", 7, 9.0), ("rl", 1, 0.5), ("rl", 2, 5.0), ("rl", 3, 6.0)]


def test_a_line_that_a_killed_process_left_is_removed(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path, tensorboard=False) as writer:
        write(writer, "rl", 1, {"loss": 1.0})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"stage": "rl", "step": 2, "lo')
    with MetricsWriter(tmp_path, tensorboard=False) as writer:
        write(writer, "rl", 2, {"loss": 2.0})
    assert [row["loss"] for row in rows(tmp_path)] == [1.0, 2.0]


def test_numbers_that_are_not_finite_are_null_and_named(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path, tensorboard=False) as writer:
        write(writer, "rl", 1, {"loss": math.nan, "seconds": {"sample": math.inf}})
    assert rows(tmp_path)[0]["loss"] is None
    assert rows(tmp_path)[0]["not_finite"] == ["loss", "seconds/sample"]


def test_what_has_no_json_form_or_a_name_of_the_file_is_refused(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path, tensorboard=False) as writer:
        with pytest.raises(RecordError, match="no JSON form"):
            write(writer, "rl", 1, {"loss": object()})
        with pytest.raises(RecordError, match="time"):
            write(writer, "rl", 1, {"time": 3})
        with pytest.raises(RecordError, match="whole number"):
            writer.write({"stage": "rl", "loss": 1.0})
    assert rows(tmp_path) == []


def test_tensorboard_reads_the_numbers_back(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    with MetricsWriter(tmp_path) as writer:
        assert writer.has_tensorboard
        for step in (1, 2):
            write(writer, "rl", step, {"reward_mean": step / 4, "seconds": {"sample": 3}, "note": "text"})
    assert scalars(tmp_path / "tensorboard" / "rl", "reward_mean") == [(1, 0.25), (2, 0.5)]
    assert scalars(tmp_path / "tensorboard" / "rl", "seconds/sample") == [(1, 3.0), (2, 3.0)]


def test_tensorboard_shows_a_step_written_again_once(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    for values in ([1.0, 2.0, 3.0], [None, 5.0]):
        with MetricsWriter(tmp_path) as writer:
            for step, value in enumerate(values, start=1):
                if value is not None:
                    write(writer, "rl", step, {"loss": value})
    assert scalars(tmp_path / "tensorboard" / "rl", "loss") == [(1, 1.0), (2, 5.0)]

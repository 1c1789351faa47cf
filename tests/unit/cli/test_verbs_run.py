"""`init`, `run`, `inspect` and `export` on the project that `init` writes, against a scripted engine."""

import itertools
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.unit.cli.calling import Caller

from leyden.testing.fake_engine import FakeEngine
from leyden.testing.scripted import Behaviour, Reply
from leyden.traces.telemetry.wire import parse_request


@pytest.fixture
def engine() -> Iterator[FakeEngine]:
    """Answers sums: every second time right."""
    turn = itertools.count()

    def reply(body: "object") -> Reply:
        assert isinstance(body, dict)
        question = body["messages"][-1]["content"]
        if not question.startswith("What is "):
            return Reply(text="hello")  # the gateway looks at what the engine can do
        a, b = (int(word) for word in question.removeprefix("What is ").removesuffix("?").split(" + "))
        return Reply(text=str(a + b if next(turn) % 2 == 0 else a - b))

    with FakeEngine(Behaviour(reply=reply)) as running:
        yield running


def test_init_writes_a_project_and_refuses_to_write_over_it(leyden: Caller, tmp_path: Path) -> None:
    said = leyden("init", tmp_path / "p", "--json")
    assert said.code == 0
    assert said.rows[0]["files"] == [
        "agent.py", "leyden.toml", "tasks/holdout.jsonl", "tasks/train.jsonl", "verify.py"
    ]  # fmt: skip
    (tmp_path / "p" / "agent.py").write_text("mine", encoding="utf-8")
    said = leyden("init", tmp_path / "p")
    assert said.code == 2 and "agent.py" in said.err and "--force" in said.err
    assert (tmp_path / "p" / "agent.py").read_text(encoding="utf-8") == "mine"
    assert leyden("init", tmp_path / "p", "--force").code == 0
    assert "OpenAI" in (tmp_path / "p" / "agent.py").read_text(encoding="utf-8")


def test_a_run_is_recorded_and_can_be_looked_at_and_exported(leyden: Caller, project: Path, engine: FakeEngine) -> None:
    config = project / "leyden.toml"
    said = leyden(
        "run", "-c", config, "--limit", "2", "--samples", "3", "--json", "-s", f"policies.main.engine={engine.url}"
    )
    assert said.code == 0, said.err
    rows = [row for row in said.rows if "rollout" in row]
    assert len(rows) == 6 and all(row["outcome"] == "completed" and row["calls"] == 1 for row in rows)
    assert {row["reward"] > 0.5 for row in rows} == {True, False}

    listed = leyden("inspect", "-c", config, "--json").rows[0]
    assert {r["rollout"] for r in listed["rollouts"]} == {row["rollout"] for row in rows}
    assert "completed" in leyden("inspect", "-c", config).out

    one = rows[0]["rollout"]
    shown = leyden("inspect", one[:-2], "-c", config, "--json").rows[0]
    assert shown["rollout"] == one and shown["reward"] == rows[0]["reward"]
    (call,), (action,) = shown["calls"], shown["actions"]
    assert call["provenance"] == "served" and action["drop"] is None
    assert len(action["completion_ids"]) == len(action["logprobs"]) == rows[0]["tokens"]
    text = leyden("inspect", one, "-c", config, "-s", "policies.main.model=absent").out
    assert f"Rollout {one}" in text and "trained" in text

    said = leyden("inspect", "ro_nobody", "-c", config)
    assert said.code == 1 and "ro_nobody" in said.err

    summary = leyden("export", project / "out.jsonl", "-c", config, "--json").rows[0]
    samples = [json.loads(line) for line in (project / "out.jsonl").read_text(encoding="utf-8").splitlines()]
    assert summary["samples"] == len(samples) == 6
    assert summary["sampled"] == summary["trained"] == sum(row["tokens"] for row in rows)
    assert sum(sample["credit"] for sample in samples) == pytest.approx(0.0, abs=1e-4)
    assert leyden("export", project / "out.parquet", "-c", config).code == 0
    told = leyden("export", project / "otlp.jsonl", "--format", "otlp", "-c", config, "--json").rows[0]
    lines = (project / "otlp.jsonl").read_bytes().splitlines()
    assert len(lines) == told["rollouts"] > 0
    spans = [parse_request(line, "json").resource_spans[0].scope_spans[0].spans for line in lines]
    assert sum(map(len, spans)) == told["spans"] and {one[0].name for one in spans} == {"attempt 1"}
    assert leyden("export", project / "otlp.pb", "--format", "otlp", "-c", config).code == 0
    raw = (project / "otlp.pb").read_bytes()
    first = parse_request(raw[4 : 4 + int.from_bytes(raw[:4], "big")], "protobuf")
    assert first.resource_spans[0].scope_spans[0].spans[0].name == "attempt 1"
    assert leyden("export", project / "otlp.txt", "--format", "otlp", "-c", config).code == 2
    assert leyden("export", project / "out.jsonl", "--format", "zip", "-c", config).code == 2
    import pyarrow.parquet

    table = pyarrow.parquet.read_table(project / "out.parquet").to_pylist()
    assert [row["completion_ids"] for row in table] == [sample["completion_ids"] for sample in samples]
    assert [row["reward"] for row in table] == [sample["reward"] for sample in samples]


def test_a_run_shows_people_a_table(leyden: Caller, project: Path, engine: FakeEngine) -> None:
    said = leyden("run", "-c", project / "leyden.toml", "--limit", "1", "-s", f"policies.main.engine={engine.url}")
    assert said.code == 0, said.err
    assert "completed" in said.out and "leyden inspect" in said.out


def test_an_agent_that_never_calls_is_diagnosed(leyden: Caller, project: Path, engine: FakeEngine) -> None:
    (project / "agent.py").write_text("print(5)\n", encoding="utf-8")
    said = leyden("run", "-c", project / "leyden.toml", "--limit", "1", "--json",
                  "-s", f"policies.main.engine={engine.url}")  # fmt: skip
    (row,) = [row for row in said.rows if "rollout" in row]
    assert row["calls"] == 0 and row["diagnosis"] == "no_calls" and row["detail"]


def test_an_agent_that_calls_elsewhere_is_diagnosed(leyden: Caller, project: Path, engine: FakeEngine) -> None:
    agent = project / "agent.py"
    text = agent.read_text(encoding="utf-8")
    agent.write_text(
        text.replace("OpenAI()", 'OpenAI(base_url="http://127.0.0.1:9/v1", max_retries=0)'), encoding="utf-8"
    )
    said = leyden("run", "-c", project / "leyden.toml", "--limit", "1", "--json",
                  "-s", f"policies.main.engine={engine.url}", "-s", "harness.max_attempts=1")  # fmt: skip
    (row,) = [row for row in said.rows if "rollout" in row]
    assert row["calls"] == 0 and row["outcome"] == "agent_error" and row["diagnosis"]

"""Several policies in a real run: one harness with one model name, killed and gone on with."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.project import assert_conserved, finished, leyden, metrics, project_store, run_folder, start
from tests.e2e.team import make_team
from tests.e2e.test_resume import num_steps, recorded, until

from leyden.store import ledger
from leyden.traces.reader import Reader

pytestmark = pytest.mark.timeout(300)  # two parts of a run and an evaluation

MATCHERS = """
[match]
models = ["agent"]
default = "critic"

[policies.planner.match]
system = "You are the planner"

[policies.writer.match]
system = "the writer[.]$"
"""


def repeated(row: dict[str, Any]) -> dict[str, Any]:
    """`recorded`, of the parts of the policies too."""
    return {**recorded(row), "policies": {name: recorded(part) for name, part in row["policies"].items()}}


def test_policies_behind_one_name_are_killed_resumed_and_evaluated_together(tmp_path: Path) -> None:
    path = make_team(tmp_path, model="agent", settings=MATCHERS, num_holdout=2)
    small = ("-s", "learn.steps=4", "-s", "learn.group_size=4")
    process = start("train", "-c", str(path), *small, "-s", 'tasks.holdout=""', cwd=tmp_path)
    # The checkpoint after step 2 is the newest when step 3 is recorded, so step 3 is learned again.
    until(lambda: num_steps(tmp_path) >= 3, process, tmp_path, "step 3")
    process.kill()
    process.wait(10)
    run = run_folder(tmp_path)
    before = metrics(run)
    leyden("train", "--resume", str(run), cwd=tmp_path)
    rows = metrics(run)
    assert [repeated(row) for row in rows[: len(before)]] == [repeated(row) for row in before], "bit-identical"
    assert [row["step"] for row in rows] == [0, 1, 2, 3]
    for row in rows:
        assert_conserved(row)
        for name, part in row["policies"].items():
            assert_conserved(part)
            assert part["conservation"]["trained"] > 0 and part["version"] == row["step"] + 1, name
    assert sorted(folder.name for folder in (run / "checkpoints").iterdir()) == [
        "planner@2", "planner@4", "writer@2", "writer@4",
    ]  # fmt: skip
    assert "Reinforcement learning of writer" in (run / "report.html").read_text(encoding="utf-8")
    said = leyden("eval", "-c", str(path), "--version-of", "planner@2", "--json", cwd=tmp_path).stdout
    assert json.loads(said.splitlines()[-1])["evaluations"][0]["policy_version"] == "planner@2+writer@2"
    store = project_store(tmp_path)
    try:
        traces = Reader(store).traces([r.id for r in finished(store, run.name)])
        known = store.read(lambda connection: ledger.policy_versions(connection, "critic"))
    finally:
        store.close()
    asked = Counter((call.alias, call.policy) for trace in traces for call in trace.calls)
    assert asked == {("agent", name): 32 for name in ("planner", "writer", "critic")}
    assert {call.policy_version for trace in traces for call in trace.calls if call.policy == "critic"} == {0}
    assert known == [], "a policy that is served as it is makes no version"

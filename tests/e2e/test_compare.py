"""`leyden compare` and `leyden train` with a budget on a real model: what is missing is run, what is stored is not."""

from pathlib import Path

import pytest
from tests.e2e.project import LEAN_AGENT, make_project, project_store, run_folder
from tests.unit.cli.calling import Caller

from leyden.store import ledger

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.timeout(1200)]


@pytest.fixture
def leyden(monkeypatch: pytest.MonkeyPatch, capfd: "pytest.CaptureFixture[str]", tmp_path: Path) -> Caller:
    """Calls verbs in this process, in the project: torch is loaded once."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2] / "src"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return Caller(monkeypatch, capfd)


def test_a_budget_stops_a_run_which_goes_on_and_whose_versions_are_then_compared(
    leyden: Caller, tmp_path: Path
) -> None:
    make_project(tmp_path, agent=LEAN_AGENT, num_holdout=6, tokens=4)
    small = ("-s", "learn.steps=2", "-s", "learn.group_size=4", "-s", "rewards.success=letters")
    stopped = leyden("train", *small, "-s", "budget.tokens=20")
    assert stopped.code == 130, stopped.err
    assert "the budget is spent" in stopped.err and "budget.tokens=MORE" in stopped.err
    assert "6 tasks cannot show any difference" in stopped.out + stopped.err
    run = run_folder(tmp_path)
    refused = leyden("train", "--resume", run, "-s", "learn.steps=9")
    assert refused.code == 2 and "can change its budget only" in refused.err
    resumed = leyden("train", "--resume", run, "-s", "budget.tokens=1000000")
    assert resumed.code == 0, resumed.err

    said = leyden("compare", "base", "final", "--json", "--stored", "-s", "rewards.success=letters")
    assert said.code == 0, said.err
    stored = said.rows[-1]
    assert [row["name"] for row in stored["rows"]] == ["base", "final"] and stored["recommended"] == "base"
    assert stored["rows"][1]["training"]["minutes"] > 0 and stored["rows"][1]["training"]["tokens"] > 0
    assert any("6 tasks with 1 pairs cannot show any difference" in note for note in stored["notes"])
    assert (tmp_path / "compare.html").read_text(encoding="utf-8").startswith("<!doctype html>")

    # Another set of tasks: nothing is stored for it, so both versions are evaluated through the house.
    fewer = ("-s", "eval.max_tasks=3", "-s", "rewards.success=letters")
    said = leyden("compare", "main@0", "main@2", "--json", *fewer)
    assert said.code == 0, said.err
    run_now = said.rows[-1]
    assert run_now["num_tasks"] == 3 and "3 tasks with 1 pairs cannot show" in run_now["notes"][0]
    store = project_store(tmp_path)
    try:
        made = [(one.label, one.version) for one in store.read(ledger.evaluations)]
    finally:
        store.close()
    assert made == [("base", 0), ("final", 2), ("holdout-0", 0), ("holdout-2", 2)]
    costs = leyden("costs", run.name, "--json").rows[0]
    assert costs["total"]["cost"]["verifier_s"] > 0 and costs["total"]["cost"]["storage_bytes"] > 0
    told = leyden("diagnose", run.name, "--json", "-s", "rewards.success=letters").rows[0]
    assert told["num_rollouts"] == 6 and told["num_solved"] + len(told["failures"]) == 6

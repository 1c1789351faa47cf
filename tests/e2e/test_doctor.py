"""`leyden doctor` on projects that are well and on projects that are not."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.project import LEAN_AGENT, leyden, make_project

pytestmark = pytest.mark.timeout(900)

NOISY = """
import random

def verify(task, trace, workspace):
    return {"letters": random.random()}
"""


def examined(done: "subprocess.CompletedProcess[str]") -> dict[str, dict[str, Any]]:
    return {finding["name"]: finding for finding in json.loads(done.stdout.splitlines()[-1])["findings"]}


def test_a_project_that_is_well_has_no_problem_and_leaves_no_run(tmp_path: Path) -> None:
    path = make_project(tmp_path, agent=LEAN_AGENT)
    done = leyden("doctor", "-c", str(path), cwd=tmp_path)
    assert "problem" not in done.stdout and "warning  holdout: 6 tasks" in done.stdout
    for name in ("template", "gap", "dry rollout", "capture", "same reward twice", "duration"):
        assert f"ok  {name}: " in done.stdout, name
    assert not list((tmp_path / "runs").glob("*/config.json")), "an examination is no run"


def test_what_is_broken_is_told_before_a_model_is_loaded(tmp_path: Path) -> None:
    path = make_project(tmp_path, agent=LEAN_AGENT)
    (tmp_path / "train.jsonl").write_text("{broken\n", encoding="utf-8")
    (tmp_path / "verify.py").write_text("def verify(task, trace, workspace)\n", encoding="utf-8")
    done = leyden("doctor", "-c", str(path), "--json", cwd=tmp_path, check=False)
    found = examined(done)
    assert done.returncode == 1
    assert found["tasks"]["level"] == "problem" and "train.jsonl" in found["tasks"]["what"]
    assert found["verifier"]["level"] == "problem" and "SyntaxError" in found["verifier"]["what"]
    assert found["model"]["level"] == "note" and "not examined" in found["model"]["what"]
    files_only = leyden("doctor", "-c", str(path), "--json", "--no-model", cwd=tmp_path, check=False)
    assert "model" not in examined(files_only)


def test_a_harness_that_fails_and_a_verifier_that_draws_lots_are_found(tmp_path: Path) -> None:
    path = make_project(tmp_path, agent=LEAN_AGENT)
    (tmp_path / "verify.py").write_text(NOISY, encoding="utf-8")
    done = leyden("doctor", "-c", str(path), "--json", cwd=tmp_path)
    assert examined(done)["same reward twice"]["level"] == "warning"
    (tmp_path / "agent.py").write_text("import a_package_that_is_not_there\n", encoding="utf-8")
    done = leyden("doctor", "-c", str(path), "-s", "harness.preload=[]", "--json", cwd=tmp_path, check=False)
    found = examined(done)["dry rollout"]
    assert done.returncode == 1 and found["level"] == "problem"
    assert "a_package_that_is_not_there" in found["what"]

"""Probes that change the workspace after an attempt that answered nothing: tests, results, everything."""

import contextlib
import json
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from leyden.rewards.probes.base import Probe, Stage

JUDGING = re.compile(r"(?i)test|spec|expect|golden|reference|truth|check|verify|grade|solution|answer_key")
"""Names of files that might decide about the reward."""
PASSING = {
    ".py": "def test_passes():\n    assert True\n\n\nif __name__ == '__main__':\n    print('OK')\n",
    ".sh": "#!/bin/sh\nexit 0\n",
    ".js": "test('passes', () => {});\n",
    ".json": "{}",
}
RESULTS = (
    "reward.json", "result.json", "results.json", "score.json", "status.json", "report.json", "metrics.json",
    "test_results.json", "verdict.json",
)  # fmt: skip
WORDS = (
    "reward.txt",
    "result.txt",
    "score.txt",
    "status.txt",
    "exit_code",
    "exit_code.txt",
    "passed",
    "PASSED",
    "done",
)


def _files(workspace: Path) -> list[Path]:
    return sorted(path for path in workspace.rglob("*") if path.is_file() and not path.is_symlink())


def _write(path: Path, text: str) -> None:
    """Also where the agent or the harness took the right to write away."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            path.chmod(0o600)
        path.write_text(text, encoding="utf-8")


def overwrite_tests(stage: Stage, workspace: Path, trace: dict[str, Any]) -> None:
    """Tests and checks in the workspace become ones that pass; pytest is told that everything passed."""
    for path in _files(workspace):
        if JUDGING.search(path.name) and path.suffix in PASSING:
            _write(path, PASSING[path.suffix])
    _write(
        workspace / "conftest.py",
        "import pytest\n\n\n@pytest.hookimpl(hookwrapper=True)\ndef pytest_runtest_makereport(item, call):\n"
        "    outcome = yield\n    outcome.get_result().outcome = 'passed'\n",
    )


def delete_tests(stage: Stage, workspace: Path, trace: dict[str, Any]) -> None:
    """Tests and checks in the workspace are gone."""
    for path in _files(workspace):
        if JUDGING.search(path.name):
            path.unlink(missing_ok=True)


def make_equal(stage: Stage, workspace: Path, trace: dict[str, Any]) -> None:
    """Every file has the same content, so what is compared with a file of the workspace is equal to it."""
    for path in _files(workspace):
        _write(path, "same\n")


def write_results(stage: Stage, workspace: Path, trace: dict[str, Any]) -> None:
    """Files that a verifier might take for its own result."""
    good = {**dict.fromkeys(stage.components, 1.0), "reward": 1.0, "score": 1.0, "passed": True, "status": "passed"}
    for name in RESULTS:
        _write(workspace / name, json.dumps(good))
    for name in WORDS:
        _write(workspace / name, "0\n" if name.startswith("exit") else "1.0\n" if name[0] in "rs" else "passed\n")
    cases = "".join(f'<testcase name="t{n}"/>' for n in range(5))
    _write(workspace / "report.xml", f'<testsuite tests="5" failures="0" errors="0">{cases}</testsuite>')


def print_results(stage: Stage, workspace: Path, trace: dict[str, Any]) -> None:
    """Standard output says that all is well."""
    lines = [
        *(f"{name}: 1.0" for name in stage.components),
        "5 passed in 0.01s",
        "OK",
        "ALL TESTS PASSED",
        "reward: 1.0",
    ]
    trace["stdout_tail"] = "\n".join(lines) + "\n"


def remove_all(stage: Stage, workspace: Path, trace: dict[str, Any]) -> None:
    """The workspace is empty, and nothing was said."""
    for path in workspace.iterdir():
        shutil.rmtree(path, ignore_errors=True) if path.is_dir() and not path.is_symlink() else path.unlink()
    trace.update(final_text="", stdout_tail="", messages=[], calls=[])


PROBES: Sequence[Probe] = (
    Probe(
        name="tests_tampered",
        says="rewrites, removes or evens out the files that decide",
        kind="workspace",
        quick=True,
        tampers=(overwrite_tests, delete_tests, make_equal),
    ),
    Probe(
        name="results_forged",
        says="leaves files and output that look like a good result",
        kind="workspace",
        quick=True,
        tampers=(write_results, print_results),
    ),
    Probe(name="workspace_emptied", says="leaves nothing at all", kind="workspace", tampers=(remove_all,)),
)

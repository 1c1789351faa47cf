"""Do tests pass on what the agent left (pytest, in a copy of the workspace).

The tests come from a folder outside the workspace and are laid over the copy last, so what the agent did to its own
copy of them does not count; files that configure pytest or Python are taken out of the copy; the agent's files come
last on the path, so none of them stands in for a module of Python or of pytest; and what counts is the report that
pytest writes, not the exit code. The process has limits on time, processor time, memory and file size and none of
our keys. It is not a jail: code under test can reach the network and the files that this user can read.
"""

import contextlib
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

from pydantic import Field

from leyden.base.errors import VerifierError
from leyden.rewards.library.base import Evidence, Member, Settings

CONFIGURES = ("conftest.py", "pytest.ini", ".pytest.ini", "pyproject.toml", "setup.cfg", "tox.ini", "sitecustomize.py")
"""Files that change how tests are collected or how Python starts; only those of the tests' own folder count."""
PROGRAM = """
import sys
import pytest
copy, report, *tests = sys.argv[1:]
sys.path.append(copy)
sys.exit(pytest.main([
    "-q", "--import-mode=importlib", "--rootdir", copy, "-c", "/dev/null",
    "-p", "no:cacheprovider", "--junitxml", report, *tests,
]))
"""
MAX_COPY_BYTES = 256 << 20
"""A larger workspace is not copied: its attempt earns nothing."""


class UnitTestSettings(Settings):
    """`[rewards.settings.unit_tests]`"""

    tests: str
    """Folder of the tests, relative to the configuration; a `{id}` in it is the id of the task."""
    expected: int = Field(1, ge=1)
    """Tests that have to have run; fewer earn nothing, for then something kept them from running."""
    timeout_s: float = Field(20.0, gt=0)
    """Longest time; has to be below rewards.timeout_s."""
    memory_bytes: int = Field(1 << 30, ge=1 << 26)
    """Limit on the address space."""


def run_tests(workspace: Path, tests: Path, settings: UnitTestSettings) -> tuple[int, int]:
    """(tests that passed, tests that ran) on a copy of `workspace`. Raises VerifierError when there are no tests."""
    files = sorted(path for path in tests.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    named = [p for p in files if p.name.startswith("test_") or p.stem.endswith("_test")]
    if not [p for p in named if p.suffix == ".py"]:
        raise VerifierError(f"rewards.settings.unit_tests.tests = {tests}: no file test_*.py there")
    with tempfile.TemporaryDirectory(prefix="leyden-tests-") as outside:
        copy, report = Path(outside) / "copy", Path(outside) / "report.xml"
        if not _copy(workspace, copy):
            return 0, 0
        for path in files:
            there = copy / path.relative_to(tests)
            with contextlib.suppress(OSError):
                there.unlink()
            there.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, there)
        _run(copy, report, [str(copy / p.relative_to(tests)) for p in named if p.suffix == ".py"], settings)
        return _read(report)


def _copy(workspace: Path, copy: Path) -> bool:
    """Regular files only: a link could lead out of the copy. False when it is too large or cannot be read."""
    copy.mkdir()
    total = 0
    for parent, folders, names in os.walk(workspace):
        folders[:] = [name for name in folders if name not in ("__pycache__", ".git")]
        for name in names:
            path = Path(parent, name)
            if path.is_symlink() or not path.is_file() or name in CONFIGURES:
                continue
            total += path.stat().st_size
            if total > MAX_COPY_BYTES:
                return False
            there = copy / path.relative_to(workspace)
            there.parent.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(OSError):  # unreadable to us: then it is not there for the tests either
                shutil.copyfile(path, there)
    return True


def _run(copy: Path, report: Path, tests: list[str], settings: UnitTestSettings) -> None:
    process = subprocess.Popen(
        [sys.executable, "-I", "-B", "-c", PROGRAM, str(copy), str(report), *tests],
        cwd=copy,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={"PATH": os.defpath, "HOME": str(copy), "LC_ALL": "C.UTF-8", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        start_new_session=True,
        preexec_fn=_limits(settings),  # safe: a verifier's worker has one thread
    )
    try:
        process.wait(settings.timeout_s)
    except subprocess.TimeoutExpired:
        report.unlink(missing_ok=True)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _limits(settings: UnitTestSettings) -> Callable[[], None]:
    cpu_s = int(settings.timeout_s) + 1

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s))
        resource.setrlimit(resource.RLIMIT_AS, (settings.memory_bytes, settings.memory_bytes))
        resource.setrlimit(resource.RLIMIT_FSIZE, (64 << 20, 64 << 20))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))

    return limit


def _read(report: Path) -> tuple[int, int]:
    """(passed, ran) of a JUnit report; none at all when it is missing or no report."""
    try:
        suites = list(ElementTree.fromstring(report.read_bytes()).iter("testsuite"))
        ran = sum(int(s.get("tests", 0)) for s in suites)
        bad = sum(int(s.get(name, 0)) for s in suites for name in ("failures", "errors", "skipped"))
    except (OSError, ValueError, ElementTree.ParseError):
        return 0, 0
    return max(0, ran - bad), max(0, ran)


def _score(evidence: Evidence, settings: UnitTestSettings) -> dict[str, float]:
    tests = evidence.base_dir / settings.tests.replace("{id}", str(evidence.task.get("id")))
    if not tests.is_dir():
        raise VerifierError(f"rewards.settings.unit_tests.tests: no folder {tests}")
    passed, ran = run_tests(evidence.workspace, tests.resolve(), settings)
    whole = ran >= settings.expected
    return {
        "unit_tests": float(whole and passed == ran),
        "unit_tests_share": passed / ran if whole else 0.0,
        "unit_tests_ran": float(ran),
    }


MEMBER = Member(
    name="unit_tests",
    says="tests from outside the workspace pass on a copy of it",
    settings=UnitTestSettings,
    score=_score,
    components=("unit_tests", "unit_tests_share", "unit_tests_ran"),
)

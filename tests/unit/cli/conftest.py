"""Fixtures of the command line's tests."""

from pathlib import Path

import pytest
from tests.unit.cli.calling import Caller


@pytest.fixture
def leyden(monkeypatch: pytest.MonkeyPatch, capfd: "pytest.CaptureFixture[str]") -> Caller:
    """Calls verbs in this process."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[3] / "src"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("COLUMNS", "200")
    return Caller(monkeypatch, capfd)


@pytest.fixture
def project(leyden: Caller, tmp_path: Path) -> Path:
    """The project that `leyden init` writes."""
    assert leyden("init", tmp_path / "project").code == 0
    return tmp_path / "project"

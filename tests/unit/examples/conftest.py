"""Makes the scripts of the text-to-SQL example importable the way they import each other."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "text_to_sql"
sys.path.insert(0, str(EXAMPLE))

COUNTS = {"train": 120, "val": 20, "holdout": 60, "demos": 64}


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small generated data folder: tasks and databases."""
    import generate

    out = tmp_path_factory.mktemp("text_to_sql")
    generate.generate(out, seed=0, counts=COUNTS)
    return out


@pytest.fixture
def on_data(data: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The same folder, found by harness and verifier."""
    monkeypatch.setenv("TEXT_TO_SQL_DATA", str(data))
    return data


@pytest.fixture
def load() -> Any:
    """Reads a JSON Lines file."""

    def read(path: Path) -> list[dict[str, Any]]:
        return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]

    return read

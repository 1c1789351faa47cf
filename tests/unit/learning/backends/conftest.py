"""A tiny model on disk, made once."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.tiny_model import build_tiny_model

from leyden.learning.backends.embedded.model import LoadedModel, load_model


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved tiny model with a chat template."""
    return build_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def load_tiny(tiny_folder: Path) -> Callable[..., LoadedModel]:
    """Loads it anew, float32 unless asked otherwise."""

    def load(**options: Any) -> LoadedModel:
        return load_model(tiny_folder, **{"dtype": "float32", **options})

    return load

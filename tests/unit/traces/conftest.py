"""A fresh store per test."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from leyden.store import open_store
from leyden.store.base import Store


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    opened = open_store(f"sqlite:///{tmp_path / 'store.db'}")
    yield opened
    opened.close()

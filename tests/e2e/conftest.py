"""Fixtures of the end-to-end tests."""

from collections.abc import Iterator

import pytest
from tests.e2e.project import ENV


@pytest.fixture
def one_thread(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """This process and its children use one thread for arithmetic, and the children find the package."""
    import torch

    for name in ("OMP_NUM_THREADS", "PYTHONPATH", "NO_COLOR"):
        monkeypatch.setenv(name, ENV[name])
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)

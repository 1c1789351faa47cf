"""A policy whose weights are not ours: an engine or a provider serves them, and only prompts can be improved.

Promises: it says where the engine is and which version the store calls what is served; nothing here moves a weight, and
whoever asks for that is told so. No torch.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from leyden.base.errors import LearningError
from leyden.base.records import FloatArray
from leyden.learning.backends.base import Objective, UpdateReport
from leyden.learning.batch import Batch


class ExternalBackend:
    """See `base.Backend`; the methods that train refuse."""

    def __init__(self, policy: str, url: str, key: str) -> None:
        self.policy = policy
        self.version = 0
        self.engine_key = key
        self._url = url

    def start(self) -> str:
        """It runs already."""
        return self._url

    def encode_demo(self, messages: Sequence[Mapping[str, Any]]) -> tuple[list[int], int]:
        """Refused."""
        self._refuse()

    def update(self, batches: Sequence[Batch], objective: Objective, version: int) -> UpdateReport:
        """Refused."""
        self._refuse()

    def logprobs(self, batch: Batch) -> FloatArray:
        """Refused."""
        self._refuse()

    def values(self, batch: Batch) -> FloatArray:
        """Refused."""
        self._refuse()

    def save(self, folder: Path, *, full: bool) -> None:
        """Refused."""
        self._refuse()

    def load(self, folder: Path, version: int, *, full: bool) -> None:
        """Refused."""
        self._refuse()

    def serve_as(self, version: int) -> None:
        """The same weights under another number: prompts differ, not weights."""
        self.version = version

    def load_base(self, version: int) -> None:
        """There are no other weights."""
        self.version = version

    def forget_optimizer(self, folder: Path) -> None:
        """There is none."""

    def close(self) -> None:
        """It is not ours to stop."""

    def _refuse(self) -> NoReturn:
        raise LearningError(
            f"policy {self.policy!r} is served by {self._url}, whose weights cannot be moved from here; set "
            'learn.algorithm to "bootstrap_demos", "apo" or "gepa", or give the policy a model of its own'
        )

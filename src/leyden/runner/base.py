"""The contract of a launcher: start one harness, give back how it ended, leave no process behind.

One conformance suite (`tests/contract/test_runner_launchers.py`) runs over every implementation.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchSpec:
    """Everything that one attempt's process needs."""

    argv: Sequence[str]
    """Absolute path of the program, then its arguments."""
    cwd: Path
    """Working directory."""
    env: Mapping[str, str]
    """The whole environment."""
    timeout_s: float
    """Time limit, from the moment the process runs."""
    output_bytes: int = 65536
    """Tail of each of standard output and standard error that is kept."""
    memory_bytes: int = 0
    """Limit on the address space; 0 is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """How a harness ended."""

    exit_code: int | None
    """Negative is a signal; None when that could not be learned."""
    timed_out: bool = False
    """Whether the time limit ended it."""
    stdout_tail: str = ""
    """Last part of standard output."""
    stderr_tail: str = ""
    """Last part of standard error."""
    num_stdout_bytes: int = 0
    """All of standard output."""
    num_stderr_bytes: int = 0
    """All of standard error."""
    duration_s: float = 0.0
    """Wall time."""
    cpu_s: float = 0.0
    """Processor time of the process and of the children that it waited for."""
    num_survivors: int = 0
    """Processes that outlived the harness and were killed."""
    fault: str = ""
    """What went wrong on our side; empty when nothing did. Then the harness is not to blame."""


class Launcher(Protocol):
    """What every launcher does."""

    async def launch(self, spec: LaunchSpec) -> Finished:
        """Run one harness to its end or its time limit; no process of it is left when this returns.

        Cancelling ends the harness and its processes first. Raises HarnessError when the program cannot be
        started at all.
        """

    async def close(self) -> None:
        """End whatever still runs. Idempotent."""

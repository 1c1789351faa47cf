"""`leyden VERB` in this process, as the entry point runs it."""

import json
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from leyden.cli.main import main


@dataclass(frozen=True, slots=True)
class Said:
    """What a verb left behind."""

    code: int
    """Exit status."""
    out: str
    """Standard output."""
    err: str
    """Standard error."""

    @property
    def rows(self) -> list[Any]:
        """Standard output as one JSON value a line."""
        return [json.loads(line) for line in self.out.splitlines()]


class Caller:
    """Calls verbs; signal handlers are put back, because verbs take them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capfd: "pytest.CaptureFixture[str]") -> None:
        self._monkeypatch, self._capfd = monkeypatch, capfd

    def __call__(self, *arguments: str | Path) -> Said:
        """Run `leyden ARGUMENTS`."""
        self._capfd.readouterr()
        self._monkeypatch.setattr(sys, "argv", ["leyden", *map(str, arguments)])
        handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            main()
            code = 0
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
        out, err = self._capfd.readouterr()
        return Said(code, out, err)

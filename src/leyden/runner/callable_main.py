"""The program of a `harness.callable`: `callable_main.py FILE FUNCTION`. Light, as
`leyden.base.command` is.

Calls FUNCTION with the task (`id`, `split`, `domain`, `input`), awaits it if it is a coroutine, and prints
what it returns, if anything, as the last line of standard output. An exception ends the process with exit
code 1.
"""

import asyncio
import inspect
import json
import os
import sys
from pathlib import Path
from typing import Any

from leyden.base.command import load_named


def main(argv: list[str]) -> int:
    """Run one task."""
    file, name = argv[1], argv[2]
    function = load_named(file, name)
    result = function(_task())
    if inspect.iscoroutine(result):
        result = asyncio.run(result)
    if result is not None:
        print(json.dumps(result, default=str))
    return 0


def _task() -> dict[str, Any]:
    file = os.environ.get("LEYDEN_TASK_FILE")
    task: dict[str, Any] = json.loads(Path(file).read_text("ascii") if file else os.environ["LEYDEN_TASK"])
    return task


if __name__ == "__main__":
    sys.exit(main(sys.argv))

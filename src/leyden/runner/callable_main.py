"""The program of a `harness.callable`: `callable_main.py FILE FUNCTION`. Standard library only.

Calls FUNCTION with the task (`id`, `split`, `domain`, `input`), awaits it if it is a coroutine, and prints
what it returns, if anything, as the last line of standard output. An exception ends the process with exit
code 1.
"""

import asyncio
import importlib.util
import inspect
import json
import os
import sys
from pathlib import Path
from typing import Any


def main(argv: list[str]) -> int:
    """Run one task."""
    file, name = argv[1], argv[2]
    folder = str(Path(file).parent)
    if sys.path[:1] != [folder]:
        sys.path.insert(0, folder)
    spec = importlib.util.spec_from_file_location(Path(file).stem, file)
    if spec is None or spec.loader is None:
        raise ImportError(f"{file} cannot be imported as Python")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    function = getattr(module, name, None)
    if not callable(function):
        raise ImportError(f"{file} has no function {name!r}; mend harness.callable")
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

"""`leyden` that kills itself the n-th time it reaches a function: `killed.py MODULE:NAME N VERB ...`.

Nothing of the program is changed but that one function, which is SIGKILL instead of its n-th call, so a test says
exactly where the power went out.
"""

import importlib
import os
import signal
import sys
from itertools import count
from typing import Any


def main() -> None:
    """Put the trap in and run the verb."""
    place, number, *arguments = sys.argv[1:]
    module, _, path = place.partition(":")
    owner: Any = importlib.import_module(module)
    *parents, name = path.split(".")
    for parent in parents:
        owner = getattr(owner, parent)
    reached = count(1)
    original = getattr(owner, name)

    def trap(*args: Any, **kwargs: Any) -> Any:
        if next(reached) == int(number):
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*args, **kwargs)

    setattr(owner, name, trap)
    sys.argv = ["leyden", *arguments]
    from leyden.cli.main import main as leyden

    leyden()


if __name__ == "__main__":
    main()

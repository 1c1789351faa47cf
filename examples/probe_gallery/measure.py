"""How many open rewards the probes find, and how many sound ones they accuse: `python measure.py [--json FILE]`.

Every environment of the gallery is made in a temporary folder and probed with all probes through the real gateway,
runner and verifier. Exit status 1 when a sound one is accused, or an open one is missed that takes no knowledge of the
task.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from environments import CLEAN, HACKABLE, Environment, write

from leyden.base.config import from_tree
from leyden.base.tasks import load_tasks
from leyden.cli.probing import run_probes
from leyden.rewards.probes import probes_of


class Quiet:
    """No progress is shown."""

    def begin(self, phase: str, total: int) -> None:
        """A phase starts."""

    def advance(self, done: int, note: str = "") -> None:
        """So much of it is over."""

    def end(self) -> None:
        """It is over."""


def measure(environment: Environment, *, quick: bool = False, only: Sequence[str] = ()) -> dict[str, Any]:
    """Which probes win in one environment."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        config = from_tree(write(environment, Path(name)), base_dir=Path(name))
        tasks = load_tasks(config.resolve(config.tasks.train))
        results = run_probes(config, tasks, probes_of(config, only, quick=quick), Quiet())
    return {
        "environment": environment.name,
        "flaw": environment.flaw,
        "needs_knowledge": environment.needs_knowledge,
        "won": [result.name for result in results if result.won],
        "not_judged": [result.name for result in results if result.score is None],
        "seconds": round(time.monotonic() - started, 1),
    }


def main() -> int:
    """Print a line per environment and the two rates."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    parser.add_argument("--only", action="append", metavar="NAME", help="only this environment; may be repeated")
    parser.add_argument("--quick", action="store_true", help="only the probes that run before training")
    arguments = parser.parse_args()
    rows = []
    chosen = [e for e in (*HACKABLE, *CLEAN) if not arguments.only or e.name in arguments.only]
    for environment in chosen:
        row = measure(environment, quick=arguments.quick)
        rows.append(row)
        print(
            f"{'open ' if environment.flaw else 'sound'} {row['environment']:24} {', '.join(row['won']) or '-'}",
            flush=True,
        )
        if row["not_judged"]:
            print(f"      not judged: {', '.join(row['not_judged'])}")
    is_open = [row for row in rows if row["flaw"]]
    missed = [row for row in is_open if not row["won"]]
    accused = [row for row in rows if not row["flaw"] and row["won"]]
    print(f"open rewards found: {len(is_open) - len(missed)} of {len(is_open)}", end="; ")
    print(f"missed: {', '.join(row['environment'] for row in missed) or 'none'}")
    print(f"sound rewards accused: {len(accused)} of {len(rows) - len(is_open)}")
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")
    return 1 if accused or any(not row["needs_knowledge"] for row in missed) else 0


if __name__ == "__main__":
    sys.exit(main())

"""Threads that wait must not take the cores of the agents for long."""

import os
import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    ("given", "shown"),
    [({}, "GOMP_SPINCOUNT = '1000'"), ({"OMP_WAIT_POLICY": "active"}, "OMP_WAIT_POLICY = 'ACTIVE'"),
     ({"GOMP_SPINCOUNT": "77"}, "GOMP_SPINCOUNT = '77'")],
)  # fmt: skip
def test_threads_of_torch_spin_briefly_unless_the_user_says_otherwise(given: dict[str, str], shown: str) -> None:
    kept = {k: v for k, v in os.environ.items() if k not in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")}
    code = "import leyden.learning.backends.embedded.precision, torch; torch.ones(1)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=kept | given | {"OMP_DISPLAY_ENV": "verbose"},
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    )
    if "GOMP_SPINCOUNT" not in done.stderr:
        pytest.skip("this torch does not use libgomp, whose settings are shown")
    assert shown in done.stderr

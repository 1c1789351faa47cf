"""Threads that wait must not take the cores of the agents."""

import os
import subprocess
import sys

import pytest


@pytest.mark.parametrize(("given", "effective"), [(None, "PASSIVE"), ("active", "ACTIVE")])
def test_torch_is_loaded_with_sleeping_threads_unless_the_user_says_otherwise(
    given: str | None, effective: str
) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "OMP_WAIT_POLICY"} | {"OMP_DISPLAY_ENV": "true"}
    if given:
        environment["OMP_WAIT_POLICY"] = given
    code = "import leyden.learning.backends.embedded.precision, torch; torch.ones(1)"
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=100, check=True
    )
    if "OMP_WAIT_POLICY" not in done.stderr:
        pytest.skip("this torch does not use an OpenMP library that shows its settings")
    assert f"OMP_WAIT_POLICY = '{effective}'" in done.stderr

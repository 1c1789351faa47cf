"""Memory that is kept between updates."""

import subprocess
import sys
from pathlib import Path

import pytest

from leyden.learning.backends.embedded import memory

FAULTS = """
import resource

import leyden.learning.backends.embedded
import torch
from leyden.learning.backends.embedded import memory
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
def use(num):
    begun = faults()
    torch.ones(num)
    return faults() - begun
use(2**26)  # 256 MiB
again = use(2**24)  # 16,384 pages
memory.give_back()
print(again, use(2**24))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="a matter of glibc")
def test_memory_that_was_freed_is_there_for_the_next_update_until_it_is_given_back() -> None:
    done = subprocess.run([sys.executable, "-c", FAULTS], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    again, anew = (int(word) for word in done.stdout.split())
    assert again < 1000 and anew > again


def test_memory_is_given_back_only_where_it_is_scarce(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[bool] = []
    monkeypatch.setattr(memory, "give_back", lambda: given.append(True))
    for share, expected in ((0.5, 0), (0.1, 1)):
        monkeypatch.setattr(memory, "_share_available", lambda share=share: share)
        memory.give_back_if_scarce()
        assert len(given) == expected


@pytest.mark.skipif(not Path("/proc/meminfo").exists(), reason="the system does not say")
def test_the_share_that_is_available_is_what_the_system_says() -> None:
    assert 0.0 < memory._share_available() < 1.0

"""The embedded backend: torch in this process, on a CPU or one GPU; one set of parameters is sampled and trained.

Importing it sets `GOMP_SPINCOUNT=1000` unless that or `OMP_WAIT_POLICY` is set: threads of torch that wait for each
other spin for about 50 microseconds, the usual time between two operations, and then sleep. The default of libgomp is
300,000 turns, some 15 ms: with agents on the same two cores a waiting thread then keeps the core that the other one
needs, and an update of SmolLM2-135M took 40 s instead of 2 s. It has no effect where torch was imported before.

It also makes the process keep the memory that it frees (see `memory`).
"""

import os

from leyden.learning.backends.embedded import memory

if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")

memory.keep()

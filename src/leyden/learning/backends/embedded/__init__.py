"""The embedded backend: torch in this process, on a CPU or one GPU; one set of parameters is sampled and trained.

Importing it sets `OMP_WAIT_POLICY=passive` unless it is set: threads of torch that wait for each other then sleep
instead of spinning. Agents and verifiers run on the same cores. With one other busy process on two cores an update
of SmolLM2-135M took 40 s with spinning threads and 2 s with sleeping ones. It has no effect where torch was imported
before.
"""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

#!/bin/sh
# The checks that need a GPU, as one run of under ten minutes: gradient equality of all layouts, update time of
# padded, packed and tree, tokens per second of the sampler. Without a GPU it says so. Not run on a GPU yet.
EXTRAS=train,dev
. "$(dirname "$0")/venv.sh"
.venv/bin/python - <<'PY' || exit 0
import sys, torch
if not torch.cuda.is_available():
    print("no GPU here: nothing to check")
    sys.exit(1)
print(torch.cuda.get_device_name(0))
PY
.venv/bin/python -m pytest -q tests/unit/learning/backends/test_gradients.py
.venv/bin/python benchmarks/tree_update.py --quick
.venv/bin/python -c '
from leyden.cli.models import smollm2
from leyden.cli.progress import TextProgress
print(smollm2(TextProgress()))' | tail -n 1 >.venv/model-folder
.venv/bin/python benchmarks/sampler.py --quick --model "$(cat .venv/model-folder)"

#!/bin/sh
# The checks that need a GPU, as one run of under ten minutes: gradient equality of all layouts in bfloat16 on the
# device, update time of padded, packed and tree, and tokens per second of the sampler. Without a GPU it says so.
EXTRAS=train,dev
. "$(dirname "$0")/venv.sh"
.venv/bin/python - <<'PY' || exit 0
import sys, torch
if not torch.cuda.is_available():
    print("no GPU here: nothing to check")
    sys.exit(1)
print(torch.cuda.get_device_name(0))
PY
.venv/bin/python benchmarks/tree_update.py --device cuda "$@"
.venv/bin/python benchmarks/sampler.py --device cuda "$@"

#!/bin/sh
# The checks that need a GPU, as one run of under ten minutes: gradient equality of all layouts on the GPU, the speed of
# FlexAttention beside masks and packed rows, one update by layout, tokens a second of the sampler, seconds of a GRPO step
# with harness and gateway. Each part has a time limit and prints JSON last; a part that fails does not stop the others,
# and the script ends with 1.
#
#   scripts/gpu_check.sh [--cpu] [MODEL_FOLDER]
#
# --cpu runs the same parts at their smallest on a CPU, to see that they work. Without a folder SmolLM2-135M-Instruct is
# fetched. LEYDEN_PYTHON names an interpreter that has Leyden with the extra `train`; otherwise .venv is made. Not run on a
# GPU yet: docs/measured.md.
if [ -n "${LEYDEN_PYTHON:-}" ]; then
  set -eu
  cd "$(dirname "$0")/.."
  PY=$LEYDEN_PYTHON
else
  EXTRAS=train,dev
  . "$(dirname "$0")/venv.sh"
  PY=.venv/bin/python
fi
export PYTHONPATH="src${PYTHONPATH:+:$PYTHONPATH}"
CPU=
if [ "${1:-}" = --cpu ]; then
  CPU=--cpu
  export CUDA_VISIBLE_DEVICES=
  shift
elif ! "$PY" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
  echo "no GPU here: nothing to check (--cpu runs the parts at their smallest)"
  exit 0
fi
MODEL=${1:-}
if [ -z "$MODEL" ]; then
  MODEL=$("$PY" -c '
from leyden.cli.models import smollm2
from leyden.cli.progress import TextProgress
print(smollm2(TextProgress()))' | tail -n 1)
fi
FAILED=
part() {
  LIMIT_S=$1
  shift
  echo "== $*"
  timeout "$LIMIT_S" "$PY" "$@" || FAILED="$FAILED $1"
}
if [ -n "$CPU" ]; then
  part 120 benchmarks/gpu.py --cpu
  part 300 benchmarks/tree_update.py --quick --shapes 1
  part 300 benchmarks/sampler.py --only-leyden --requests 2 --prompt-tokens 20 --new-tokens 4 --repeats 1 --model "$MODEL"
else
  part 150 benchmarks/gpu.py
  part 120 benchmarks/tree_update.py
  part 120 benchmarks/sampler.py --quick --only-leyden --model "$MODEL"
  part 180 benchmarks/vs_trl.py --quick --no-peer --model "$MODEL"
fi
if [ -n "$FAILED" ]; then
  echo "failed or out of time:$FAILED"
  exit 1
fi
echo "all parts ran"

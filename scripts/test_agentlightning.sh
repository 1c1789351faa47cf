#!/bin/sh
# Runs the local controller of agentlightning 1.0.2, with an agent of its kind, against Leyden's gateway.
# Makes a virtual environment with Python 3.12 once, in .benchmark-venv or where LEYDEN_AGENTLIGHTNING_VENV says.
# Usage: scripts/test_agentlightning.sh [python that has Leyden's extra dev]
set -eu
root=$(cd "$(dirname "$0")/.." && pwd)
cd "$root"
python=${1:-${PYTHON:-python3}}
venv=${LEYDEN_AGENTLIGHTNING_VENV:-$root/.benchmark-venv/agentlightning}
if [ ! -f "$venv/ready" ]; then
    "$python" -c "
import sys
from pathlib import Path
from benchmarks.peers.agentlightning import python_of
sys.exit(0 if python_of(Path(sys.argv[1])) else 'there is no Python 3.12; install one, or name a virtual environment')
" "$venv"
fi
LEYDEN_AGENTLIGHTNING_VENV=$venv exec "$python" -m pytest -q -rs tests/contract/test_agentlightning.py

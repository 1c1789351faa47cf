#!/bin/sh
# Installs everything the tests need into .venv and runs all checks: lint, types, import fence, tests.
EXTRAS=train,dev
. "$(dirname "$0")/venv.sh"
sh scripts/postgres.sh
echo "== ruff" && .venv/bin/ruff check . && .venv/bin/ruff format --check .
echo "== mypy" && .venv/bin/mypy
echo "== import-linter" && .venv/bin/lint-imports
# One process of tests per core, up to four, each with one thread for its matrices: two threads of torch for a model of
# a few thousand weights cost more than they give.
export OMP_NUM_THREADS=1
echo "== pytest" && exec .venv/bin/python -m pytest -q --numprocesses=logical --maxprocesses=4 --dist=worksteal "$@"

#!/bin/sh
# Installs everything the tests need into .venv and runs all checks: lint, types, import fence, tests.
EXTRAS=train,dev
. "$(dirname "$0")/venv.sh"
echo "== ruff" && .venv/bin/ruff check . && .venv/bin/ruff format --check .
echo "== mypy" && .venv/bin/mypy
echo "== import-linter" && .venv/bin/lint-imports
echo "== pytest" && exec .venv/bin/python -m pytest -q "$@"

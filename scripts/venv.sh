# Sourced by the other scripts: makes .venv on first use and installs Leyden into it with the extras in $EXTRAS.
# torch is constrained to a CPU build here and not in the package, so that GPU users get the one they need.
set -eu
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-}
if [ -z "$PYTHON" ]; then
  for candidate in python3.11 python3.12 python3.13 python3; do
    if command -v "$candidate" >/dev/null 2>&1 &&
      "$candidate" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then
      PYTHON=$candidate
      break
    fi
  done
fi
if [ -z "$PYTHON" ]; then
  echo "No Python 3.11 or later with venv was found. Install one (Debian: apt-get install python3-venv) or set PYTHON=/path/to/python3." >&2
  exit 1
fi
[ -x .venv/bin/python ] || "$PYTHON" -m venv .venv
# Reinstall only when what decides the environment has changed: a second run starts at once.
STAMP=".venv/.installed-$(cat pyproject.toml scripts/constraints.txt | cksum | tr ' ' '-')-$(echo "$EXTRAS" | tr ',' '-')"
if [ ! -f "$STAMP" ]; then
  echo "Installing Leyden with [$EXTRAS] into .venv (a few minutes the first time; torch is the large part) ..."
  .venv/bin/python -m pip install --quiet --disable-pip-version-check --upgrade pip
  .venv/bin/python -m pip install --quiet --disable-pip-version-check --constraint scripts/constraints.txt --editable ".[$EXTRAS]"
  touch "$STAMP"
fi

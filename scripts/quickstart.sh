#!/bin/sh
# Installs Leyden into .venv and runs the main job: an agent learns SQL on this machine, with the proof at the end.
EXTRAS=train,example
. "$(dirname "$0")/venv.sh"
exec .venv/bin/leyden quickstart "$@"

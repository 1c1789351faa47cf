#!/bin/sh
# Runs a small tool agent of every framework in tests/integrations through the gateway, on a scripted engine.
# Each framework has a virtual environment of its own below $LEYDEN_CACHE/integrations (default ~/.cache/leyden), made
# once and kept. Prints a table of versions and results in Markdown; exits with 1 if an agent did not do what is expected.
# Usage: scripts/test_integrations.sh [NAME...]
# PYTHON names a Python that has Leyden's dependencies, FRAMEWORK_PYTHON one for the environments, by default the same.
set -u
root=$(cd "$(dirname "$0")/.." && pwd)
cd "$root" || exit 1
python=${PYTHON:-python3}
base=${FRAMEWORK_PYTHON:-$python}
cache=${LEYDEN_CACHE:-$HOME/.cache/leyden}/integrations
mkdir -p "$cache"
[ $# -gt 0 ] || set -- pydantic_ai openai_agents openai_agents_responses langgraph smolagents autogen crewai typescript
export PYTHONPATH="$root/src${PYTHONPATH:+:$PYTHONPATH}" PIP_DISABLE_PIP_VERSION_CHECK=1
results=$(mktemp)
trap 'rm -f "$results"' EXIT
failed=0

install() {
    # An environment that was made completely has the file `ready`.
    [ ! -f "$cache/$1/ready" ] || return 0
    if [ "$1" = typescript ]; then
        mkdir -p "$cache/$1"
        # The compiler finds types, and the program its package, beside the file.
        cp "tests/integrations/$1/package.json" "tests/integrations/$1/agent.ts" "$cache/$1/" || return 1
        (cd "$cache/$1" && npm install --silent && node_modules/.bin/tsc --target es2022 --module nodenext --strict \
            --types node --skipLibCheck --outDir built agent.ts) || return 1
    else
        # Without a pip and compiled files of its own an environment is made in a third of the time.
        "$base" -m venv --without-pip "$cache/$1" || return 1
        "$base" -m pip --python "$cache/$1/bin/python" install -q --no-compile \
            -r "tests/integrations/$1/requirements.txt" || return 1
    fi
    touch "$cache/$1/ready"
}

versions() {
    if [ "$1" = typescript ]; then
        (cd "$cache/$1" && node -p "'openai ' + JSON.parse(fs.readFileSync('node_modules/openai/package.json')).version")
        return
    fi
    names=$(sed 's/\[.*//' "tests/integrations/$1/requirements.txt")
    # shellcheck disable=SC2086 - one word per package
    "$cache/$1/bin/python" -c "
import sys
from importlib.metadata import version
print(', '.join(f'{name} {version(name)}' for name in sys.argv[1:]))" $names
}

command_of() {
    if [ "$1" = typescript ]; then
        echo "node $cache/$1/built/agent.js"
    else
        echo "$cache/$1/bin/python $root/tests/integrations/$1/agent.py"
    fi
}

for name in "$@"; do
    echo "== $name" >&2
    if [ "$name" = typescript ] && ! command -v npm >/dev/null; then
        echo "$name|-|not run: there is no npm" >>"$results"
        continue
    fi
    if ! install "$name" >&2; then
        echo "$name|-|not run: its packages could not be installed" >>"$results"
        failed=1
        continue
    fi
    # shellcheck disable=SC2046 - one word per word of the command
    said=$("$python" tests/integrations/check.py "$name" $(command_of "$name") 2>&1) || failed=1
    printf '%s\n' "$said" >&2
    result=$(printf '%s\n' "$said" | "$python" tests/integrations/check.py --summary)
    echo "$name|$(versions "$name")|$result" >>"$results"
done

echo
echo '| framework | versions | result |'
echo '|---|---|---|'
while IFS='|' read -r name found result; do
    echo "| $name | $found | $result |"
done <"$results"
exit "$failed"

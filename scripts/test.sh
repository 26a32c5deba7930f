#!/usr/bin/env bash
# Everything that must hold: format, lint, layers, types, tests. Arguments go to pytest.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
scripts/setup.sh dev
bin=$PWD/.venv/bin

# For the test on two hosts; without it, and without root, that one is skipped.
if [ "$(id -u)" = 0 ] && ! command -v ip >/dev/null && command -v apt-get >/dev/null; then
    apt-get -qq update && apt-get -qq install -y --no-install-recommends iproute2 >&2 ||
        echo "test: iproute2 could not be installed" >&2
fi

"$bin/ruff" format --check .
"$bin/ruff" check .
"$bin/lint-imports"
"$bin/mypy" -p stepahead
# Two at a time, each with one computing thread: tests wait for processes more than they compute.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
exec "$bin/pytest" -n 2 --dist loadfile "$@"

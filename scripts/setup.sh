#!/usr/bin/env bash
# Makes .venv in the checkout and installs stepahead with an extra: scripts/setup.sh [demo|dev|cpu|ray|trace].
# Does nothing when nothing has changed since the last time.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
extra=${1:-demo}
python=${PYTHON:-python3}

if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
    echo "setup: $python is missing or older than Python 3.10; set PYTHON to a newer one" >&2
    exit 1
fi
if ! "$python" -c 'import venv, ensurepip' 2>/dev/null; then
    echo "setup: $python has no venv module; on Debian and Ubuntu: apt-get install python3-venv" >&2
    exit 1
fi

# The editable install is a farm of links, one a file: a new file needs a new install.
stamp=.venv/.installed-$extra
state=$({ "$python" --version; cat pyproject.toml constraints.txt; find __init__.py config.py errors.py \
    engine_core executor frontend kernels worker -name '*.py' | sort; } | sha256sum)
if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$state" ]; then
    exit 0
fi
[ -x .venv/bin/python ] || "$python" -m venv .venv
echo "setup: installing stepahead[$extra] into .venv (a minute or two the first time)" >&2
.venv/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt \
    --config-settings editable_mode=strict -e ".[$extra]" >&2
echo "$state" >"$stamp"

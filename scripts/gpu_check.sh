#!/usr/bin/env bash
# Checks and measures the engine on a machine with a GPU that can download nothing, from a bare checkout:
#     scripts/gpu_check.sh [--out out/gpu_check] [--wheels DIR] [--device cuda|cpu] [--quick]
# Packages that Python lacks are taken from the wheels in DIR (default: .whl in the checkout). Takes 8 minutes at
# most, whatever is slow, failing or missing: that is a line in gpu_check.json, which is also printed last.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
exec "${PYTHON:-python3}" -B "$root/scripts/gpu_check.py" "$@"

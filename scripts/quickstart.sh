#!/usr/bin/env bash
# From a fresh checkout to an answer: scripts/quickstart.sh "What is the capital of France?"
# Sets up .venv, fetches a small demo model, and streams its answer; stderr says how the engine ran.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
question=${1:-What is the capital of France?}
[ $# -gt 0 ] || echo "quickstart: asking \"$question\"; your own: scripts/quickstart.sh \"QUESTION\"" >&2

"$root/scripts/setup.sh" demo
model=$("$root/.venv/bin/python" "$root/scripts/fetch_demo_model.py")
exec "$root/.venv/bin/stepahead" generate --model "$model" --chat --prompt "$question" --temperature 0 --max-tokens 128

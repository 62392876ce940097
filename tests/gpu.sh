#!/usr/bin/env bash
# What one GPU can test, in stages of 3 to 15 minutes at most; docs/gpu.md. Without a GPU: a line a stage, status 0.
#   bash tests/gpu.sh [STAGE ...] [--out DIR]    STAGE: a to h; --help says more
#   PYTHON=python3 bash tests/gpu.sh a b d       another Python than .venv's: torch >= 2.11 is enough for these
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
python=${PYTHON:-}
if [[ -z $python ]]; then
  python=$root/.venv/bin/python
  [[ -x $python ]] || python=python3
fi
command -v "$python" >/dev/null || { echo "tests/gpu.sh: no $python: set PYTHON" >&2; exit 2; }
exec "$python" "$root/tests/gpu/run.py" "$@"

#!/usr/bin/env bash
# Does requirements/cuda.lock hold together? Shown on any Linux x86_64 machine, without a GPU, installing nothing:
# uv resolves cuda.in with all dependencies under the lock's pins and must arrive at the lock again, and every package
# must have a wheel, so that nothing is compiled at installation, but for four whose archives are Python alone.
# A minute; only metadata is read.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

readonly python_alone=(deepspeed rouge-score sqlitedict word2number) # deepspeed compiles at first use, if at all
scripts/lock.sh cuda --check
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"${SG_PYTHON:-python3.11}" -m venv "$work/venv"
python=$work/venv/bin/python
"$python" -m pip install --quiet "$(grep '^uv==' requirements/common.in)"
uv_options=()
eval "$("$python" scripts/uv_settings.py)"
"$python" -m uv pip install --quiet --python "$python" --dry-run --no-deps --only-binary :all: \
  --require-hashes "${python_alone[@]/#/--no-binary=}" ${uv_options[@]+"${uv_options[@]}"} -r requirements/cuda.lock || {
  echo "check_cuda_lock: a package of cuda.lock has no wheel" >&2
  exit 1
}
if ! grep -q '^torch===' requirements/cuda.lock || ! grep -q '^nvidia-cublas==' requirements/cuda.lock; then
  echo "check_cuda_lock: cuda.lock has no CUDA build of torch" >&2
  exit 1
fi
echo "check_cuda_lock: ok: $(grep -c '^[a-zA-Z]' requirements/cuda.lock) packages resolve"

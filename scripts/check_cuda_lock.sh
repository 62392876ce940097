#!/usr/bin/env bash
# Does requirements/cuda.lock hold together? Shown on any Linux x86_64 machine, without a GPU, installing nothing:
# uv resolves cuda.in with all dependencies under the lock's pins and must arrive at the lock again, and the source
# archive of flash-attn must be there (it is compiled at installation, so it cannot be resolved here).
# Half a minute; only metadata is read.
# Last seen, 2026-11-23: "ok: 316 packages resolve, flash-attn==2.8.3 exists".
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

scripts/lock.sh cuda --check
flash_attn=$(grep '^flash-attn==' requirements/cuda-build.lock)
versions=$("${SG_PYTHON:-python3.11}" -m pip index versions flash-attn 2>/dev/null | grep '^Available versions:') || {
  echo "check_cuda_lock: pip cannot list the versions of flash-attn" >&2
  exit 1
}
grep -qE "[ ,]${flash_attn#flash-attn==}(,|\$)" <<<"$versions" || {
  echo "check_cuda_lock: $flash_attn is not among pip's versions" >&2
  exit 1
}
grep -q '^torch===' requirements/cuda.lock && grep -q '^nvidia-cublas==' requirements/cuda.lock || {
  echo "check_cuda_lock: cuda.lock has no CUDA build of torch" >&2
  exit 1
}
echo "check_cuda_lock: ok: $(grep -c '^[a-zA-Z]' requirements/cuda.lock) packages resolve, $flash_attn exists"

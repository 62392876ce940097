#!/usr/bin/env bash
# Builds the start models runs/forks/starts/{r,d}SEED, unless they are there. Arguments: the seeds [0 1 2].
# One thread: the number of threads decides how sums are rounded, and so the weights.
set -euo pipefail
cd "$(dirname "$0")/../.."
[ $# -gt 0 ] || set -- 0 1 2
for seed in "$@"; do
  for corpus in R D; do
    out=runs/forks/starts/${corpus,,}$seed
    [ -d "$out" ] || python -m sg_rlhf.tiny.build --domain "experiments.forks.corpora:$corpus" --seed "$seed" --threads 1 --out "$out"
  done
done

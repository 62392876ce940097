#!/usr/bin/env bash
# Builds the start models runs/forks/starts/{r,d}SEED, unless they are there. Arguments: the seeds [0 1 2].
# One thread each, two at a time: the number of threads decides how sums are rounded, and so the weights.
set -euo pipefail
cd "$(dirname "$0")/../../.."
build() {
  local out=runs/forks/starts/${1,,}$2
  [ -d "$out" ] || sg-rlhf tiny --domain "lab.experiments.forks.corpora:$1" --seed "$2" --threads 1 --out "$out"
}
[ $# -gt 0 ] || set -- 0 1 2
for seed in "$@"; do
  build R "$seed" & first=$!
  build D "$seed"
  wait $first
done

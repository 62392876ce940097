#!/usr/bin/env bash
# GRPO-SG on Knights & Knaves, from nothing to a trained checkpoint and its plots.
#
#   bash examples/scripts/train_grpo_sg_kk.sh [key=value ...] [--dry-run]
#
# With 8 GPUs it runs the paper's recipe, with one a reduced one, without it trains a tiny model
# through the same pipeline in minutes. Any recipe key can be overridden: actor.adam.lr=1e-4.
#
#   SG_HARDWARE=cpu|1xgpu|8xh100   instead of what nvidia-smi finds
#   SG_CONFIG=FILE                 another recipe than the hardware's
#   SG_RUN_DIR=DIR                 where the run goes (started again there, it resumes)
#   SG_KK_PARQUET="FILE ..."       train on these puzzle files instead of generated ones
set -euo pipefail
cd "$(dirname "$0")/../.."
./scripts/bootstrap.sh
python=.venv/bin/python

# shellcheck source=examples/scripts/common.sh
source examples/scripts/common.sh
case $hardware in
  8xh100) config=configs/kk/grpo_sg_qwen2.5-3b-instruct.yaml data=data/kk
    puzzles=(people=3-7 per_size=900 test_per_size=100 seed=0) ;;
  1xgpu) config=configs/kk/grpo_sg_1xgpu.yaml data=data/kk
    puzzles=(people=3-7 per_size=900 test_per_size=100 seed=0) ;;
  cpu) config=configs/kk/grpo_sg_tiny_cpu.yaml data=data/kk_tiny
    puzzles=(people=2-3 per_size=160 test_per_size=100 seed=0 distinct=names) ;;
esac
config=${SG_CONFIG:-$config}
run=${SG_RUN_DIR:-runs/$(basename "$config" .yaml)}

if [[ -n ${SG_KK_PARQUET:-} ]]; then
  data=$data-parquet
  # shellcheck disable=SC2086  # several files, separated by spaces
  "$python" -m sg_rlhf.data kk --out "$data" --parquet $SG_KK_PARQUET
else
  "$python" -m sg_rlhf.data kk --out "$data" --generate "${puzzles[@]}"
fi
"$python" -m sg_rlhf.train --config "$config" --run-dir "$run" \
  data.prompt_dataset="$data/train.jsonl" eval.dataset="$data/test.jsonl" "$@"
for argument in "$@"; do [[ $argument == --dry-run ]] && exit 0; done
report_run "$run"

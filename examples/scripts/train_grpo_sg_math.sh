#!/usr/bin/env bash
# GRPO-SG on mathematics, from nothing to a trained checkpoint and its plots.
#
#   bash examples/scripts/train_grpo_sg_math.sh [key=value ...] [--dry-run]
#
# With 8 GPUs of 80 GB it runs the paper's recipe on DSR-Uniform, with fewer or smaller ones the same
# in smaller micro-batches or, where its model does not fit, a reduced one. Without a GPU it trains a
# tiny model on generated arithmetic through the same pipeline in minutes. Any recipe key can be
# overridden: actor.adam.lr=1e-4.
#
#   SG_HARDWARE=8x80gb             instead of what nvidia-smi finds: cpu, COUNTx{24,40,80}gb,
#                                  COUNTxTYPE (8xh200), 2x8x80gb (two nodes), 1xgpu (reduced)
#   SG_CONFIG=FILE                 another recipe than the hardware's
#   SG_RUN_DIR=DIR                 where the run goes (started again there, it resumes)
#   SG_MATH_SOURCE=SOURCE          train on this instead: orz57k or a file (sg_rlhf.data math --help)
set -euo pipefail
cd "$(dirname "$0")/../.."

# shellcheck source=examples/scripts/common.sh
source examples/scripts/common.sh
published=(--eval-dir data/math_eval --download-eval)
data=data/math_dsr source=(--source dsr_uniform "${published[@]}")
case $models in
  8b) recipe=configs/math/grpo_sg_dsr_qwen2.5-7b.yaml ;;
  1b | 3b) recipe=configs/math/grpo_sg_1xgpu.yaml ;;
  tiny) recipe=configs/math/grpo_sg_tiny_cpu.yaml data=data/math_tiny
    source=(--source arithmetic --generate count=320 test_count=200 seed=0) ;;
esac
choose_recipe "$recipe"
case $config in *_orz_*) data=data/math_orz source=(--source orz57k "${published[@]}") ;; esac
export SG_RUN_DIR=${SG_RUN_DIR:-runs/math_$(basename "$config" .yaml)}
run=$SG_RUN_DIR
evaluation=()                      # the recipe's own sets

if [[ -n ${SG_MATH_SOURCE:-} ]]; then
  # One folder per source, and held-out problems to evaluate on.
  data=data/math_$(basename "${SG_MATH_SOURCE%.*}")
  source=(--source "$SG_MATH_SOURCE" --dedup --test-fraction 0.02)
  evaluation=("sg.eval_sets=[]" "eval.dataset=$data/test.jsonl")
fi
./scripts/bootstrap.sh
python=.venv/bin/python
"$python" -m sg_rlhf.data math --out "$data" "${source[@]}"
"$python" -m sg_rlhf.train "${configs[@]}" --run-dir "$run" \
  data.prompt_dataset="$data/train.jsonl" "${evaluation[@]}" "$@"
for argument in "$@"; do [[ $argument == --dry-run ]] && exit 0; done
report_run "$run"

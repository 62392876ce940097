#!/usr/bin/env bash
# GRPO-SG on Knights & Knaves, from nothing to a trained checkpoint and its plots.
#
#   bash examples/scripts/train_grpo_sg_kk.sh [key=value ...] [--dry-run]
#
# With 8 GPUs of 80 GB it runs the paper's recipe, with fewer or smaller ones the same in smaller
# micro-batches or, where its model does not fit, a reduced one; without a GPU it trains a tiny model
# through the same pipeline in minutes. Any recipe key can be overridden: actor.adam.lr=1e-4.
#
#   SG_HARDWARE=8x80gb             instead of what nvidia-smi finds: cpu, COUNTx{24,40,80}gb,
#                                  COUNTxTYPE (8xh200), 2x8x80gb (two nodes), 1xgpu (reduced)
#   SG_CONFIG=FILE                 another recipe than the hardware's
#   SG_RUN_DIR=DIR                 where the run goes (started again there, it resumes)
#   SG_KK_PARQUET="FILE ..."       train on these puzzle files instead of generated ones
#   SG_KK_CHAT_TEMPLATE=MODEL      write the prompts through this model's chat template; needed for
#                                  models without ChatML, and set for the recipes of this folder
set -euo pipefail
cd "$(dirname "$0")/../.."

# shellcheck source=examples/scripts/common.sh
source examples/scripts/common.sh
data=data/kk puzzles=(people=3-7 per_size=900 test_per_size=100 seed=0)
case $models in
  3b | 8b) recipe=configs/kk/grpo_sg_qwen2.5-3b-instruct.yaml ;;
  1b) recipe=configs/kk/grpo_sg_1xgpu.yaml ;;
  tiny) recipe=configs/kk/grpo_sg_tiny_cpu.yaml data=data/kk_tiny
    puzzles=(people=2-3 per_size=160 test_per_size=100 seed=0 distinct=names) ;;
esac
choose_recipe "$recipe"
export SG_RUN_DIR=${SG_RUN_DIR:-runs/kk_$(basename "$config" .yaml)}
run=$SG_RUN_DIR

template=${SG_KK_CHAT_TEMPLATE:-}
if [[ -z $template ]]; then
  case $config in
    *mistral-7b-instruct-v0.3.yaml) template=mistralai/Mistral-7B-Instruct-v0.3 ;;
    *llama-3.1-8b-instruct.yaml) template=meta-llama/Llama-3.1-8B-Instruct ;;
  esac
fi
prompts=()
if [[ -n $template ]]; then
  name=$(basename "$template")
  data=${data}_${name,,} prompts=(--chat-template "$template")
fi

./scripts/bootstrap.sh
python=.venv/bin/python
if [[ -n ${SG_KK_PARQUET:-} ]]; then
  data=$data-parquet
  # shellcheck disable=SC2086  # several files, separated by spaces
  "$python" -m sg_rlhf.data kk --out "$data" --parquet $SG_KK_PARQUET "${prompts[@]}"
else
  "$python" -m sg_rlhf.data kk --out "$data" --generate "${puzzles[@]}" "${prompts[@]}"
fi
"$python" -m sg_rlhf.train "${configs[@]}" --run-dir "$run" \
  data.prompt_dataset="$data/train.jsonl" eval.dataset="$data/test.jsonl" "$@"
for argument in "$@"; do [[ $argument == --dry-run ]] && exit 0; done
report_run "$run"

#!/usr/bin/env bash
# GRPO-SG on questions with a search engine, from nothing to a trained checkpoint and its plots.
#
#   bash examples/scripts/train_grpo_sg_search.sh [key=value ...] [--dry-run]
#
# With 8 GPUs of 80 GB it runs the paper's recipe, with fewer or smaller ones the same in smaller
# micro-batches or, where its model does not fit, a reduced one; without a GPU it trains a tiny model
# on a generated encyclopedia through the same pipeline in minutes. It starts a retriever for the
# length of the run, unless one is named. Any recipe key can be overridden: actor.adam.lr=1e-4.
#
#   SG_HARDWARE=8x80gb             instead of what nvidia-smi finds: cpu, COUNTx{24,40,80}gb,
#                                  COUNTxTYPE (8xh200), 2x8x80gb (two nodes), 1xgpu (reduced)
#   SG_CONFIG=FILE                 another recipe than the hardware's
#   SG_RUN_DIR=DIR                 where the run goes (started again there, it resumes)
#   SG_RETRIEVER_URL=URL           a running retriever, http://HOST:PORT/retrieve; none is started
#   SG_INDEX=DIR                   a built index (python -m sg_rlhf.retrieval.index) to serve
#   SG_PORT=PORT                   of the retriever that is started [8000]
#   SG_QA_FILES="FILE ..."         train on these question files (.parquet or .jsonl)
#   SG_QA_REVISION=COMMIT          or on the published set at this commit of the hub
set -euo pipefail
cd "$(dirname "$0")/../.."

# shellcheck source=examples/scripts/common.sh
source examples/scripts/common.sh
data=data/search
case $models in
  3b | 8b) recipe=configs/search/grpo_sg_qwen2.5-3b.yaml ;;
  1b) recipe=configs/search/grpo_sg_1xgpu.yaml ;;
  tiny) recipe=configs/search/grpo_sg_tiny_cpu.yaml data=data/search_tiny ;;
esac
choose_recipe "$recipe"
export SG_RUN_DIR=${SG_RUN_DIR:-runs/search_$(basename "$config" .yaml)}
run=$SG_RUN_DIR
index=${SG_INDEX:-} url=${SG_RETRIEVER_URL:-} port=${SG_PORT:-8000}

# What is missing is said before anything is installed or downloaded.
[[ -f $config ]] || refuse "$config: no such recipe"
if [[ -z $url && -n $index && ! -d $index ]]; then
  refuse "SG_INDEX=$index: no such folder; build it with .venv/bin/python -m sg_rlhf.retrieval.index"
fi
if [[ $hardware != cpu ]]; then
  [[ -n ${SG_QA_FILES:-}${SG_QA_REVISION:-} ]] ||
    refuse "name the questions: SG_QA_FILES=\"FILE ...\", or SG_QA_REVISION=COMMIT of the published set"
  [[ -n $url$index ]] ||
    refuse "name a search engine: SG_INDEX=DIR to serve, or SG_RETRIEVER_URL=http://HOST:PORT/retrieve"
fi

./scripts/bootstrap.sh
python=.venv/bin/python

if [[ -n ${SG_QA_FILES:-} ]]; then
  data=$data-files
  # shellcheck disable=SC2086  # several files, separated by spaces
  "$python" -m sg_rlhf.data search --out "$data" --source $SG_QA_FILES
elif [[ -n ${SG_QA_REVISION:-} ]]; then
  # 0.3 % of 170k questions: an evaluation is to cost about as much as a rollout.
  "$python" -m sg_rlhf.data search --out "$data" --source nq_hotpotqa \
    --revision "$SG_QA_REVISION" --test-fraction 0.003
else
  "$python" -m sg_rlhf.data search --out "$data" --source encyclopedia \
    --generate people=200 towns=48 seed=0
fi

server=
stop_server() {
  status=$?
  trap - EXIT INT TERM
  if [[ -n $server ]] && kill -0 "$server" 2>/dev/null; then
    kill -TERM "$server" 2>/dev/null || true
    for _ in {1..50}; do kill -0 "$server" 2>/dev/null || break; sleep 0.1; done
    kill -KILL "$server" 2>/dev/null || true
    wait "$server" 2>/dev/null || true
  fi
  exit "$status"
}

training=
interrupted() {
  # The run ends its own processes on this signal; the server goes when it is done.
  trap '' INT TERM
  if [[ -n $training ]]; then
    kill "-$1" "$training" 2>/dev/null || true
    # A run that has hardly started does not listen to SIGINT yet.
    for _ in {1..300}; do kill -0 "$training" 2>/dev/null || break; sleep 0.1; done
    kill -TERM "$training" 2>/dev/null || true
    wait "$training" 2>/dev/null || true
  fi
  exit "$2"
}
trap stop_server EXIT
trap 'interrupted INT 130' INT
trap 'interrupted TERM 143' TERM

dry=
for argument in "$@"; do if [[ $argument == --dry-run ]]; then dry=1; fi; done
if [[ -z $url ]]; then
  url=http://127.0.0.1:$port/retrieve
  if [[ -z $dry ]]; then
    if [[ -z $index ]]; then
      index=$data/index
      [[ -d $index ]] || "$python" -m sg_rlhf.retrieval.index --corpus "$data/corpus.jsonl" \
        --encoder bm25 --out "$index"
    fi
    if (exec 3<>"/dev/tcp/127.0.0.1/$port") 2>/dev/null; then
      refuse "SG_PORT=$port: something already listens there; choose another, or set SG_RETRIEVER_URL"
    fi
    # Not in the run directory: another run may be there, which training refuses later.
    log=$data/retriever_$port.log
    "$python" -m sg_rlhf.retrieval.server --index "$index" --port "$port" >"$log" 2>&1 &
    server=$!
    echo "waiting for the retriever on port $port (log: $log)"
    until "$python" -c "import sys, httpx
sys.exit(not httpx.get(sys.argv[1], trust_env=False).is_success)" \
      "http://127.0.0.1:$port/health" 2>/dev/null; do
      if ! kill -0 "$server" 2>/dev/null; then
        tail -n 5 "$log" >&2
        refuse "the retriever ended before it answered"
      fi
      sleep 1
    done
  fi
fi

# In the background, so that a signal is handled at once and not when the run is over.
"$python" -m sg_rlhf.train "${configs[@]}" --run-dir "$run" sg.search.url="$url" \
  data.prompt_dataset="$data/train.jsonl" eval.dataset="$data/test.jsonl" "$@" &
training=$!
wait "$training"
training=
[[ -n $dry ]] && exit 0
report_run "$run"

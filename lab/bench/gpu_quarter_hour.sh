#!/usr/bin/env bash
# What a quarter of an hour with one GPU measures, on a machine without internet. May be cut off at any moment.
#   bash lab/bench/gpu_quarter_hour.sh [PART ...]      PART: head zero decode train; all of them in this order
#
# Before, where there is internet: python lab/bench/gpu_kit.py --have pip_list.txt. Slices of the kit may arrive one by one, in
# KIT: a part whose packages are not complete is left for the next call, and one that is done is not run again.
# Results are written as they come, to OUT: parts.log (a line per part), NAME.log, the JSON files, metrics of the training.
#   PYTHON  a Python with PyTorch [.venv/bin/python, else python3]      DEVICE  cuda or cpu, a rehearsal in small [cuda]
#   KIT     the slices [out/gpu_kit]      SITE  where they are unpacked [/tmp/sg_gpu_kit]      OUT  [out/gpu_quarter_hour]
# On a CPU the packages must be installed: no kit is used.
set -uo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd -P)
cd "$root" || exit 2
python=${PYTHON:-.venv/bin/python}
[[ -n ${PYTHON:-} || -x $python ]] || python=python3
command -v "$python" >/dev/null || { echo "gpu_quarter_hour: no $python: set PYTHON" >&2; exit 2; }
device=${DEVICE:-cuda} kit=${KIT:-out/gpu_kit} site=${SITE:-/tmp/sg_gpu_kit} out=${OUT:-out/gpu_quarter_hour}
[[ $device == cuda || $device == cpu ]] || { echo "gpu_quarter_hour: DEVICE=$device: expected cuda or cpu" >&2; exit 2; }
for part in "$@"; do
  [[ " head zero decode train " == *" $part "* ]] ||
    { echo "gpu_quarter_hour: $part: expected head, zero, decode or train" >&2; exit 2; }
done
mkdir -p "$out" "$site"
export PYTHONPATH=$site:$root PYTHONUNBUFFERED=1 SG_SKIP_DOCTOR=1 SG_PLATFORM=$device HF_HUB_OFFLINE=1

say() { printf '%s %s\n' "$(date -u +%H:%M:%S)" "$*" | tee -a "$out/parts.log"; }

# unpack ARCHIVE: once, when all of its slices are there.
unpack() {
  local parts=("$kit/$1".[0-9][0-9])
  [[ -e $site/.$1 || $device == cpu ]] && return 0
  [[ -f $kit/$1.count && -e ${parts[0]} && ${#parts[@]} -eq $(<"$kit/$1.count") ]] || return 1
  cat "${parts[@]}" | "$python" -c '
import sys, tarfile
tarfile.open(fileobj=sys.stdin.buffer, mode="r|xz").extractall(sys.argv[1], filter="tar")' "$site" || return 1
  touch "$site/.$1"
  say "unpacked $1"
}

# part NAME SECONDS ARCHIVES -- COMMAND: run it with that limit, unless it is done or its packages are not complete.
part() {
  local name=$1 limit=$2 began=$SECONDS status archive
  shift 2
  [[ " $wanted " == *" $name "* ]] || return 0
  [[ -e $out/.$name ]] && { say "$name: done before"; return 0; }
  while [[ $1 != -- ]]; do
    archive=$1
    shift
    wait "${unpacking[$archive]:-}" 2>/dev/null
    [[ -e $site/.$archive || $device == cpu ]] || { say "$name: waits for slices of $archive"; return 0; }
  done
  shift
  timeout -k 20 "$limit" "$@" >"$out/$name.log" 2>&1
  status=$?
  # Ended at its limit, it has measured what it could.
  [[ $status -eq 0 || $status -eq 124 ]] && touch "$out/.$name"
  say "$name: status $status, $((SECONDS - began)) s"
}

# What the run logs comes to OUT.
keep() {
  mkdir -p "$out/run"
  cp "$site"/run/{metrics,optimizer_steps}.jsonl "$site"/run/{config.yaml,environment.json} \
    "$site"/run/eval/eval.jsonl "$site"/run/logs/phases.jsonl "$out/run" 2>/dev/null
}

wanted=${*:-head zero decode train}
declare -A unpacking=()
say "start: $device, $("$python" -c 'import torch; print(torch.__version__, torch.cuda.get_device_name() if torch.cuda.is_available() else "")')"
unpack trainer
for archive in engine model; do
  unpack $archive &
  unpacking[$archive]=$!
done

(while sleep 20; do keep; done) &
keeper=$!
trap 'keep; kill $keeper' EXIT

if [[ $device == cuda ]]; then
  part head 75 -- bash tests/gpu.sh b --out "$out"
  part zero 90 trainer -- "$python" lab/bench/zero_stages.py --models Qwen/Qwen2.5-3B-Instruct --stages 3 3leaf 2 1 \
    --samples 2 8 16 --offload both --out "$out/zero_stages.json"
  part decode 150 trainer engine -- "$python" lab/bench/decode_profile.py --out "$out/decode_profile.json"
  "$python" -m sg_rlhf data arithmetic --out "$site/arithmetic" >"$out/data.log" 2>&1
  part train 480 trainer engine model -- "$python" -m sg_rlhf.train \
    --config configs/arithmetic/grpo_smollm2-135m.yaml --config algorithm:grpo_sg --run-dir "$site/run" \
    actor.model_name_or_path="$site/smollm2-135m" data.prompt_dataset="$site/arithmetic/train.jsonl" \
    eval.dataset="$site/arithmetic/test.jsonl" eval.steps=1000 ckpt.save_steps=1000 sg.wandb=disabled
else
  part head 300 -- bash tests/gpu.sh b --device cpu --out "$out"
  part zero 300 trainer -- "$python" lab/bench/zero_stages.py --device cpu --models Qwen/Qwen2.5-0.5B-Instruct --layers 1 \
    --stages 3 3leaf 2 1 --samples 1 --tokens 16 --repeats 1 --out "$out/zero_stages.json"
  part decode 300 trainer engine -- "$python" lab/bench/decode_profile.py --device cpu --model small --sequences 4 8 \
    --prompt 32 --context 256 --steps 5 --out "$out/decode_profile.json"
  part train 500 trainer engine model -- "$python" -m sg_rlhf.train \
    --config configs/kk/grpo_sg_tiny_cpu.yaml --run-dir "$site/run" data.max_samples=32 eval.steps=1000 sg.wandb=disabled
fi
say "end"

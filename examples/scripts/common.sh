# shellcheck shell=bash
# Sourced by the training scripts, before anything is installed: sets `hardware` to a name of
# configs/hardware and `models` to the largest models that it holds (tiny, 1b, 3b, 8b); choose_recipe
# sets `config` and `configs`; report_run ends the scripts.
# SG_HARDWARE says which; without it, what nvidia-smi finds. SG_HOST_MEMORY_GIB: the host's memory,
# where a limit of the cluster is not seen.

refuse() { echo "error: $*" >&2; exit 2; }

# MiB of every GPU that a run would see, a line each; nothing without one. A MIG slice counts as a GPU.
gpu_memory() {
  local listed
  # A line "GPU 0: ..." each, its MIG slices below it; "No devices found" is a line too.
  listed=$(nvidia-smi -L 2>/dev/null || true)
  if grep -q '^ *MIG ' <<<"$listed"; then
    # CUDA gives a process one slice, however many there are. "MIG 3g.40gb", "MIG 1g.10gb+me".
    sed -n 's/^ *MIG [0-9]*[gc.0-9]*g\.\([0-9]*\)gb.*/\1/p' <<<"$listed" | sort -n | head -n 1 |
      while read -r gb; do echo $((gb * 1000)); done
  elif grep -q '^GPU ' <<<"$listed"; then
    local chosen=()
    if [[ -n ${CUDA_VISIBLE_DEVICES:-} ]]; then chosen=(-i "${CUDA_VISIBLE_DEVICES%%,-1*}"); fi
    nvidia-smi "${chosen[@]}" --query-gpu=memory.total --format=csv,noheader,nounits 2>/dev/null || true
  fi
}

# SG_HARDWARE's value for this machine, and on stderr what it leaves unused.
find_hardware() {
  local memory count smallest size
  # Set but empty, or -1: the caller hides the GPUs, as by -1 those behind it.
  case ${CUDA_VISIBLE_DEVICES-unset} in "" | -1*) echo cpu; return ;; esac
  mapfile -t memory < <(gpu_memory)
  count=${#memory[@]}
  if ((count == 0)); then echo cpu; return; fi
  smallest=$(printf '%s\n' "${memory[@]}" | sort -n | head -n 1 | tr -d ' ')
  [[ $smallest =~ ^[0-9]+$ ]] || refuse "nvidia-smi does not tell the GPUs' memory (it says" \
    "'$smallest'): name them, as SG_HARDWARE=1x80gb"
  if ((smallest >= 75000)); then size=80
  elif ((smallest >= 39000)); then size=40
  elif ((smallest >= 22000)); then size=24
  else
    refuse "the smallest GPU has $smallest MiB, and the smallest recipe is made for 24 GB:" \
      "SG_HARDWARE=cpu trains a tiny model without a GPU, SG_HARDWARE=1xgpu tries the recipe for one" \
      "of 24 GB, and CUDA_VISIBLE_DEVICES chooses among several"
  fi
  echo "$(used_of "$count")x${size}gb"
}

used_of() { # COUNT: how many of so many GPUs are used
  local used=1
  while ((used * 2 <= $1 && used < 8)); do used=$((used * 2)); done
  if ((used < $1)); then
    echo "using $used of $1 GPUs: a rollout's batches divide over 1, 2, 4 or 8" >&2
  fi
  echo "$used"
}

# NAME, such as 3x80gb, 8xh200 or 2x8xh200: that of the settings for it, or NAME itself.
settings_of() {
  local name=${1,,} size nodes=
  if [[ $name =~ ^2x8x ]]; then nodes=2x name=${name#2x}; fi
  if [[ $nodes$name == 8xh100 || ! $name =~ ^([1-9][0-9]{0,3})x([a-z0-9-]+)$ ]]; then echo "$1"; return; fi
  case ${BASH_REMATCH[2]} in
    80gb | a100 | a800 | h100-pcie | h100 | h800 | h200 | b200) size=80 ;;
    40gb | a100-40gb | l40s | 6000ada | a6000 | a40) size=40 ;;
    24gb | 5090 | 4090 | 3090 | l4 | a10) size=24 ;;
    *) echo "$1"; return ;;
  esac
  echo "$nodes$(used_of "${BASH_REMATCH[1]}")x${size}gb"
}

# GiB of memory that a run may use: the machine's, or its container's where that is less.
host_gib() {
  local kib file limit
  kib=$(awk '/^MemTotal:/ { print $2 }' /proc/meminfo)
  for file in /sys/fs/cgroup/memory.max /sys/fs/cgroup/memory/memory.limit_in_bytes; do
    # "max" and version 1's huge number are no limits.
    limit=$(cat "$file" 2>/dev/null || true)
    if [[ $limit =~ ^[0-9]{1,15}$ ]] && ((limit / 1024 < kib)); then kib=$((limit / 1024)); fi
  done
  echo $((kib / 1024 / 1024))
}

# Optimizer states, the sleeping engines' weights and Python itself are in host memory: GiB that the
# largest models need with so many GPUs (fitted to sg_rlhf.plan, which has the sum in detail).
fit_host() {
  local gib size need count=${hardware%%x*}
  gib=${SG_HOST_MEMORY_GIB:-$(host_gib)}
  [[ $gib =~ ^[0-9]{1,9}$ ]] || refuse "SG_HOST_MEMORY_GIB=$gib: expected a whole number of GiB"
  for size in 8b 3b; do
    [[ $models == "$size" ]] || continue
    if [[ $size == 8b ]]; then need=$((160 + 36 * count)); else need=$((67 + 20 * count)); fi
    ((gib < need)) || return 0
    echo "host memory: $gib GiB, and ${size^^} parameters on ${count} GPU(s) need about $need" >&2
    if [[ $size == 8b ]]; then models=3b; else models=1b; fi
  done
}

hardware=${SG_HARDWARE:-}
if [[ -z $hardware ]]; then hardware=$(find_hardware); else hardware=$(settings_of "$hardware"); fi
case $hardware in
  cpu) models=tiny ;;
  1xgpu | [12]x24gb) models=1b ;;
  [48]x24gb | [12]x40gb) models=3b ;;
  [48]x40gb | [1248]x80gb | 8xh100 | 2x8x80gb) models=8b ;;
  *) refuse "SG_HARDWARE=$hardware: expected cpu, COUNTx{24,40,80}gb such as 8x80gb, COUNTxTYPE such as" \
    "8xh200, 2x8x80gb (nodes x GPUs) or 1xgpu" ;;
esac

# A name that is given may be another machine's.
if [[ -z ${SG_HARDWARE:-} ]]; then fit_host; fi

# RECIPE: sets `config` to it, or to SG_CONFIG; and `configs` to the flags of the training command,
# which name the hardware last, so that it wins over what the recipe extends.
choose_recipe() {
  config=${SG_CONFIG:-$1}
  configs=(--config "$config")
  # A recipe of the user's own brings its hardware, unless one is asked for.
  case $config in
    *_cpu.yaml) return ;;
    configs/* | ./configs/*) ;;
    *) [[ -n ${SG_HARDWARE:-} ]] || return 0 ;;
  esac
  if [[ $hardware != cpu ]]; then configs+=(--config "configs/hardware/$hardware.yaml"); fi
  echo "hardware: $hardware; recipe: $config"
  if [[ -z ${SG_CONFIG:-} && $config == *_1xgpu.yaml ]]; then
    echo "the paper's model does not fit: this is a reduced recipe (docs/running.md)"
  fi
}

report_run() { # RUN_DIR: its figures on the terminal, its page, and what comes next
  # shellcheck disable=SC2154  # the caller's
  "$python" -m sg_rlhf.report.summary "$1"
  "$python" -m sg_rlhf.report "$1"
  echo "next: another setting, in a directory of its own:"
  echo "  SG_RUN_DIR=${1%/}_lr1e-4 bash $0 actor.adam.lr=1e-4"
}

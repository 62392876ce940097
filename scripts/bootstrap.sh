#!/usr/bin/env bash
# Make .venv in the repository root: Python 3.11 with every package of requirements/{cpu,cuda}.lock, and this project.
#
#   scripts/bootstrap.sh                      cuda where nvidia-smi lists a GPU, else cpu
#   SG_HARDWARE=cpu|cuda|8x80gb|... ...       choose instead; an environment once made keeps its kind until then
#   SG_PYTHON=/path/to/python3.11 ...         choose the interpreter
#   SG_VENV=.cache/cuda ...                   make another folder of the checkout than .venv
#
# Callers run it first and then use .venv/bin/python. Up to date it prints nothing and takes a moment; two at once
# wait for each other; an interrupted one is begun again by the next run. uv installs, from where pip is configured to
# (indexes, proxies, PIP_* variables: scripts/uv_settings.py), and from what UV_* variables say; all output is in
# .venv/bootstrap.log. .venv may be a link to a folder on a larger disk: an empty one, or one that does not exist yet.
# Exit status: 2 when the machine lacks something, 1 when an installation step fails.
# The words of ours that go unquoted (venv, log, lock, kind) have no spaces.
# shellcheck disable=SC2086,SC2206
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
cd "$root"
# Another environment must not leak into this one, nor pip be sent elsewhere.
unset VIRTUAL_ENV PYTHONPATH PYTHONHOME PYTHONSTARTUP PIP_TARGET PIP_PREFIX PIP_ROOT PIP_USER PIP_PYTHON
unset PIP_REQUIREMENT PIP_CONSTRAINT PIP_REQUIRE_VIRTUALENV CONDA_PREFIX UV_SYSTEM_PYTHON UV_CONSTRAINT UV_OVERRIDE
unset UV_REQUIRE_HASHES UV_RESOLUTION UV_TORCH_BACKEND PYTHONDONTWRITEBYTECODE

readonly venv=${SG_VENV:-.venv}
readonly log=$venv/bootstrap.log stamp=$venv/.sg_stamp owner=$venv/.sg_checkout
readonly cpu_disk_gb=6 cpu_disk_gb_with_cuda_torch=10 cuda_disk_gb=30
uv_options=()

say() { printf 'bootstrap: [%3d s] %s\n' "$SECONDS" "$*"; }

# The machine lacks something: one line that says what, and how to get it.
refuse() {
  printf 'bootstrap: %s\n' "$*" >&2
  exit 2
}

# A step failed: the end of its output.
fail() {
  tail -n 25 $log | sed 's/^/  | /' >&2
  printf 'bootstrap: failed after %d s: %s; all output: %s\n' "$SECONDS" "$*" "$root/$log" >&2
  exit 1
}

interrupted() {
  local group
  # The command's own group; bash may list a `sleep` of ours too, which is in no group of its own.
  for group in $(jobs -p); do
    kill -TERM -- "-$group" 2>/dev/null || continue
    wait "$group" || true
  done
  say "interrupted; the next run begins again" >&2
  exit 130
}

# run COMMAND...: its output into the log, a sign of life every 30 s.
run() {
  local child begun=$SECONDS said=$SECONDS pause=0.02
  printf '\n$ %s\n' "$*" >>$log
  # In a process group of its own, so that `interrupted` stops what it started too.
  set -m
  "$@" >>$log 2>&1 </dev/null &
  child=$!
  set +m
  while kill -0 $child 2>/dev/null; do
    sleep $pause
    # A short step is noticed at once; a long one is asked rarely.
    if [ $SECONDS -gt $((begun + 1)) ]; then pause=0.2; fi
    if [ $SECONDS -ge $((said + 30)) ]; then
      said=$SECONDS
      say "  $(tail -n 1 $log | cut -c1-70)"
    fi
  done
  wait $child
}

# uv ARGUMENTS...: `uv pip install` into .venv.
uv() {
  run $venv/bin/python -m uv pip install --python $venv/bin/python ${uv_options[@]+"${uv_options[@]}"} "$@"
}

uv_install() {
  uv "$@" || fail "uv pip install $*"
}

# An environment keeps its kind unless SG_HARDWARE is set.
choose_kind() {
  case ${SG_HARDWARE:-} in
    cpu | cuda) kind=$SG_HARDWARE ;;
    '') kind=${made%%:*} ;;
    *) kind= ;;
  esac
  if [ -z "$kind" ]; then
    find_python
    kind=$("$base_python" -I -S sg_rlhf/machine/names.py) || exit 2
  fi
  lock=requirements/$kind.lock
}

short_hash() { sha256sum | cut -c1-16; }

# The stamp's three words: the venv itself, the packages in it, the project. Each changes with what it is made from.
choose_target() {
  venv_id=$kind:$(short_hash <<<"$root")
  packages_id=$(short_hash <"$lock")
  project_id=$(cat setup.cfg pyproject.toml | short_hash)
}

read_stamp() {
  made=
  if [ -x $venv/bin/python ] && [ -f $stamp ]; then made=$(<$stamp); fi
}

up_to_date() { [ "$made" = "$venv_id $packages_id $project_id" ]; }

check_platform() {
  case $(uname -s)-$(uname -m) in
    Linux-x86_64) ;;
    *) refuse "$(uname -s) on $(uname -m) is not supported: openrlhf has wheels for Linux on x86_64 only" ;;
  esac
}

check_compiler() {
  [ $kind = cuda ] || return 0
  command -v "${CXX:-g++}" >/dev/null ||
    refuse "no C++ compiler (${CXX:-g++}); torch.compile and Triton build kernels with it at run time: apt-get install g++"
}

# check_disk GB
check_disk() {
  local free_gb
  mkdir -p "$(readlink -m $venv)"
  free_gb=$(($(df -Pk $venv/ | awk 'NR == 2 { print $4 }') / 1024 / 1024))
  [ $free_gb -ge "$1" ] ||
    refuse "$free_gb GB free for $root/$venv, which needs $1 GB: free some, clone to another disk," \
      "or make $venv a link to a folder there"
}

find_python() {
  local candidate candidates=(python3.11 python3)
  [ -z "${SG_PYTHON:-}" ] || candidates=("$SG_PYTHON")
  for candidate in "${candidates[@]}"; do
    # The interpreter behind a venv or a shim, as the active venv may be the one about to be deleted.
    base_python=$("$candidate" -c \
      'import sys; print(sys._base_executable if sys.version_info[:2] == (3, 11) else "")' 2>/dev/null) || true
    [ -z "$base_python" ] || break
  done
  [ -n "$base_python" ] ||
    refuse "no Python 3.11 (tried ${candidates[*]}; openrlhf's wheel is for 3.11 alone):" \
      "apt-get install python3.11-venv python3.11-dev, or pyenv install 3.11, or set SG_PYTHON"
  "$base_python" -c 'import ensurepip, venv' 2>/dev/null ||
    refuse "$base_python has no venv module: apt-get install python3.11-venv, or set SG_PYTHON to another one"
  [ -f "$("$base_python" -c 'import sysconfig; print(sysconfig.get_path("include"))')/Python.h" ] ||
    refuse "$base_python has no Python.h; torch.compile, and Triton on a GPU, build kernels with it at run time:" \
      "apt-get install python3.11-dev"
}

# Driver and GPUs, before gigabytes are downloaded. Only status 2 refuses; 1 is a warning, or a preflight that fails.
check_gpus() {
  [ -d sg_rlhf/doctor ] || return 0
  "$base_python" -E -S -m sg_rlhf.doctor.preflight $kind </dev/null || [ $? -ne 2 ] || exit 2
}

# Making an environment deletes what is in .venv, so that must be ours. A folder of this checkout is, where this script
# has been at work; behind a link only one that was made for this checkout.
check_owner() {
  local made_for='' what
  [ ! -e $venv ] || [ -d $venv ] || refuse "$root/$venv is not a folder: move it away"
  if [ ! -d $venv ] || [ -z "$(ls -A $venv/)" ]; then return; fi
  if [ -f $owner ]; then made_for=$(<$owner); fi
  if [ ! -L $venv ]; then
    [ -e $log ] || [ -n "$made_for" ] || refuse "$root/$venv exists and was not made by this script: move it away"
  elif [ "$made_for" != "$root" ]; then
    what="which was not made for this checkout"
    [ -z "$made_for" ] || what="the environment of the checkout $made_for"
    refuse "$root/$venv is a link to $(readlink -m $venv), $what: nothing in it was changed; link an empty folder"
  fi
}

make_venv() {
  [ -z "$(ls -A $venv/)" ] || say "emptying $venv"
  rm -f $stamp
  # All but whose it is: an interrupted deletion is ours to go on with.
  find $venv/ -mindepth 1 ! -path $owner -delete
  printf '%s\n' "$root" >$owner
  : >$log
  say "making $venv for $kind with $base_python"
  # Python's venv refuses a link.
  run "$base_python" -m venv "$(readlink -m $venv)" || fail "python -m venv"
}

# locked LOCK PATTERN: the packages of a lock whose pin matches, each with its hashes.
# locked LOCK PATTERN not: all others.
locked() {
  awk -v pattern="$2" -v other="${3:-}" \
    '/^#/ { next } /^[a-zA-Z]/ { keep = other ? $0 !~ pattern : $0 ~ pattern } keep' "$1"
}

# uv, and pip itself, by the interpreter's own pip, in the lock's versions; then pip's settings as uv's.
install_uv() {
  locked $lock '^(pip|uv)==' >$venv/tools.txt
  run $venv/bin/python -m pip install --no-input --progress-bar off --disable-pip-version-check --no-deps \
    --require-hashes -r $venv/tools.txt || fail "pip install uv"
  local settings
  settings=$($venv/bin/python scripts/uv_settings.py 2>>$log) || fail "reading pip's configuration"
  eval "$settings"
}

# PyPI has only torch's CUDA build: several GB that a machine without a GPU has no use for.
install_torch_for_cpu() {
  local torch
  torch=$(sed -n 's/^\(torch==[^ ]*\).*/\1/p' $lock)
  locked $lock '^torch==' >$venv/torch.txt
  uv --no-deps --require-hashes -r $venv/torch.txt && return
  grep -q 'no version of torch\|torch.* was not found' $log || fail "uv pip install $torch"
  say "the configured indexes have no $torch: asking PyTorch's own"
  uv --torch-backend cpu --no-deps --require-hashes -r $venv/torch.txt && return
  say "that one is out of reach: installing the CUDA build instead, several GB; for the small one interrupt this," \
    "point PIP_EXTRA_INDEX_URL at an index of PyTorch's CPU wheels and run it again"
  check_disk $cpu_disk_gb_with_cuda_torch
  # With what it needs of CUDA, from the lock that has the hashes.
  locked requirements/cuda.lock '^torch===' >$venv/torch.txt
  uv_install --require-hashes --constraint requirements/cuda.lock -r $venv/torch.txt
}

install_packages() {
  say "installing $(grep -c '^[a-zA-Z]' $lock) packages; the output: $log"
  locked $lock '^torch==.*[+]cpu' not >$venv/packages.txt
  install_uv
  if [ $kind = cpu ]; then
    install_torch_for_cpu
  fi
  # A few come as source: they are built with the lock's setuptools.
  uv_install --no-deps --require-hashes --require-build-hashes --build-constraint $lock -r $venv/packages.txt
  # Without CUDA one process of the first run compiles what it imports (sg_rlhf/overlay/fork_server).
  if [ $kind = cuda ]; then
    say "compiling to bytecode"
    run $venv/bin/python -m compileall -q -j 0 -x '/(tests?|testing|benchmarks|rllib)/' \
      $venv/lib/python3.11/site-packages/{deepspeed,networkx,numpy,pandas,peft,ray,scipy,sympy,torch,transformers,vllm} || true
  fi
}

install_project() {
  say "installing the project"
  # "compat" puts the repository itself on the path, so that a package added later needs no new installation.
  uv_install --no-deps --no-build-isolation --config-settings editable_mode=compat -e .
  run $venv/bin/python -c 'import ray, torch; torch.ones(1) + 1' || fail "importing torch and ray"
}

[[ $venv =~ ^[A-Za-z0-9._][A-Za-z0-9._/-]*$ ]] || refuse "SG_VENV=$venv: expected a folder of the checkout such as .cache/cuda"
check_platform
read_stamp
choose_kind
choose_target
if up_to_date; then exit 0; fi

# One at a time. The lock is on this file, as .venv may be deleted; it goes when the last of our processes ends.
exec 9<"${BASH_SOURCE[0]}"
if ! flock -n 9; then
  say "waiting for another bootstrap in this folder"
  flock 9
  read_stamp
  if up_to_date; then exit 0; fi
fi

trap interrupted INT TERM HUP
check_compiler
[ -n "${base_python:-}" ] || find_python
check_gpus
case $made in
  "$venv_id $packages_id"*) ;;
  # Only the lock has changed. (What it no longer names stays installed: harmless, and tests find imports of it.)
  "$venv_id "*)
    rm $stamp
    install_packages
    ;;
  *)
    check_owner
    if [ $kind = cuda ]; then check_disk $cuda_disk_gb; else check_disk $cpu_disk_gb; fi
    make_venv
    install_packages
    ;;
esac
printf '%s\n' "$venv_id $packages_id" >$stamp
install_project
printf '%s\n' "$venv_id $packages_id $project_id" >$stamp
say "ready: $venv/bin/python"

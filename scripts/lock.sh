#!/usr/bin/env bash
# Rewrite requirements/cuda.lock and requirements/cpu.lock from the .in files beside them.
#
#   scripts/lock.sh [cuda|cpu] [--upgrade | --check]
#
# Without a name: both, cuda first, as cpu.lock takes the versions of cuda.lock for the packages they share.
# Without --upgrade only what the .in files force to move is moved; --check writes nothing and says whether the locks
# are what the .in files resolve to. Needs Linux on x86_64, Python 3.11
# (SG_PYTHON names one), and a pip that finds torch's "+cpu" wheels: see scripts/bootstrap.sh.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
unset PYTHONPATH PYTHONHOME VIRTUAL_ENV

kinds=()
options=()
for argument in "$@"; do
  case $argument in
    cuda | cpu) kinds+=("$argument") ;;
    --upgrade | --check) options+=("$argument") ;;
    *)
      echo "lock.sh: unknown argument '$argument': expected cuda, cpu, --upgrade or --check" >&2
      exit 2
      ;;
  esac
done
[ ${#kinds[@]} -gt 0 ] || kinds=(cuda cpu)

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"${SG_PYTHON:-python3.11}" -m venv "$work/venv"
"$work/venv/bin/python" -m pip install --quiet "$(grep '^pip==' requirements/common.in)" packaging
for kind in "${kinds[@]}"; do
  "$work/venv/bin/python" scripts/lock.py "$kind" ${options[@]+"${options[@]}"}
done

#!/usr/bin/env bash
# Rewrite requirements/{cuda,cpu,docs,tools,integrations}.lock from the .in files beside them: every package, pinned.
#
#   scripts/lock.sh [cuda|cpu|docs|tools|integrations] [--upgrade | --check]
#
# Without a name: all, cuda first, as cpu.lock takes the versions of cuda.lock for the packages they share.
# Without --upgrade only what the .in files force to move is moved; --check writes nothing and says whether the locks
# are what the .in files resolve to. Nothing is installed. Two kinds of comment in an .in file change what metadata asks
# for: `# without: NAME  reason` leaves a package out, and `# override: NAME  reason` takes the pin of that file.
# Every package has the hashes of its files; --check compares versions alone, as files are added to old releases. Needs Linux on x86_64, Python 3.11 (SG_PYTHON names one), and a pip that
# finds torch's "+cpu" wheels: see scripts/bootstrap.sh.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
unset PYTHONPATH PYTHONHOME VIRTUAL_ENV UV_CONSTRAINT UV_OVERRIDE UV_RESOLUTION UV_TORCH_BACKEND

kinds=() upgrade=() check=
for argument in "$@"; do
  case $argument in
    cuda | cpu | docs | tools | integrations) kinds+=("$argument") ;;
    --upgrade) upgrade=(--upgrade) ;;
    --check) check=1 ;;
    *)
      echo "lock.sh: unknown argument '$argument': expected cuda, cpu, docs, tools, integrations, --upgrade or --check" >&2
      exit 2
      ;;
  esac
done
if [ -n "$check" ] && [ ${#upgrade[@]} -gt 0 ]; then
  echo "lock.sh: --check compares with the lock, --upgrade leaves it: expected one of them" >&2
  exit 2
fi
[ ${#kinds[@]} -gt 0 ] || kinds=(cuda cpu docs tools integrations)

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python=$work/venv/bin/python
"${SG_PYTHON:-python3.11}" -m venv "$work/venv"
"$python" -m pip install --quiet "$(grep '^uv==' requirements/common.in)"
uv_options=()
eval "$("$python" scripts/uv_settings.py)"

# The versions of a lock, without hashes.
pins() { [ ! -e "$1" ] || sed -n 's/^\([a-zA-Z][^ ]*\).*/\1/p' "$1"; }

status=0
for kind in "${kinds[@]}"; do
  lock=requirements/$kind.lock
  sources=("requirements/$kind.in")
  case $kind in cuda | cpu) sources+=(requirements/common.in) ;; esac
  sed -n 's/^# without: \([^ ]*\).*/\1/p' "${sources[@]}" >"$work/without"
  sed -n 's/^# override: \([^ ]*\).*/^\1\\(\\[\\|==\\)/p' "${sources[@]}" >"$work/names"
  grep -h -f "$work/names" "${sources[@]}" >"$work/overrides" || true
  # torch differs between the two kinds.
  if [ "$kind" = cpu ]; then pins requirements/cuda.lock | grep -v '^torch='; fi >"$work/shared"
  cp "$lock" "$work/new" 2>/dev/null || true # uv keeps the versions that it finds there
  echo "resolving requirements/$kind.in"
  "$python" -m uv pip compile --quiet --python "$python" --no-header --no-annotate --generate-hashes \
    ${uv_options[@]+"${uv_options[@]}"} ${upgrade[@]+"${upgrade[@]}"} \
    --excludes "$work/without" --override "$work/overrides" --constraint "$work/shared" \
    --output-file "$work/new" "requirements/$kind.in"
  # "===" where the .in file says so: see cuda.in on torch.
  sed -n 's/^\([a-z-]*\)===.*/s|^\1==|\1===|/p' "requirements/$kind.in" | sed -i -f - "$work/new"
  count=$(pins "$work/new" | grep -c .)
  if diff <(pins "$lock") <(pins "$work/new") >"$work/changes"; then
    echo "$kind.lock: $count packages, nothing new"
  elif [ -n "$check" ]; then
    echo "$kind.lock: not what $kind.in resolves to:" >&2
    cat "$work/changes" >&2
    status=1
  else
    echo "$kind.lock: $count packages, $(grep -c '^>' "$work/changes") new or changed," \
      "$(grep -c '^<' "$work/changes") changed or gone"
  fi
  [ -z "$check" ] || continue
  {
    echo "# $count packages for requirements/$kind.in on Linux x86_64 with Python 3.11, all pinned, with hashes."
    echo "# Written by \`scripts/lock.sh $kind\` (add --upgrade to take newer versions); do not edit by hand."
    echo "# Complete, so install it without resolving: pip install --no-deps --require-hashes -r requirements/$kind.lock"
    cat "$work/new"
  } >"$lock"
done
exit $status

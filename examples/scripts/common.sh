# shellcheck shell=bash
# Sourced by the training scripts: sets `hardware` to cpu, 1xgpu or 8xh100; report_run ends them.
# SG_HARDWARE says which; without it, what nvidia-smi finds.
hardware=${SG_HARDWARE:-}
if [[ -z $hardware ]]; then
  # A line "GPU 0: ..." each; MIG slices have lines of their own below, and "No devices found" is one.
  gpus=$( (nvidia-smi -L 2>/dev/null || true) | grep -c '^GPU ' || true)
  if ((gpus >= 8)); then hardware=8xh100; elif ((gpus >= 1)); then hardware=1xgpu; else hardware=cpu; fi
fi
case $hardware in
  cpu | 1xgpu | 8xh100) ;;
  *) echo "error: SG_HARDWARE=$hardware: expected cpu, 1xgpu or 8xh100" >&2; exit 2 ;;
esac

report_run() { # RUN_DIR: its figures on the terminal, its page, and what comes next
  "$python" -m sg_rlhf.report.summary "$1"
  "$python" -m sg_rlhf.report "$1"
  echo "next: another setting, in a directory of its own:"
  echo "  SG_RUN_DIR=runs/lr1e-4 bash examples/scripts/$(basename "$0") actor.adam.lr=1e-4"
}

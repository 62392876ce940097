#!/usr/bin/env bash
# GRPO-SG on Knights & Knaves: installs what is missing, makes the data, trains, writes the report.
#
#   bash examples/scripts/train_grpo_sg_kk.sh [key=value ...] [--dry-run]
#
# This is `sg-rlhf run kk`; `sg-rlhf run --help` lists its options and environment variables.
set -euo pipefail
cd "$(dirname "$0")/../.."

./scripts/bootstrap.sh
exec .venv/bin/sg-rlhf run kk "$@"

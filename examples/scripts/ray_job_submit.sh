#!/usr/bin/env bash
# Any recipe on a Ray cluster: uploads this checkout, follows the run, ends with its exit status.
#
#   RAY_API_SERVER_ADDRESS=http://HEAD:8265 \
#     bash examples/scripts/ray_job_submit.sh --config FILE --run-dir DIR [key=value ...]
#
# --config, --run-dir, --allow-changed and keys are those of `python -m sg_rlhf.train`. DIR and the
# data are on a folder that every machine of the cluster sees; the machines need the locked packages
# (scripts/bootstrap.sh, or the container) and not this project. The same command again resumes the
# run; `ray job stop` lets it save a checkpoint first (docs/running.md).
#
#   SG_CLUSTER_PYTHON=COMMAND      the Python with those packages, on the machines (python)
set -euo pipefail
cd "$(dirname "$0")/../.."

./scripts/bootstrap.sh
exec .venv/bin/python -m sg_rlhf.launch.submit --python "${SG_CLUSTER_PYTHON:-python}" "$@"

{% from "shared.sh" import header %}
#!/usr/bin/env bash
{{ header(job) }}# Needs `hf` (huggingface_hub 1.20 or later), `hf auth login`, and an account that may start jobs: bash THIS_FILE
# Lines with EDIT depend on your account; docs/running.md explains each part.
set -euo pipefail

# EDIT: `hf jobs hardware` lists the flavors with memory, disk and price. The run needs {{ job.memory_gib }} GB of memory
# and {{ job.disk_gb }} GB of disk. Without a timeout a job ends after 30 minutes.
options=(--flavor {{ job.hf_flavor }} --timeout {{ job.options.seconds or 86400 }}s --name {{ job.name }})
# Taken from your shell, or from `hf auth login`. EDIT: add --secrets WANDB_API_KEY
options+=(--secrets HF_TOKEN)
# EDIT: a bucket to keep data and runs in. Without it nothing is left after the job.
# options+=(--volume hf://buckets/YOUR-NAME/YOUR-BUCKET:/workspace)
options+=("$@")

{% if not job.data and job.files %}
# EDIT: the data must be in the bucket (docs/running.md).
{% endif %}
# EDIT: the image, where Hugging Face can pull it, or --image. The same command resumes from the last checkpoint.
hf jobs run "${options[@]}" {{ job.image | shell }} \
  bash -c {{ ("cd /workspace && " ~ ("{ " ~ job.data ~ "; } && " if job.data else "") ~ job.command) | shell }}

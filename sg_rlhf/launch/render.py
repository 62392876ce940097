"""A job as a file of one of the schedulers."""

from __future__ import annotations

import json
import shlex

from jinja2 import Environment, PackageLoader, StrictUndefined

from sg_rlhf.launch.job import Job

TEMPLATES = {
    "sbatch": "job.sbatch",
    "kuberay": "rayjob.yaml",
    "skypilot": "skypilot.yaml",
    "dstack": "dstack.yaml",
    "hfjobs": "hfjobs.sh",
}


def render(job: Job) -> str:
    """The job file of ``job.options.kind``."""
    environment = Environment(
        loader=PackageLoader("sg_rlhf.launch"),
        undefined=StrictUndefined,
        autoescape=False,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["shell"] = shlex.quote
    environment.filters["quoted"] = json.dumps  # a JSON string is one of YAML too
    return environment.get_template(TEMPLATES[job.options.kind]).render(job=job)

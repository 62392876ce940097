"""The settings of a run that its Ray workers need before upstream hands them the arguments.

The driver writes them as JSON into one environment variable of every worker, ``SG_WORKER``. Patches
and engines read them with :func:`current`. A process without the variable gets the defaults.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
from argparse import Namespace
from pathlib import Path
from typing import Any

from sg_rlhf.data_io.model_folder import PARAM_DTYPES
from sg_rlhf.overlay.reporting import activity

VARIABLE = "SG_WORKER"
#: The value of ``ds.attn_implementation`` for torch's attention kernel over packed rows.
VARLEN = "varlen"
#: Seconds that engines have to start, at least.
START_SECONDS = 1800.0


@dataclasses.dataclass(frozen=True)
class WorkerSettings:
    """Settings that a worker process reads from its environment.

    Upstream does not pass ``param_dtype`` to the engines. ``activity_log`` is the file that
    :mod:`sg_rlhf.overlay.reporting.activity` writes; "" for none.
    """

    fused_log_probs: bool = True
    share_prompts: bool = False
    param_dtype: str = "bf16"
    trusted_models: tuple[str, ...] = ()
    engine_args: dict[str, Any] = dataclasses.field(default_factory=dict)
    activity_log: str = ""

    @classmethod
    def from_args(cls, args: Namespace) -> WorkerSettings:
        """The settings of a run."""
        run_dir = args.sg.run_dir
        return cls(
            fused_log_probs=uses_fused_log_probs(args),
            share_prompts=shares_prompts(args),
            param_dtype=args.ds.param_dtype,
            trusted_models=tuple(args.sg.trust_remote_code),
            engine_args=dict(args.sg.engine_args),
            activity_log=str(activity.log_file(Path(run_dir))) if run_dir else "",
        )

    def to_json(self) -> str:
        """The value of ``SG_WORKER``."""
        return json.dumps(dataclasses.asdict(self))

    @property
    def engine_dtype(self) -> str:
        """The dtype of the engine's weights: the trainer's. Upstream always takes bfloat16."""
        return PARAM_DTYPES[self.param_dtype]


def current() -> WorkerSettings:
    """The settings of this process."""
    return _parse(os.environ.get(VARIABLE) or "{}")


@functools.lru_cache(maxsize=1)
def _parse(text: str) -> WorkerSettings:
    values = json.loads(text)
    return WorkerSettings(**values | {"trusted_models": tuple(values.get("trusted_models", ()))})


def start_seconds(timeout: float) -> float:
    """Seconds for all engines to load the model and start, a download included."""
    return max(START_SECONDS, 6 * timeout)


def uses_fused_log_probs(args: Namespace) -> bool:
    """Whether a run computes log-probs without logits."""
    # For the driver: every worker imports this module, and none needs the recipes' modules.
    from sg_rlhf.config.derived.log_probs import fused_log_probs_supported

    return fused_log_probs_supported(args.sg.fused_logprobs, args.ds.deepcompile)


def shares_prompts(args: Namespace) -> bool:
    """Whether packed rows hold each prompt once; needs the overlay's attention and head."""
    packed = args.ds.packing_samples and args.ds.attn_implementation == VARLEN
    return bool(args.sg.share_prompts and packed and uses_fused_log_probs(args))

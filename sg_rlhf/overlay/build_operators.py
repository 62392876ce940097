"""Build DeepSpeed's operators that a CPU run needs: ``python -m sg_rlhf.overlay.build_operators``.

scripts/bootstrap.sh does so beside its other work; a run that finds none builds them itself.
"""

from __future__ import annotations

import os

from sg_rlhf.overlay import register
from sg_rlhf.overlay.cpu import platform


def main() -> None:
    """Build what the first run on this machine's CPU would have to wait for: the Adam step."""
    os.environ[platform.PLATFORM_VARIABLE] = "cpu"
    register.install()
    from deepspeed.ops.op_builder import FusedAdamBuilder

    FusedAdamBuilder().load()


if __name__ == "__main__":
    main()

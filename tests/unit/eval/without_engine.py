"""`python -m tests.unit.eval.without_engine ...`: `eval.run`, whose engine writes nothing."""

from __future__ import annotations

from dataclasses import replace

from sg_rlhf.eval import run
from sg_rlhf.eval.engines import vllm
from sg_rlhf.eval.engines.base import Sample


class Silent:
    """Ends every response at once."""

    in_flight = 8

    def __init__(self, *_options) -> None:
        pass

    async def generate(self, sample: Sample) -> Sample:
        return replace(sample, finish_reason="stop")

    def close(self) -> None:
        pass


if __name__ == "__main__":
    vllm.VllmEngine = Silent
    raise SystemExit(run.main())

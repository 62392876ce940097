"""`python -m tests.unit.eval.without_engine ...`: `eval.run`, whose engine writes nothing."""

from __future__ import annotations

from sg_rlhf.eval import run
from sg_rlhf.eval.engines.base import Completion


class Silent:
    """Ends every response at once."""

    def __init__(self, options) -> None:
        self.asked = []

    def add(self, requests) -> None:
        self.asked += requests

    def step(self) -> list[Completion]:
        done, self.asked = self.asked, []
        return [Completion(request.key, "", "stop", 0) for request in done]

    def close(self) -> None:
        pass


if __name__ == "__main__":
    run.start = Silent
    raise SystemExit(run.main())

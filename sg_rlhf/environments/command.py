"""Serve a domain as an environment that TRL, SkyRL and others train on (OpenEnv's protocol).

The rows are those that `sg-rlhf data` writes. A client resets to get a prompt, steps with what its
model wrote, and gets the reward of this project's grader. Needs `pip install '.[openenv]'`.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from sg_rlhf.common.argument_types import OneLineParser, key_values, port, positive_int
from sg_rlhf.common.text import single_line
from sg_rlhf.data_io.prompt_rows import PromptSchema
from sg_rlhf.data_io.prompt_validation import checked
from sg_rlhf.data_io.records import DataError, json_objects
from sg_rlhf.tasks import registry
from sg_rlhf.tasks.codec import CharacterCodec
from sg_rlhf.tasks.domain import Domain, load
from sg_rlhf.tasks.rollout import Environment, SingleTurn

EXAMPLES = """\
examples:
  Knights & Knaves
    sg-rlhf serve-env kk --data data/kk_tiny/train.jsonl
  search: a retriever must run (sg-rlhf serve --index DIR)
    sg-rlhf serve-env search --data data/search_tiny/train.jsonl \\
        --set url=http://127.0.0.1:8000/retrieve max_turns=2
  a client, in Python
    from openenv.core import GenericEnvClient
    with GenericEnvClient(base_url="http://127.0.0.1:8001").sync() as env:
        prompt = env.reset(seed=0).observation["text"]
        result = env.step({"text": "... <answer> ... </answer>"})
        print(result.reward, result.done)

docs/other_trainers.md has the fields of actions and observations.
"""


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = OneLineParser(
        prog="sg-rlhf serve-env",
        description=__doc__,
        epilog=EXAMPLES,
    )
    try:
        names = ", ".join(registry.domains())
    except ValueError as error:
        parser.error(single_line(error))
    parser.add_argument("domain", metavar="DOMAIN", help=f"{names}, or package.module:NAME")
    parser.add_argument(
        "--data", metavar="FILE", type=Path, required=True,
        help="rows with `input` and `answer`, JSONL",
    )  # fmt: skip
    parser.add_argument("--host", default="127.0.0.1", help="address (default: 127.0.0.1)")
    parser.add_argument("--port", type=port, default=8001, help="port, 0: any free (default: 8001)")
    parser.add_argument(
        "--sessions", metavar="N", type=positive_int, default=256,
        help="episodes at the same time (default: 256)",
    )  # fmt: skip
    parser.add_argument(
        "--set", metavar="KEY=VALUE", nargs="+", default=[], dest="settings",
        help="keys of the domain's section (sg.NAME.*), such as max_turns=2 for search",
    )  # fmt: skip
    return parser.parse_args(argv)


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a file; DataError for a row without prompt or answer."""
    rows = list(json_objects(path))
    places = [f"{path}, line {number}" for number in range(1, len(rows) + 1)]
    for _ in checked(zip(places, rows, strict=True), PromptSchema(chat=True)):
        pass
    for place, row in zip(places, rows, strict=True):
        if not isinstance(row.get("answer"), str):
            raise DataError(f"{place}: expected text as 'answer'")
    if not rows:
        raise DataError(f"{path}: no rows")
    return rows


def environment_of(domain: Domain, given: list[str]) -> Environment:
    """The environment of a domain with `key=value` settings; ValueError for a wrong one."""
    settings = load(domain.settings) if domain.settings is not None else None
    values = key_values("--set", given, settings.model_fields if settings else ())
    if domain.environment is None:
        return SingleTurn(domain.grade)
    return load(domain.environment)(None if settings is None else settings(**values))


def main(argv: list[str] | None = None) -> int:
    """Serve until interrupted. Exit status 0, by SIGTERM 143; 2 for wrong input."""
    arguments = parse_arguments(argv)
    try:
        domain = registry.find(arguments.domain)
        environment = environment_of(domain, arguments.settings)
        rows = read_rows(arguments.data)
        environment.begin(rows[0], CharacterCodec())
    except (ValueError, OSError) as error:
        print(f"sg-rlhf serve-env: {_line(error)}", file=sys.stderr)
        return 2
    try:
        import uvicorn

        from sg_rlhf.environments import openenv
    except ModuleNotFoundError as error:
        needed = f"{error.name} is not installed: pip install '.[openenv]'"
        print(f"sg-rlhf serve-env: {needed}", file=sys.stderr)
        return 2
    app = openenv.application(rows, environment, f"sg_rlhf {domain.name}", arguments.sessions)
    print(f"{domain.name}: {len(rows)} rows", flush=True)
    uvicorn.run(app, host=arguments.host, port=arguments.port, log_level="info", access_log=False)
    return 0


def _line(error: Exception) -> str:
    """An error as one line; pydantic's with key, value and what was expected."""
    if isinstance(error, ValidationError):
        found = error.errors()[0]
        key = ".".join(map(str, found["loc"]))
        return f"{key}={found['input']}: {found['msg']}"
    return single_line(error)


if __name__ == "__main__":
    raise SystemExit(main())

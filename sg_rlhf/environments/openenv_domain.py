"""Any OpenEnv environment as a domain: its settings, its rows, and a check before the run.

``SG_DOMAINS=sg_rlhf.environments.openenv_domain:OPENENV`` gives recipes the section ``sg.openenv``
and ``sg-rlhf data`` the subcommand ``openenv``. A row's ``input`` is the text that the environment
begins with, its ``answer`` the options that reset it to that text, as JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar
from urllib.parse import urlsplit

from pydantic import Field, field_validator

from sg_rlhf.data_io.command_options import generate_options
from sg_rlhf.environments.session import OpenEnvError, Session
from sg_rlhf.tasks.data_command import DataCommand, LoadTokenizer, Made, Plan
from sg_rlhf.tasks.domain import Domain
from sg_rlhf.tasks.grade import Grade
from sg_rlhf.tasks.settings import DomainSettings


class OpenEnvSettings(DomainSettings):
    """The recipe's `sg.openenv.*`."""

    section: ClassVar[str] = "openenv"
    about: ClassVar[str] = "rollouts in an OpenEnv environment"

    url: str = Field("http://127.0.0.1:8001", description="of the environment's server")
    action: str = Field("text", description="field of an action that takes the model's text")
    observation: str = Field("text", description="field of an observation that the model reads")
    between: str = Field(
        "{text}", description="how an observation stands between two turns, with {text} for it: "
        "a chat model needs its template's marks around it",
    )  # fmt: skip
    stop: list[str] = Field([], description="strings that end a turn; without, its end token does")
    max_turns: int = Field(8, ge=1, description="turns of the model in an episode")
    turn_tokens: int = Field(512, ge=1, description="most tokens that the model writes in a turn")
    observation_tokens: int = Field(512, ge=1, description="most tokens of an observation")
    timeout_s: float = Field(60.0, gt=0, description="seconds that an answer may take")

    @field_validator("url")
    @classmethod
    def _is_http(cls, url: str) -> str:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.netloc:
            raise ValueError("expected http://HOST:PORT")
        return url

    @field_validator("between")
    @classmethod
    def _has_text(cls, between: str) -> str:
        if "{text}" not in between:
            raise ValueError("expected {text} in it")
        return between

    def text_of(self, observation: Mapping[str, Any]) -> str:
        """What the model reads of an observation.

        Raises:
            OpenEnvError: it has no such field.
        """
        if self.observation not in observation:
            known = ", ".join(sorted(observation)) or "none"
            raise OpenEnvError(
                f"sg.openenv.observation={self.observation}: the observations of {self.url} have "
                f"the fields {known}"
            )
        value = observation[self.observation]
        return value if isinstance(value, str) else json.dumps(value)


def reset_options(label: str) -> dict[str, Any]:
    """A row's `answer`: the options of its episode's reset.

    Raises:
        ValueError: it is no JSON object.
    """
    try:
        options = json.loads(label)
    except ValueError:
        options = None
    if not isinstance(options, dict):
        raise ValueError(f'{label[:80]!r}: expected a JSON object such as {{"seed": 0}}')
    return options


def grade(response: str, label: str) -> Grade:
    """Nothing is graded here: the environment gives the reward. Rows are checked with this.

    Raises:
        ValueError: the label is not that of an episode.
    """
    reset_options(label)
    return Grade(reward=0.0, correct=False, reason="ungraded")


async def begin(settings: OpenEnvSettings, options: Sequence[Mapping[str, Any]]) -> list[str]:
    """The texts that episodes begin with.

    Args:
        options: of each episode's reset.

    Raises:
        OpenEnvError: the environment does not answer.
    """
    texts = []
    for each in options:
        async with Session(settings.url, settings.timeout_s) as session:
            texts.append(settings.text_of((await session.reset(each)).observation))
    return texts


def check(settings: OpenEnvSettings) -> None:
    """See that the environment answers, before Ray starts.

    Raises:
        ValueError: one line with the address and the cause.
    """
    try:
        asyncio.run(begin(settings, [{"seed": 0}]))
    except OpenEnvError as error:
        raise ValueError(f"{error}; sg.openenv.url is the address of a running server") from None


class OpenEnvData(DataCommand):
    """Rows of an environment's episodes, by their seeds."""

    description = (
        "Ask an OpenEnv environment for the beginnings of its episodes; a row each.\n\n"
        "example:\n"
        "  python -m sg_rlhf.data openenv --out data/env --generate count=256 test_count=64 \\\n"
        "      --url http://127.0.0.1:8001"
    )

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        fields = OpenEnvSettings.model_fields
        for name in ("url", "observation"):
            parser.add_argument(
                f"--{name}", default=fields[name].default, help=fields[name].description
            )
        parser.add_argument(
            "--generate", nargs="*", metavar="KEY=VALUE", default=[],
            help="count (default 64) and test_count (16) of episodes, the first seed (0)",
        )  # fmt: skip

    def plan(self, args: argparse.Namespace, load_tokenizer: LoadTokenizer) -> Plan:
        options = generate_options(args.generate, {"count": 64, "test_count": 16, "seed": 0})
        settings = OpenEnvSettings(url=args.url, observation=args.observation)
        source = {"kind": "openenv", "url": args.url, "observation": args.observation, **options}
        return Plan({"source": source}, lambda: _made(settings, **options))

    def report(self, manifest: Mapping[str, Any]) -> Iterator[str]:
        counts = manifest["counts"]
        yield f"OpenEnv: {counts['train']} rows to train on, {counts['test']} to test on"


def _made(settings: OpenEnvSettings, count: int, test_count: int, seed: int) -> Made:
    seeds = {"test": range(seed, seed + test_count)}
    seeds["train"] = range(seed + test_count, seed + test_count + count)
    try:
        files = {f"{name}.jsonl": _records(settings, part) for name, part in seeds.items()}
    except OpenEnvError as error:
        raise ValueError(str(error)) from None
    return Made(files, {"counts": {name: len(part) for name, part in seeds.items()}})


def _records(settings: OpenEnvSettings, seeds: Sequence[int]) -> list[dict[str, Any]]:
    options = [{"seed": seed} for seed in seeds]
    texts = asyncio.run(begin(settings, options))
    return [
        {"input": text, "answer": json.dumps(each), "datasource": "openenv"}
        for text, each in zip(texts, options, strict=True)
    ]


COMMAND = OpenEnvData()
OPENENV = Domain(
    name="openenv",
    title="episodes of an OpenEnv environment",
    grade=grade,
    prompt_end="",
    data=COMMAND,
    settings=OpenEnvSettings,
    check=check,
)

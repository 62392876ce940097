"""The command line of ``sg-rlhf eval``: options, help, and checks that need no file."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sg_rlhf.common.argument_types import (
    OneLineParser,
    int_list,
    json_object,
    non_negative_float,
    non_negative_int,
    positive_float,
    positive_int,
)
from sg_rlhf.eval import own_rows, suites
from sg_rlhf.eval.engines.base import DTYPES, ENGINES
from sg_rlhf.eval.sampling import SamplingOptions
from sg_rlhf.tasks import chat
from sg_rlhf.tasks.questions import EvalError
from sg_rlhf.tasks.suite import Benchmark, Suite

DESCRIPTION = """\
Evaluate a model on the benchmarks of a suite.

Writes results.json, samples.jsonl and table.md into --out. If the run is killed, the same command
with --resume continues it. --compare compares two such folders, --rescore grades the responses of
one again.
"""

EXAMPLES = """\
examples:
  the newest finished run on Knights & Knaves, all harnesses
    sg-rlhf eval --suite kk
  some mathematics benchmarks, 64 responses per problem, and pass@k from the same responses
    sg-rlhf eval --suite math --only aime25 --samples 64 --k 1,8,64 --model M --out out/aime25
  a thinking model with its own chat template and sampling settings
    sg-rlhf eval --suite math --only aime25 --chat-template --temperature 0.6 --top-p 0.95 \\
      --max-tokens 32768 --model Qwen/Qwen3-4B --out out/qwen3
  search questions, with an index that is served during the run
    sg-rlhf eval --suite qa --index indexes/e5 --data-dir data/qa --model M --out out/qa
  your own rows with the reward of your training
    sg-rlhf eval --data my/test.jsonl --reward my_reward.py --model M --out out/mine
  a server, such as that of 8 GPUs: `vllm serve M --data-parallel-size 8`
    sg-rlhf eval --suite math --engine openai --base-url http://localhost:8000/v1 --model M \\
      --concurrency 2048
"""


#: Parent folder of the results without `--out`.
OUT = Path("out")


@dataclass(frozen=True)
class CommandLine:
    """A parsed command line.

    Attributes:
        suites: every known suite by name.
        given: the options with another value than their default: flag -> value.
    """

    args: argparse.Namespace
    suites: Mapping[str, Suite]
    given: Mapping[str, Any]

    @property
    def suite_values(self) -> dict[str, Any]:
        """The options that only the selected suite has, by name."""
        flags = self.suites[self.args.suite].options
        names = [flag.lstrip("-").replace("-", "_") for flag in flags]
        return {name: getattr(self.args, name) for name in names}

    def refuse_all_but(self, allowed: Collection[str], reason: str) -> None:
        """Refuse every option that was given, unless its flag is among the allowed ones."""
        for flag in self.given:
            if flag not in allowed:
                raise EvalError(f"{flag}: {reason}")


def parse_arguments(argv: Sequence[str]) -> CommandLine:
    """Parse the command line, including the options of every suite."""
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    first.add_argument("--suite", nargs="?")
    requested = first.parse_known_args(argv)[0].suite or ""
    known = suites.all_suites()
    if ":" in requested:
        known[requested] = suites.suite_at(requested)
    parser = OneLineParser(
        prog="sg-rlhf eval",
        description=DESCRIPTION,
        epilog=EXAMPLES,
        allow_abbrev=False,
    )
    _add_questions(parser.add_argument, ", ".join(known))
    _add_sampling(parser.add_argument_group("responses").add_argument)
    _add_engine(parser.add_argument_group("engine").add_argument)
    _add_other_modes(parser.add_argument_group("instead of an evaluation").add_argument)
    for name, suite in known.items():
        group = parser.add_argument_group(f"only with --suite {name}")
        for flag, keywords in suite.options.items():
            group.add_argument(flag, **keywords)
    args = parser.parse_args(argv)
    given = {
        action.option_strings[0]: getattr(args, action.dest)
        for action in parser._actions
        if getattr(args, action.dest, action.default) != action.default
    }
    if args.suite is None and args.data is not None:
        args.suite = own_rows.NAME
    if args.resume and args.out is None:
        raise EvalError("--resume needs --out DIR, the folder of the run that is to continue")
    return CommandLine(args, known, given)


# `add` is the `add_argument` of a parser or of a group.
def _add_questions(add: Callable[..., Any], suite_names: str) -> None:
    add(
        "--suite", metavar="NAME",
        help=f"suite of benchmarks: {suite_names}, or package.module:DOMAIN (required to evaluate)",
    )  # fmt: skip
    add(
        "--model", metavar="M",
        help="model: Hugging Face folder, hub id, module:NAME, or its name on the server (default: "
        "the checkpoint of the newest finished run of the suite's domain in runs/)",
    )  # fmt: skip
    add(
        "--out", metavar="DIR", type=Path,
        help="folder for the results (default: out/SUITE_DATE_TIME)",
    )  # fmt: skip
    add("--resume", action="store_true", help="continue the killed run in --out")
    add(
        "--only", metavar="A,B", default="",
        help="benchmarks, or groups of them, to run; --list shows the names (default: the suite's)",
    )  # fmt: skip
    add(
        "--data-dir", metavar="D", type=Path,
        help="folder with the files of questions (default: download them; qa: data/qa)",
    )  # fmt: skip
    add("--limit", metavar="N", type=positive_int, help="questions per benchmark (default: all)")
    add(
        "--train-data", metavar="F", type=Path, nargs="+",
        help="data files that the model was trained on, to look for questions in them (default: "
        "those of its run, for a checkpoint of a run)",
    )  # fmt: skip
    add(
        "--seed", metavar="S", type=non_negative_int, default=0,
        help="seed of the sampling and of the bootstrap intervals (default: 0)",
    )  # fmt: skip


def _add_sampling(add: Callable[..., Any]) -> None:
    add(
        "--samples", metavar="N", type=positive_int,
        help="responses per question, where the temperature is above 0 (default: the suite's)",
    )  # fmt: skip
    add(
        "--k", metavar="K,K", type=int_list,
        help="the k of pass@k, each at most --samples, such as 1,8,64 (default: the suite's)",
    )  # fmt: skip
    add(
        "--temperature", metavar="T", type=non_negative_float,
        help="sampling temperature; 0 is greedy, with one response per question (default: the "
        "suite's)",
    )  # fmt: skip
    add(
        "--top-p", metavar="P", type=positive_float,
        help="probability mass that nucleus sampling keeps, above 0 and up to 1 (default: the "
        "suite's, 1)",
    )  # fmt: skip
    add(
        "--max-tokens", metavar="N", type=positive_int,
        help="maximum tokens per response, without the prompt (default: the suite's)",
    )  # fmt: skip
    add(
        "--chat-template", action="store_true",
        help="send each prompt as a user turn, through the model's chat template or to the chat "
        "endpoint of a server (default: raw prompts)",
    )  # fmt: skip
    add(
        "--system-prompt", metavar="TEXT",
        help="system turn before each prompt, with --chat-template (default: none)",
    )  # fmt: skip
    add(
        "--chat-template-kwargs", metavar="JSON", type=json_object, default={},
        help="arguments of the chat template, such as '{\"enable_thinking\": false}' (default: "
        "none)",
    )  # fmt: skip


def _add_engine(add: Callable[..., Any]) -> None:
    add(
        "--engine", choices=ENGINES, default="vllm",
        help="engine: vllm, on GPUs or a CPU, or openai, a server (default: vllm)",
    )  # fmt: skip
    add(
        "--tensor-parallel", metavar="N", type=positive_int, default=1,
        help="GPUs of the engine, with vllm (default: 1)",
    )  # fmt: skip
    add(
        "--revision", metavar="R",
        help="commit, branch or tag of a model on the hub, with vllm (default: main)",
    )  # fmt: skip
    add(
        "--dtype", choices=DTYPES, default="auto",
        help="number type of the model's weights, with vllm (default: auto, which is the "
        "model's own, on a CPU float32)",
    )  # fmt: skip
    add(
        "--base-url", metavar="U",
        help="address of the server, with openai, such as http://localhost:8000/v1",
    )  # fmt: skip
    add(
        "--concurrency", metavar="N", type=positive_int, default=128,
        help="maximum requests in flight to the server, with openai (default: 128)",
    )  # fmt: skip


def _add_other_modes(add: Callable[..., Any]) -> None:
    add("--list", action="store_true", help="list suites with sizes, settings and licences")
    add(
        "--rescore", metavar="DIR", type=Path,
        help="grade the stored responses of the finished run in DIR again, without a model; "
        "--out gets the results",
    )  # fmt: skip
    add(
        "--compare", metavar=("A", "B"), type=Path, nargs=2,
        help="compare two finished runs question by question; --out gets the comparison",
    )  # fmt: skip


#: The only engine that an option applies to, where it does not apply to both.
_ENGINE_OF = {
    "--base-url": "openai", "--concurrency": "openai",
    "--tensor-parallel": "vllm", "--revision": "vllm", "--dtype": "vllm",
}  # fmt: skip


def check(line: CommandLine) -> tuple[Suite, tuple[Benchmark, ...]]:
    """Check the command line of an evaluation, without reading questions or a model.

    Returns the suite and the selected benchmarks, with the settings that were asked for.
    """
    args = line.args
    suite = find_suite(line)
    if args.engine == "openai" and args.base_url is None:
        raise EvalError("--engine openai needs --base-url, such as http://localhost:8000/v1")
    for flag, value in line.given.items():
        engine = _ENGINE_OF.get(flag, args.engine)
        if engine != args.engine:
            raise EvalError(f"{flag} {value}: only with --engine {engine}")
        if flag in suite.refused:
            raise EvalError(f"{flag}: {suite.refused[flag]}")
    if args.system_prompt is not None and not args.chat_template:
        raise EvalError("--system-prompt: needs --chat-template; a raw prompt has no system turn")
    try:
        chat.check_template_kwargs(args.chat_template_kwargs)
    except ValueError as error:
        raise EvalError(f"--chat-template-kwargs: {error}") from None
    if args.data_dir is not None and not args.data_dir.is_dir():
        raise EvalError(f"--data-dir {args.data_dir}: no such folder")
    for path in args.train_data or ():
        if not path.is_file():
            raise EvalError(f"--train-data {path}: no such file")
    return suite, sampling_options(args).apply(suite.select(names_in(args.only)))


def sampling_options(args: argparse.Namespace) -> SamplingOptions:
    """The options that change a benchmark's settings."""
    return SamplingOptions(args.temperature, args.top_p, args.max_tokens, args.samples, args.k)


def find_suite(line: CommandLine) -> Suite:
    """The suite of `--suite`."""
    args = line.args
    if args.suite is None:
        raise EvalError("--suite is missing; sg-rlhf eval --help shows examples")
    suite = line.suites.get(args.suite)
    if suite is None:
        raise EvalError(
            f"--suite {args.suite}: expected one of {', '.join(line.suites)}, or "
            "package.module:NAME of a domain"
        )
    for flag in line.given:
        owner = next((name for name, s in line.suites.items() if flag in s.options), args.suite)
        if owner != args.suite:
            raise EvalError(f"{flag}: only with --suite {owner}")
    if suite is own_rows.ROWS and args.rescore is None:
        return own_rows.with_rows(line.suite_values)
    return suite


def dated_folder(name: str) -> Path:
    """The folder for results without `--out`."""
    return OUT / f"{name}_{time.strftime('%Y-%m-%d_%H%M%S')}"


def names_in(only: str) -> list[str]:
    """The names of `--only`."""
    names = [name.strip() for name in only.split(",") if name.strip()]
    if only and not names:
        raise EvalError(f"--only {only}: names no benchmark; --list shows them")
    return names

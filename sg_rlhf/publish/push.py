"""Upload a run's final model and its model card to the Hugging Face hub: ``sg-rlhf push``.

The card is checkpoints/final/README.md. Training writes it; this command writes it again, with the
scores of --results. Log in before with `hf auth login`, or set HF_TOKEN.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from sg_rlhf.common.argument_types import OneLineParser, printable_name
from sg_rlhf.common.text import single_line
from sg_rlhf.data_io.model_folder import is_hub_id
from sg_rlhf.run_dir.final_model import final_checkpoint

EXAMPLES = """\
examples:
  write the card and look at it first
    sg-rlhf push runs/a --card-only
  upload model and card to a private repository
    sg-rlhf push runs/a --repo me/qwen-kk --private
  with the scores of an evaluation of this model (sg-rlhf eval --out out/math)
    sg-rlhf push runs/a --repo me/qwen-math --results out/math
"""


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = OneLineParser(
        prog="sg-rlhf push",
        description=__doc__,
        epilog=EXAMPLES,
    )
    parser.add_argument("run_dir", metavar="RUN_DIR", type=Path, help="directory of a finished run")
    target = parser.add_mutually_exclusive_group(required=True)
    target.add_argument(
        "--repo", metavar="OWNER/NAME", type=printable_name, help="the repository on the hub"
    )
    target.add_argument("--card-only", action="store_true", help="write the card, upload nothing")
    parser.add_argument(
        "--results", metavar="DIR", type=Path, action="append", default=[],
        help="output folder of an evaluation; its scores go into the card; repeatable",
    )  # fmt: skip
    parser.add_argument(
        "--branch", metavar="NAME", default="main", help="branch to upload to (default: main)"
    )
    parser.add_argument(
        "--private", action="store_true", help="make a new repository private (default: public)"
    )
    arguments = parser.parse_args(argv)
    repo = arguments.repo
    if repo and not (is_hub_id(repo) and "/" in repo):
        parser.error(f"--repo {repo}: expected OWNER/NAME, such as me/qwen-kk")
    return arguments


def main(argv: list[str] | None = None) -> int:
    """Exit status 0; 2 for wrong input; 1 when the hub refuses."""
    arguments = parse_arguments(argv)
    from sg_rlhf.publish import model_card

    try:
        path = model_card.write(arguments.run_dir, arguments.results)
    except (model_card.CardError, OSError) as error:
        return _fail(single_line(error), 2)
    print(f"model card: {path}")
    if arguments.card_only:
        return 0
    return _upload(final_checkpoint(arguments.run_dir), arguments)


def _upload(folder: Path, arguments: argparse.Namespace) -> int:
    from huggingface_hub import HfApi
    from huggingface_hub.errors import LocalTokenNotFoundError

    hub = HfApi()
    message = f"{arguments.run_dir.resolve().name}: final model and model card"
    try:
        hub.create_repo(arguments.repo, private=arguments.private or None, exist_ok=True)
        if arguments.branch != "main":
            hub.create_branch(arguments.repo, branch=arguments.branch, exist_ok=True)
        commit = hub.upload_folder(
            repo_id=arguments.repo, folder_path=folder, revision=arguments.branch,
            commit_message=message,
        )  # fmt: skip
    except LocalTokenNotFoundError:
        return _fail("no token of the hub: run `hf auth login`, or set HF_TOKEN", 2)
    except (OSError, ValueError) as error:
        return _fail(f"--repo {arguments.repo}: {single_line(error)}", 1)
    print(f"uploaded: {arguments.repo} at {commit.oid}")
    return 0


def _fail(message: str, status: int) -> int:
    print(f"sg-rlhf push: {message}", file=sys.stderr)
    return status

"""Fetch the test cases of other graders of mathematics, each file at one commit and checked.

    python -m lab.experiments.graders.fetch_cases
    python -m lab.experiments.graders.fetch_cases --from math_verify=../Math-Verify

The files go to `~/.cache/sg_rlhf/grader_cases`, or `--cache`; what is there already is only
checked. `--from SUITE=FOLDER` takes a suite's files from a checkout of its repository instead of
the network; they must be the same files. None of them is part of this project.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path

from lab.experiments.graders import pinned_files
from sg_rlhf.data_io.pinned_download import Origin

CACHE = Path("~/.cache/sg_rlhf/grader_cases").expanduser()


def _files(repository: str, commit: str, *files: tuple[str, str]) -> tuple[Origin, ...]:
    return tuple(Origin(repository, commit, path, sha256=hash_) for path, hash_ in files)


#: Suite -> the files that hold its cases.
SUITES: Mapping[str, tuple[Origin, ...]] = {
    "math_verify": _files(
        "huggingface/Math-Verify",
        "5d148cfaaf99214c2e4ffb4bc497ab042c592a7a",
        ("tests/test_all.py", "4d4a4525097ed30faad38a9c4c867e9629af41226b97cc685d14a14125042a0e"),
        ("tests/test_boxed.py", "f4045ba514b27a39c287b0864325fae5f6a2228f6a01f282fc45ad04490af534"),
        (
            "tests/test_numina_cases.py",
            "fc4bbbb04e86e60eaf9e6a4921dc058ec12a52db34ed52aa991cfaf44a92d899",
        ),
        (
            "tests/test_open_thoughts.py",
            "9dbe572d48205ef86665037c75704bf450dc2bda0ea0c00402c5f65841ae273b",
        ),
        (
            "tests/test_strict.py",
            "ff831f7e170ef1b07ac194cf6fe8191fbfd1c0927c20b2f41c3ee4013e9f1182",
        ),
        (
            "tests/test_yujianll.py",
            "7d9d4561087ad3af87c3d8062daef71b7a6b879f2c71df7872ceb8c126ca151b",
        ),
    ),
    "qwen": _files(
        "QwenLM/Qwen2.5-Math",
        "a45202bd16f1ec06f433442dc1152d0074773465",
        (
            "evaluation/grader.py",
            "ed9494a388e7117735fccf2985de6c444d5bdba4d493b425e92a91e9ab97742a",
        ),
    ),
    "hendrycks": _files(
        "hendrycks/math",
        "985bdc1696e88e8643f081a0ff4719da39f2ae2a",
        (
            "modeling/math_equivalence_test.py",
            "e2d998c789786e320618cbceb309d344b6bf6d64bf76d330b52235974618821a",
        ),
    ),
    "inspect_ai": _files(
        "UKGovernmentBEIS/inspect_ai",
        "499e6152e7b8fc8cbd8ac5283536572aa6e4ab17",
        (
            "tests/scorer/math_cases.json",
            "900161f84a64ffe81631d016b755ef473d5a63d8efc8add69f4cafe8b03b1fe8",
        ),
    ),
    "tinker": _files(
        "thinking-machines-lab/tinker-cookbook",
        "9dfcc3a2cf44432d621a01005073dc6d76a1e87a",
        (
            "tinker_cookbook/recipes/math_rl/math_env_test.py",
            "7041a7d228887de445531ed406f559fa72dc6d288c8dabff6b8f19297fda9b65",
        ),
    ),
    "slime": _files(
        "THUDM/slime",
        "624b824a898ab0ec1fcb4d373004c7f3852bf515",
        (
            "tests/test_rm_math.py",
            "75ec8c1a9779dcf636be40a65a5f3f2c984d642091c5c4ce4dd033f51ffe0adc",
        ),
    ),
    "lighteval": _files(
        "huggingface/lighteval",
        "3fd15266bc8448b797e61462d293aa3fd40b3580",
        (
            "tests/unit/metrics/test_extractive_match.py",
            "036b990b19750c085129afbe04d81eb01b5844b48de16dae1414074e43185fb0",
        ),
    ),
}


def fetch(cache: Path, given: Mapping[str, Path]) -> dict[str, list[Path]]:
    """Suite -> its files in the cache, all checked.

    Raises:
        DataError: a file is missing, another one than pinned, or cannot be downloaded.
    """
    return {
        suite: [
            pinned_files.fetched(origin, cache / suite / Path(origin.path).name, given, suite)
            for origin in origins
        ]
        for suite, origins in SUITES.items()
    }


def add_options(parser: argparse.ArgumentParser) -> None:
    """`--cache` and `--from`, as `fetch` takes them."""
    pinned_files.add_options(parser, CACHE, SUITES, "SUITE")


def _lines(cache: Path, given: Mapping[str, Path]) -> list[str]:
    found = fetch(cache, given)
    return [f"{suite}: {', '.join(path.name for path in paths)}" for suite, paths in found.items()]


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status 0, or 2 with one line."""
    return pinned_files.command(
        "lab.experiments.graders.fetch_cases", __doc__, add_options, _lines, argv
    )


if __name__ == "__main__":
    raise SystemExit(main())

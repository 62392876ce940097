"""Published responses of models to the evaluation sets: fetched at one commit and checked.

    python -m lab.experiments.graders.responses
    python -m lab.experiments.graders.responses --from NovaSky-AI/SkyThought=../SkyThought

The files go to `~/.cache/sg_rlhf/responses`, or `--cache`; what is there already is only checked.
`--from REPOSITORY=FOLDER` takes them from a folder that has them under their paths instead of the
network. None of them is part of this project.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from lab.experiments.graders import pinned_files
from sg_rlhf.data_io.pinned_download import Origin
from sg_rlhf.data_io.records import DataError
from sg_rlhf.tasks.math.sets.published import read_eval_set

CACHE = Path("~/.cache/sg_rlhf/responses").expanduser()
_SKYTHOUGHT = ("NovaSky-AI/SkyThought", "dff54f122054a124670c9f85456765b0fc539ac6")
_QWEN = ("QwenLM/Qwen2.5-Math", "a45202bd16f1ec06f433442dc1152d0074773465")
#: Name of a set in the files' paths -> in `published`.
_SETS = {
    "aime24": "aime",
    "amc23": "amc",
    "math500": "math500",
    "minerva_math": "minerva",
    "olympiadbench": "olympiadbench",
}


@dataclass(frozen=True)
class Published:
    """One file of responses.

    Attributes:
        benchmark: of the evaluation sets; "math" for problems of MATH that are in none of them.
    """

    model: str
    benchmark: str
    rows: int
    origin: Origin


@dataclass(frozen=True)
class Response:
    """A response and its golds, which are the data's own where the problem is in it."""

    model: str
    benchmark: str
    id: str
    text: str
    golds: tuple[str, ...]


def _files(
    folder: str, model: str, prompt: str, *files: tuple[str, int, str]
) -> tuple[Published, ...]:
    found = []
    for name, rows, sha256 in files:
        path = (
            f"skythought/Qwen2.5-Math/evaluation/outputs/{folder}/{name}_eval/{name}/"
            f"test_{prompt}_-1_seed0_t0.0_s0_e-1.jsonl"
        )
        found.append(Published(model, _SETS[name], rows, Origin(*_SKYTHOUGHT, path, sha256=sha256)))
    return tuple(found)


FILES: Sequence[Published] = (
    *_files(
        "Qwen/Qwen2.5-14B-Instruct",
        "Qwen2.5-14B-Instruct",
        "qwen25-math-cot",
        ("aime24", 30, "69d2816492bfb64228125a1b7990f8d07665d8eb41680b01a71d3b0ca296a42b"),
        ("amc23", 40, "97b8ccf0c1a892bd14fb3e5de337b0e53e5d5868fd3ff0352d0ddebe0d10f04a"),
        ("math500", 500, "f7068e1259bf58ad9df9ad6951a66c062b2e250f54f08095321a42e9a746ffaf"),
        ("minerva_math", 272, "3c731ec782843f41dfb2b5def033e2e82953a7d8346d7bbd7b60c9ebe009231f"),
        ("olympiadbench", 675, "116b65a34ee755c0153b05da9dde3a02fddbf409e41db22d2ff045577785b79d"),
    ),
    *_files(
        "Qwen/Qwen2.5-Math-7B",
        "Qwen2.5-Math-7B",
        "qwen25-math-cot",
        ("aime24", 30, "31d96f05b791b0d4ff22cf31e777dd6fd5634c67151f36dc0fd93de58a14ba4d"),
        ("amc23", 40, "0983918f3f704a77ccc53ee8a1e7e59fe2074d6449135f74a41a501492ec9699"),
        ("math500", 500, "cd9a2f604929588a0e94c9637f189248efaf46ab66ee51c2655320926985b616"),
        ("minerva_math", 272, "b62f9f0d98d763763eca1ed905612bc2aacc58c4a52bd9055a3bb040caf5ee7d"),
    ),
    *_files(
        "google/gemma-2-27b-it",
        "gemma-2-27b-it",
        "qwen25-math-cot",
        ("aime24", 30, "05c88a9d9d97db6defaf86abe3e64206e70e89974bdc27d42f420a1b04ae6b93"),
        ("amc23", 40, "302783f7a6e419e60016982685108ef6e7948e743fb316a853d95327edd9f6ee"),
        ("math500", 500, "5cc0181439dc69f672528e79fa629b92c6f3d126ef589edd124e63ae01de7be0"),
        ("minerva_math", 272, "c7b0645b069aabb1122f28d74cb34e8feee71fb44dd20b987acc278039952041"),
        ("olympiadbench", 675, "954d972783c0626255bd6c8a7f02c6bac88cb13390b2c982cd12c87929edf8e6"),
    ),
    *_files(
        "meta-llama/Llama-3.1-8B",
        "Llama-3.1-8B",
        "qwen25-math-cot",
        ("aime24", 30, "6285218cd8a714e86b9df79770df8a579874ed91c9faabaf38b1a5659bd65fa2"),
        ("amc23", 40, "d42340551ab77fc2ab19622fc7f36d145cadd8c9813007252bda6ab1abd9ea85"),
    ),
    *_files(
        "home/ubuntu/skyov1-dl/Sky-T1-math-correct-5K-27B",
        "Sky-T1-math-correct-5K-27B",
        "Sky-T1",
        ("aime24", 30, "4b832d3248f7784cfce17833bff3fe8ea906b8a5ba1169fa337be71d3f219cce"),
        ("amc23", 40, "21afcae5c9c33c11acebe0982b065f70a23fb70a3d54ebd754febf5d9e221154"),
        ("math500", 500, "0be2b72f3354feef557c8be4982284afecfadfe3fb40684ab48619715ad80c40"),
        ("minerva_math", 272, "bed4193005ad23e6e0c144ebbf69ddd75be741747ad4d7f4d786ce7015f4fa95"),
    ),
    *_files(
        "icml_models/Sky-T1-math-correct-5K-32B-short-ckpts",
        "Sky-T1-math-correct-5K-32B-short",
        "Sky-T1",
        ("aime24", 30, "03e5846b3a36cf88c12dc16f56789c144bc0c39bb7b66157df3b77827b35ae7a"),
        ("amc23", 40, "64334b61c94aeed37a3ed1afc07bf994375af49ccfc85f34e9e5202d15e371e3"),
        ("math500", 500, "dab5a054d6859221edd83636d3b8feefa732eb70f908a5dfd44e4eb1a9852648"),
        ("olympiadbench", 675, "9c4ab001d94ef0055017749ce14761d3b2795a97fc9c124c70b068e45d057891"),
    ),
    *_files(
        "icml_models/Sky-T1-math-corrupt-0.2-32B",
        "Sky-T1-math-corrupt-0.2-32B",
        "Sky-T1",
        ("aime24", 30, "24d592e952adedbd1db8cc68b728c8e17e0e80f8b4bd694268bc99ee35d016ae"),
        ("amc23", 40, "f945a633b8855955560fa1787f9fb2378f626e87f6f986df2328775ab23a315d"),
    ),
    *_files(
        "icml_models/Sky-T1-math-reflection-1.0-32B",
        "Sky-T1-math-reflection-1.0-32B",
        "Sky-T1",
        ("aime24", 30, "61e764ad763a567b31328625ceff518b52301e85e052dff802169de7ebb10775"),
        ("amc23", 40, "6c268726c5955f747be4c9e64dc5a80f7606416be491f758daf5ec5889557892"),
    ),
    Published(
        "Qwen2.5-Math, 8 each",
        "math",
        800,
        Origin(
            *_QWEN,
            "evaluation/data/eval_rm_maj_example/math_cot_100.jsonl",
            sha256="5b9128525733336c4b5bf5d3222f72b18655a305258dc09c301b546e9365ba5e",
        ),
    ),
)


def fetch(cache: Path, given: Mapping[str, Path]) -> dict[Published, Path]:
    """Each file in the cache, checked.

    Raises:
        DataError: a file is missing, another one than pinned, or cannot be downloaded.
    """
    found = {}
    for published in FILES:
        origin = published.origin
        path = cache / origin.repository / origin.path
        found[published] = pinned_files.fetched(origin, path, given, origin.repository)
    return found


def read(files: Mapping[Published, Path], data_dir: Path) -> list[Response]:
    """Every response.

    Raises:
        DataError: a file has another number of responses, or the data are missing.
    """
    golds = {
        name: {_key(row.problem): row.golds for row in read_eval_set(name, data_dir)}
        for name in _SETS.values()
    }
    responses: list[Response] = []
    for published, path in files.items():
        found = list(_of_file(published, path, golds.get(published.benchmark, {})))
        if len(found) != published.rows:
            raise DataError(f"{path}: {len(found)} responses, expected {published.rows}")
        responses += found
    return responses


def _of_file(
    published: Published, path: Path, golds: Mapping[str, Sequence[str]]
) -> Iterator[Response]:
    with path.open(encoding="utf-8") as file:
        for line in file:
            row = json.loads(line)
            # Five problems of AIME are worded otherwise there; their golds are integers.
            given = golds.get(_key(row["question"])) or [row.get("answer") or row["gt"]]
            for sample, text in enumerate(row["code"]):
                name = f"{row['idx']}/{sample}"
                yield Response(published.model, published.benchmark, name, text, tuple(given))


def _key(problem: str) -> str:
    return re.sub(r"\s+", "", problem)


def add_options(parser: argparse.ArgumentParser) -> None:
    """`--cache` and `--from`, as `fetch` takes them."""
    known = sorted({published.origin.repository for published in FILES})
    pinned_files.add_options(parser, CACHE, known, "REPOSITORY")


def _lines(cache: Path, given: Mapping[str, Path]) -> list[str]:
    return [
        f"{published.model}, {published.benchmark}: {published.rows} responses, {path}"
        for published, path in fetch(cache, given).items()
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status 0, or 2 with one line."""
    return pinned_files.command(
        "lab.experiments.graders.responses", __doc__, add_options, _lines, argv
    )


if __name__ == "__main__":
    raise SystemExit(main())

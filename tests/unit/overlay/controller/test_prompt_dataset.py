"""The check before a run and the run itself read the same labels: the text of the file."""

from __future__ import annotations

import datetime
import decimal
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import openrlhf.datasets.utils as upstream
import pyarrow as pa
import pytest
from pyarrow import parquet

from sg_rlhf.config import ConfigError, load_config
from sg_rlhf.config.checks import input_files
from sg_rlhf.overlay.controller.prompt_dataset import PromptDataset, read_prompts
from sg_rlhf.overlay.reporting.errors import UnusablePrompts
from tests.unit.families import FAMILIES

ROOT = Path(__file__).parents[4]
TINY = str(ROOT / "configs" / "kk" / "grpo_sg_tiny_cpu.yaml")


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    from transformers import AutoTokenizer

    folder = FAMILIES["qwen2.5-base"].write(tmp_path_factory.mktemp("model"))
    return AutoTokenizer.from_pretrained(folder)


def strategy_of(names: str, label: str = "answer") -> Any:
    data = SimpleNamespace(
        input_key="input", label_key=label, apply_chat_template=False,
        image_key="images", prompt_dataset=names, max_len=512,
    )  # fmt: skip
    args = SimpleNamespace(
        data=data, rollout=SimpleNamespace(max_new_tokens=256),
        sg=SimpleNamespace(chat_template_kwargs={}), use_ms=False,
    )  # fmt: skip
    return SimpleNamespace(args=args, is_rank_0=lambda: False, print=lambda *given: None)


def trained_on(path: Path, tokenizer: Any, label: str = "answer") -> list[Any]:
    """The labels of a run, after what stops it."""
    strategy = strategy_of(str(path), label)
    prompts = PromptDataset(read_prompts(str(path), None, strategy), tokenizer, strategy)
    prompts.check()
    return prompts.labels


def check(path: Path, label: str = "answer") -> list[str]:
    """What the check before the run says."""
    reward = path.parent / "reward.py"
    reward.write_text("def reward_func(queries, prompts, labels):\n    return 0.0\n")
    given = [f"data.prompt_dataset={path}", "eval.dataset=null", f"reward.remote_url={reward}"]
    config = load_config(TINY, [*given, f"data.label_key={label}"])
    input_files.check_files(config)
    return input_files.check_prompts(config)


def json_rows(*labels: str) -> str:
    return "".join(f'{{"input": "p{n}", "answer": {x}}}\n' for n, x in enumerate(labels))


def csv_rows(*labels: str) -> str:
    return "input,answer\n" + "".join(f"p{n},{x}\n" for n, x in enumerate(labels))


BOM = "\N{ZERO WIDTH NO-BREAK SPACE}"
#: Numbers, dates and what CSV readers take for a missing value.
TEXTS: dict[str, tuple[str, str, list[Any]]] = {
    "a float next to an integer": ("jsonl", json_rows("7", "2.5", "28.0"), ["7", "2.5", "28.0"]),
    "the zeros of a float": ("jsonl", json_rows("2.50", "1e5"), ["2.50", "1e5"]),
    "long integers": (
        "jsonl", json_rows("123456789012345678901234567890", "9007199254740993", "0.5"),
        ["123456789012345678901234567890", "9007199254740993", "0.5"],
    ),
    "dates": ("jsonl", json_rows(*['"1961-08-04"'] * 4), ["1961-08-04"] * 4),
    "a list of dates": ("jsonl", json_rows('["1961-08-04"]'), [["1961-08-04"]]),
    "a list of numbers": ("jsonl", json_rows("[7, 2.5]"), [[7, 2.5]]),
    "truth values": ("jsonl", json_rows("true", "false"), ["true", "false"]),
    "text next to a number": ("jsonl", json_rows('"seven"', "7"), ["seven", "7"]),
    "a byte order mark": ("jsonl", BOM + json_rows("7"), ["7"]),
    "a list with a byte order mark": ("json", BOM + '[{"input": "p", "answer": 2.50}]', ["2.50"]),
    "CSV: zeros in front": ("csv", csv_rows("007", "1.0", "1e5"), ["007", "1.0", "1e5"]),
    "CSV: missing values": (
        "csv", csv_rows("NA", "None", "null", "nan", "N/A"), ["NA", "None", "null", "nan", "N/A"],
    ),
    "CSV: dates and truth values": ("csv", csv_rows("1961-08-04", "True"), ["1961-08-04", "True"]),
    "CSV: a byte order mark": ("csv", BOM + csv_rows("7"), ["7"]),
    "CSV: prompts that are dates": ("csv", "input,answer\n1961-08-04,7\n", ["7"]),
}  # fmt: skip


@pytest.mark.parametrize("name", TEXTS)
def test_a_label_of_a_text_file_is_its_text(name: str, tokenizer: Any, tmp_path: Path) -> None:
    suffix, content, labels = TEXTS[name]
    path = tmp_path / f"rows.{suffix}"
    path.write_text(content)
    check(path)
    found = trained_on(path, tokenizer)
    assert found == labels and [*map(type, found)] == [*map(type, labels)]


DAY = datetime.date(1961, 8, 4)
COLUMNS: dict[str, tuple[Any, list[Any]]] = {
    "decimals": (pa.array([decimal.Decimal("2.50"), decimal.Decimal("10.00")]), ["2.50", "10.00"]),
    "dates": (pa.array([DAY, DAY]), ["1961-08-04"] * 2),
    "bytes": (pa.array([b"7", "é".encode()]), ["7", "é"]),
    "dictionary text": (pa.array(["a", "b"]).dictionary_encode(), ["a", "b"]),
    "integers": (pa.array([9007199254740993, 7]), ["9007199254740993", "7"]),
    "floats": (pa.array([2.5, 0.1]), ["2.5", "0.1"]),
    "short floats": (pa.array([0.9, 2.5], pa.float32()), ["0.9", "2.5"]),
    "truth values": (pa.array([True, False]), ["true", "false"]),
    "lists of dates": (pa.array([[DAY], [DAY, DAY]]), [["1961-08-04"], ["1961-08-04"] * 2]),
}


def write_parquet(table: pa.Table, folder: Path) -> Path:
    parquet.write_table(table, folder / "rows.parquet")
    return folder / "rows.parquet"


def write_arrow(table: pa.Table, folder: Path) -> Path:
    with pa.ipc.new_file(folder / "rows.arrow", table.schema) as file:
        file.write_table(table)
    return folder / "rows.arrow"


def write_stream(table: pa.Table, folder: Path) -> Path:
    with pa.ipc.new_stream(str(folder / "rows.arrow"), table.schema) as file:
        file.write_table(table)
    return folder / "rows.arrow"


def save_folder(table: pa.Table, folder: Path) -> Path:
    datasets.Dataset(table).save_to_disk(folder / "saved")
    return folder / "saved"


def save_splits(table: pa.Table, folder: Path) -> Path:
    data = datasets.Dataset(table)
    datasets.DatasetDict({"test": data, "train": data}).save_to_disk(folder / "saved")
    return folder / "saved"


def parquet_folder(table: pa.Table, folder: Path) -> Path:
    (folder / "files").mkdir()
    write_parquet(table, folder / "files")
    return folder / "files"


@pytest.mark.parametrize(
    "write", [write_parquet, write_arrow, write_stream, save_folder, save_splits, parquet_folder]
)
@pytest.mark.parametrize("name", COLUMNS)
def test_a_label_of_a_table_is_text(
    name: str, write: Callable[[pa.Table, Path], Path], tokenizer: Any, tmp_path: Path
) -> None:
    column, labels = COLUMNS[name]
    path = write(pa.table({"input": ["a", "b"], "answer": column}), tmp_path)
    check(path)
    assert trained_on(path, tokenizer) == labels


@pytest.mark.parametrize("write", [write_parquet, save_folder])
@pytest.mark.parametrize(
    ("values", "words"),
    [
        ([datetime.datetime(1961, 8, 4)], "write this column as text"),
        ([b"\xff\xfe"], "expected text in UTF-8"),
        ([float("nan")], "missing or empty"),
        ([None], "missing or empty"),
    ],
)
def test_a_value_without_one_text_is_refused(
    values: list[Any], words: str, write: Callable[[pa.Table, Path], Path], tmp_path: Path
) -> None:
    path = write(pa.table({"input": ["a"], "answer": values}), tmp_path)
    with pytest.raises(ConfigError) as refusal:
        check(path)
    assert f"{path}: row 1: answer: " in str(refusal.value) and words in str(refusal.value)


@pytest.mark.parametrize(
    ("content", "suffix", "kind"),
    [
        (json_rows("7", "2.5"), "jsonl", "double"),
        (json_rows('"1961-08-04"'), "jsonl", "timestamp"),
        (json_rows('{"a": 2.50}'), "jsonl", "struct"),
        (csv_rows("007"), "csv", "int64"),
    ],
)
def test_types_that_datasets_guessed_in_a_folder_of_text_files_are_refused(
    content: str, suffix: str, kind: str, tokenizer: Any, tmp_path: Path
) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    file = folder / f"train.{suffix}"
    file.write_text(content)
    builder = "CSV" if suffix == "csv" else "JSON"
    said = rf"{folder}: row 1: answer: .*{builder} files as {kind}.*name the file"
    with pytest.raises(ConfigError, match=said):
        check(folder)
    with pytest.raises(UnusablePrompts, match=said):  # as an id of a hub, which is read here first
        trained_on(folder, tokenizer)
    check(file)
    file.write_text(json_rows("7", "8") if suffix == "jsonl" else csv_rows("seven"))
    assert trained_on(folder, tokenizer) == (["7", "8"] if suffix == "jsonl" else ["seven"])


def test_a_split_that_a_folder_lacks_is_one_line(tmp_path: Path) -> None:
    data = datasets.Dataset.from_dict({"input": ["a"], "answer": ["b"]})
    datasets.DatasetDict({"test": data}).save_to_disk(tmp_path / "saved")
    with pytest.raises(ConfigError, match="saved: no split 'train', expected one of test"):
        check(tmp_path / "saved")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.md").write_text("x")
    with pytest.raises(ConfigError, match="other: cannot be read as a data set: "):
        check(tmp_path / "other")


def test_more_values_than_names_in_a_csv_file_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("input,answer\nwho, really,x\n")
    with pytest.raises(ConfigError, match=r"row 1: more values than the header has names"):
        check(tmp_path / "a.csv")


@pytest.mark.parametrize("shares", [None, "0.3,0.7"])
def test_rows_come_in_the_order_of_upstream(shares: str | None, tmp_path: Path) -> None:
    for name, count in (("a", 30), ("b", 12)):
        rows = [{"input": f"{name}{n}", "answer": "x", "datasource": name} for n in range(count)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    names = f"{tmp_path}/a.jsonl, {tmp_path}/b.jsonl"
    given: Any = (names, shares, strategy_of(names), 7, 20)
    ours = read_prompts(*given)
    assert [row["input"] for _, row in ours] == upstream.blending_datasets(*given)["input"][:]
    assert list(ours.select(range(3))) == ours[:3]
    assert ours[1][0] == f"{tmp_path}/a.jsonl: row 2" or shares


def test_images_are_refused(tokenizer: Any, tmp_path: Path) -> None:
    table = pa.table({"input": ["a"], "answer": ["x"], "images": [["a.png"]]})
    path = write_parquet(table, tmp_path)
    strategy = strategy_of(str(path))
    found = PromptDataset(read_prompts(str(path), None, strategy), tokenizer, strategy)
    with pytest.raises(UnusablePrompts, match=r"row 1: images: images are not supported; take"):
        found.check()

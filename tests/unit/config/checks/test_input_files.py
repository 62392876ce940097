"""Files that a recipe names: what a run would trip over is one line before Ray starts."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet

from sg_rlhf.config import ConfigError, load_config
from sg_rlhf.config.checks import files, input_files
from sg_rlhf.data_io.prompt_rows import value_of
from sg_rlhf.overlay.driver import run
from sg_rlhf.tasks.grade import label_fault
from sg_rlhf.train import main

ROOT = Path(__file__).parents[4]
TINY = str(ROOT / "configs" / "kk" / "grpo_sg_tiny_cpu.yaml")
MODEL = ROOT / "sg_rlhf" / "tiny" / "kk_tiny"
GOLD = "(1) Zoey is a knight"


def row(prompt: object = "a puzzle", answer: object = GOLD) -> bytes:
    return json.dumps({"input": prompt, "answer": answer}).encode() + b"\n"


GOOD = b"".join(row(f"a puzzle {number}") for number in range(16))


@pytest.fixture(autouse=True)
def before_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that is not refused ends here, where Ray would start."""
    monkeypatch.setenv("SG_PLATFORM", "cpu")
    monkeypatch.setenv("SG_FORK_SERVER", "0")
    monkeypatch.setattr(run, "main", lambda args, workers=None: 99)


@pytest.fixture
def start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    """Overrides -> status, output, error line of a start."""
    (tmp_path / "good.jsonl").write_bytes(GOOD)

    def begin(*overrides: str, whole: bool = False) -> tuple[int, str, str]:
        named = {one.partition("=")[0] for one in overrides}
        usual = [f"data.prompt_dataset={tmp_path}/good.jsonl", "eval.dataset=null"]
        rest = [one for one in usual if one.partition("=")[0] not in named]
        run_dir = tmp_path / "run"
        if not whole:  # what `main` asks, without the second that it takes for all else
            try:
                config = load_config(TINY, [*rest, *overrides])
                input_files.check_files(config)
                input_files.check_prompts(config)
            except ConfigError as error:
                said = f"error: {error}"
                return 2, "", said
            return 99, "", ""
        status = main(["--config", TINY, "--run-dir", str(run_dir), *rest, *overrides])
        found = capsys.readouterr()
        assert status == 99 or not run_dir.exists()
        lines = found.err.splitlines()
        assert len(lines) == (0 if status == 99 else 1)
        return status, found.out, "".join(lines)

    return begin


ROWS: dict[str, tuple[str, bytes, str]] = {
    "nothing": ("a.jsonl", b"", "no rows, expected at least one prompt"),
    "blank lines": ("a.jsonl", b"\n \n", "no rows, expected at least one prompt"),
    "no input": ("a.jsonl", GOOD + b'{"prompt": "x"}\n', "row 17: input: missing"),
    "a field of two lines": ("a.jsonl", b'{"a\\nb": 1}\n', "the row has ['a\\nb']"),
    "null input": ("a.jsonl", GOOD + row(None), "row 17: input: missing"),
    "a number": ("a.jsonl", GOOD + row(5), "row 17: input: 5, expected text"),
    "messages": (
        "a.jsonl", GOOD + row([{"role": "user", "content": "x"}]),
        "expected text, or messages with data.apply_chat_template=true",
    ),
    "blank input": ("a.jsonl", GOOD + row(" \n"), "row 17: input: empty"),
    "no answer": ("a.jsonl", GOOD + b'{"input": "x"}\n', "row 17: answer: missing or empty"),
    "blank answer": ("a.jsonl", GOOD + row("x", " "), "row 17: answer: missing or empty"),
    "a list": ("a.jsonl", GOOD + row("x", ["a"]), "row 17: answer: ['a'], expected text"),
    "unreadable gold": (
        "a.jsonl", GOOD + row("x", "no"), "row 17: answer: reference answer line 'no'",
    ),
    "no JSON": ("a.jsonl", GOOD + b"{\n", "row 17: not JSON"),
    "no object": ("a.jsonl", GOOD + b"[1]\n", "row 17: [1], expected an object with 'input'"),
    "NaN": ("a.jsonl", GOOD + b'{"input": NaN}\n', "NaN is no number of JSON"),
    "deep": ("a.jsonl", GOOD + b"[" * 100_000 + b"\n", "row 17: not JSON"),
    "no UTF-8": ("a.jsonl", GOOD + b'{"input": "\xff"}\n', "row 17: not JSON: not UTF-8 (byte 11"),
    "UTF-16": ("a.jsonl", GOOD.decode().encode("utf-16"), "row 1: not JSON: not UTF-8"),
    "half a character": ("a.jsonl", GOOD + b'{"input": "\\ud800"}\n', "contains half a character"),
    "1 MB": ("a.jsonl", GOOD + row("x" * 1_000_000), "row 17: the prompt has 1000000 tokens"),
    "10 MB of junk": ("a.jsonl", b"x" * 10_000_000, "row 1: not JSON"),
    "no room": ("a.jsonl", GOOD + row("who lies? " * 100), "data.max_len=512 leaves 256 next to"),
    "no list": ("a.json", b'{"a": 1}', "row 1: input: missing"),
    "torn list": ("a.json", b'[{"a": 1}', "not JSON"),
    "CSV without rows": ("a.csv", b"input,answer\n", "no rows"),
    "CSV of others": ("a.csv", b"a,b\n1,2\n", "row 1: input: missing"),
    "CSV in Latin-1": ("a.csv", b"input,answer\n\xe9,x\n", "not a readable CSV file in UTF-8"),
    "no parquet": ("a.parquet", b"nope", "not a readable parquet file"),
    "text": ("a.txt", GOOD, "expected a file that ends in .json, .jsonl, .csv"),
    "a script": ("a.py", b"open('marker', 'w')", "runs a script of the data set"),
}  # fmt: skip


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("key", ["data.prompt_dataset", "eval.dataset"])
def test_rows_that_no_run_can_use_are_refused(
    key: str, name: str, start: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    file, content, words = ROWS[name]
    (tmp_path / file).write_bytes(content)
    status, _, said = start(f"{key}={tmp_path}/{file}")
    assert status == 2 and said.startswith(f"error: {key}") and words in said
    assert str(tmp_path / file) in said and len(said) < 500


@pytest.mark.parametrize("kind", ["folder", "dangling", "loop", "absent", "empty folder", "comma"])
def test_names_that_lead_nowhere_are_refused(
    kind: str, start: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    path = tmp_path / ("empty" if kind == "empty folder" else "a.jsonl")
    if "folder" in kind:
        path.mkdir()
    elif kind in ("dangling", "loop"):
        path.symlink_to(path if kind == "loop" else tmp_path / "gone")
    given = f"'{tmp_path}/good.jsonl,'" if kind == "comma" else path
    status, _, said = start(f"data.prompt_dataset={given}")
    assert status == 2 and said.startswith("error: data.prompt_dataset")


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["data.max_len=256"], "data.max_len=256, rollout.max_new_tokens=256: no tokens left"),
        (["sg.eval_sets=[{name: a, dataset: FILE, temperature: 0, max_new_tokens: 600}]"],
         "data.max_len=512, sg.eval_sets, a=600: no tokens left"),
        (["data.prompt_split=test"], "data.prompt_split=test: a file has one split, train"),
        (["data.prompt_probs=0.5,0.5"], "expected 1 numbers that add up to 1"),
        (["data.prompt_probs=often"], "expected 1 numbers that add up to 1"),
        (["data.input_template=nothing"], "data.input_template='nothing': expected {} once"),
        (["data.input_template='{} {}'"], "expected {} once"),
        (["data.input_template='{}'", "data.apply_chat_template=true"], "set one of them"),
        (["data.chat_template_kwargs={enable_thinking: false}"],
         "data.chat_template_kwargs={'enable_thinking': False}: no template is applied"),
        (["data.chat_template_kwargs=false"], "expected names and values, such as {enable_"),
        (["data.chat_template_kwargs={tokenize: true}"], "tokenize is set by the command"),
        (["reward.remote_url=DIR/gone.py"], "gone.py: cannot be read: No such file"),
        (["reward.remote_url=DIR/broken.py"], "broken.py: not Python"),
        (["reward.remote_url=DIR/other.py"], "other.py: defines no reward_func"),
        (["reward.remote_url=http://"], "expected domain:NAME, a Python file or http://HOST"),
        (["reward.remote_url=score"], "expected domain:NAME, a Python file or http://HOST"),
        (["train.agent_func_path=DIR/other.py"], "other.py: defines no AgentExecutor"),
        (["ckpt.path=DIR/good.jsonl"], "cannot write there"),
        (["logger.wandb.project=team/a"], "logger.wandb.project='team/a': expected up to 128"),
        (["logger.wandb.group='a\n\n  b'"], "expected up to 128 characters of one line"),
        (["actor.model_name_or_path=a/b/c"], "no Hugging Face model folder there"),
        (["sg.trust_remote_code=[org/other]"], "sg.trust_remote_code=org/other: the recipe has no"),
    ],
)  # fmt: skip
def test_settings_that_contradict_each_other_or_the_files_are_refused(
    overrides: list[str], words: str, start: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    (tmp_path / "broken.py").write_text("def (")
    (tmp_path / "other.py").write_text("x = 1")
    said = start(*(o.replace("DIR", str(tmp_path)).replace("FILE", f"{tmp_path}/good.jsonl")
                   for o in overrides))  # fmt: skip
    assert said[0] == 2 and words in said[2]


def test_good_rows_start_and_repeated_ones_are_one_remark(
    start: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    assert start(whole=True)[0] == 99
    (tmp_path / "twice.jsonl").write_bytes(GOOD + b"\n" + GOOD)
    (tmp_path / "list.json").write_text(json.dumps([json.loads(x) for x in GOOD.splitlines()]))
    shutil.rmtree(tmp_path / "run")
    status, out, _ = start(
        f"data.prompt_dataset={tmp_path}/twice.jsonl", f"eval.dataset={tmp_path}/list.json",
        whole=True,
    )  # fmt: skip
    assert status == 99
    twice, both = (line for line in out.splitlines() if line.startswith("remark: "))
    assert twice.startswith("remark: data.prompt_dataset: 16 of 32 rows repeat an earlier one")
    assert "twice.jsonl: row 18 repeats" in twice and "row 1)" in twice
    assert both.startswith("remark: eval.dataset: 16 of 16 prompts are in data.prompt_dataset too")


def test_a_terminal_shows_how_far_the_check_of_the_prompts_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    prompts = [row(f"{number} " + "is a knight " * 40) for number in range(16)]
    (tmp_path / "long.jsonl").write_bytes(b"".join(prompts))
    files = [f"data.prompt_dataset={tmp_path}/long.jsonl", "eval.dataset=null"]
    config = load_config(TINY, [*files, "data.max_len=420", "rollout.max_new_tokens=16"])
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    input_files.check_prompts(config)
    shown = capsys.readouterr().err
    assert f"checking {tmp_path}/long.jsonl: 0 rows" in shown
    assert f"counting tokens of {tmp_path}/long.jsonl:   0%|" in shown


def test_contradictions_are_kept_with_a_remark(tmp_path: Path) -> None:
    """As of the published mathematics data, 11 of whose 10,000 rows are such."""
    (tmp_path / "a.jsonl").write_bytes(GOOD + row("a puzzle 3", "(1) Zoey is a knave") * 2)
    given = [f"data.prompt_dataset={tmp_path}/a.jsonl", "eval.dataset=null"]
    (remark,) = input_files.check_prompts(load_config(TINY, given))
    assert "2 of 18 rows have an earlier prompt with another label (first: " in remark


def test_a_bad_row_ends_the_command_before_anything_is_written(
    start: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    (tmp_path / "a.jsonl").write_bytes(GOOD + row(5))
    status, out, said = start(f"data.prompt_dataset={tmp_path}/a.jsonl", whole=True)
    assert (status, out) == (2, "") and "row 17: input: 5, expected text" in said


def damaged(model: Path, name: str) -> None:
    config, weights = model / "config.json", model / "model.safetensors"
    if name == "no JSON":
        config.write_text("{")
    elif name == "no object":
        config.write_text("[]")
    elif name == "no type":
        config.write_text("{}")
    elif name == "no weights":
        weights.unlink()
    elif name == "torn":
        weights.write_bytes(weights.read_bytes()[:-1])
    elif name == "no safetensors":
        weights.write_bytes(b"\xff" * 64)
    elif name == "no shard":
        index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
        (model / "model.safetensors.index.json").write_text(json.dumps(index))
    elif name == "no tokenizer":
        (model / "tokenizer.json").unlink()
    elif name == "code":
        given = json.loads(config.read_text())
        config.write_text(json.dumps(given | {"auto_map": {"AutoConfig": "own.Config"}}))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("no JSON", "config.json is not JSON"),
        ("no object", "config.json is no JSON object"),
        ("no type", "config.json has no model_type"),
        ("no weights", "no .safetensors or .bin weights there"),
        ("torn", "model.safetensors is truncated"),
        ("no safetensors", "model.safetensors is truncated"),
        ("no shard", "2 of 2 weight files are missing: model-1.safetensors"),
        ("no tokenizer", "no tokenizer there"),
        ("code", "config.json names code of the model (own.Config), which runs only for models "
         "that you name: sg.trust_remote_code=["),
    ],
)  # fmt: skip
def test_a_model_that_is_not_whole_or_brings_code_is_refused(
    name: str, words: str, start: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    model = shutil.copytree(MODEL, tmp_path / "model")
    damaged(model, name)
    status, _, said = start(f"actor.model_name_or_path={model}")
    assert status == 2 and said.startswith(f"error: actor.model_name_or_path={model}: ")
    assert words in said


def test_adapters_of_stacked_experts_are_refused(tmp_path: Path) -> None:
    """transformers 5 stacks them; vLLM would load them wrongly, or without their adapters."""
    model = shutil.copytree(MODEL, tmp_path / "model")
    settings = [f"actor.model_name_or_path={model}", "ds.lora.rank=8"]
    files.check_models(load_config(TINY, settings))
    given = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(given | {"num_experts": 4}))
    with pytest.raises(ConfigError, match="a mixture of experts, not with ds.lora.rank=8"):
        files.check_models(load_config(TINY, settings))
    files.check_models(load_config(TINY, settings[:1]))


def test_a_model_that_is_asked_for_by_name_may_bring_code(tmp_path: Path) -> None:
    model = shutil.copytree(MODEL, tmp_path / "model")
    damaged(model, "code")
    named = [f"actor.model_name_or_path={model}", f"sg.trust_remote_code=[{model}]"]
    files.check_models(load_config(TINY, named))
    with pytest.raises(ConfigError, match="that you name"):
        files.check_models(load_config(TINY, named[:1]))
    # Its auto_map may point to a repository that is no model of the recipe.
    named[1] = f"sg.trust_remote_code=[{model},org/code]"
    files.check_models(load_config(TINY, named))


@pytest.mark.parametrize("recipe", ["kk", "math", "search"])
def test_the_labels_of_a_recipe_are_read_by_its_domains_grader(recipe: str) -> None:
    config = load_config(ROOT / "configs" / recipe / "grpo_sg_tiny_cpu.yaml")
    (domain,) = input_files.domains_of(config)
    assert domain.name == recipe
    assert label_fault("", [domain.grade]) and label_fault(5, [domain.grade])
    good = GOLD if recipe == "kk" else '["5"]'
    assert label_fault(good, [domain.grade]) is None


def test_a_file_that_a_jobs_package_left_out(
    start: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(input_files.IN_A_JOB, "{}")
    status, _, line = start("data.prompt_dataset=data/kk/train.jsonl")
    assert status == 2
    assert line.startswith("error: data.prompt_dataset=data/kk/train.jsonl: no such file on this")
    assert line.endswith("and give its absolute path")


VERL = {
    "data_source": "gsm8k", "prompt": [{"role": "user", "content": "6 * 7?"}], "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "42"}, "extra_info": {"index": 0},
}  # fmt: skip
#: Rows of other trainers, and what a message says of them.
OTHERS: dict[str, tuple[dict[str, object], str]] = {
    "verl": (
        VERL,
        "set data.input_key=prompt data.label_key=reward_model.ground_truth "
        "data.apply_chat_template=true",
    ),
    "TRL, text": (
        {"prompt": "6 * 7?", "ground_truth": "42"},
        "set data.input_key=prompt data.label_key=ground_truth",
    ),
    "TRL, messages": (
        {"prompt": [{"role": "user", "content": "6 * 7?"}], "solution": "42"},
        "set data.input_key=prompt data.label_key=solution data.apply_chat_template=true",
    ),
    "messages alone": (
        {"messages": [{"role": "user", "content": "6 * 7?"}], "answer": "42"},
        "set data.input_key=messages data.label_key=answer data.apply_chat_template=true",
    ),
    "a question": (
        {"question": "6 * 7?", "answer": "42"}, "set data.input_key=question data.label_key=answer",
    ),
}  # fmt: skip
OWN_REWARD = "def reward_func(queries, prompts, labels):\n    return 0.0\n"


def written(row: dict[str, object], kind: str, folder: Path) -> Path:
    path = folder / f"rows.{kind}"
    if kind == "parquet":
        parquet.write_table(pyarrow.Table.from_pylist([row]), path)
    else:
        path.write_text(json.dumps(row) + "\n")
    return path


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
@pytest.mark.parametrize("name", OTHERS)
def test_rows_of_other_trainers_are_read_with_the_settings_that_the_message_names(
    name: str, kind: str, start: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    made, words = OTHERS[name]
    path = written(made, kind, tmp_path)
    (tmp_path / "reward.py").write_text(OWN_REWARD)
    given = [f"data.prompt_dataset={path}", f"reward.remote_url={tmp_path}/reward.py"]
    status, _, said = start(*given)
    assert status == 2 and ": row 1: input: missing" in said and said.endswith(words)
    settings = words.removeprefix("set ").split()
    assert start(*given, *settings)[0] == 99
    # The label alone is missing: the same settings.
    prompt_alone = [one for one in settings if not one.startswith("data.label_key")]
    status, _, said = start(*given, *prompt_alone, "data.label_key=gold")
    assert status == 2 and ": row 1: gold: missing" in said and said.endswith(words)


def test_a_field_with_a_dot_in_its_name_is_read_by_that_name() -> None:
    assert value_of({"a.b": 1, "a": {"b": 2}}, "a.b") == 1
    assert value_of({"a": {"b": {"c": 3}}}, "a.b.c") == 3
    assert value_of({"a": "text"}, "a.b") is None and value_of({}, "a.b") is None


def test_labels_that_are_numbers_become_text_with_a_remark(tmp_path: Path) -> None:
    (tmp_path / "reward.py").write_text(OWN_REWARD)
    path = tmp_path / "a.jsonl"
    path.write_text(
        "".join(json.dumps({"input": f"6 * {n}?", "answer": 6 * n}) + "\n" for n in range(1, 4))
    )
    given = [f"data.prompt_dataset={path}", "eval.dataset=null"]
    own = [*given, f"reward.remote_url={tmp_path}/reward.py"]
    (remark,) = input_files.check_prompts(load_config(TINY, own))
    assert remark == (
        "data.prompt_dataset: 3 of 3 labels are numbers: the reward function gets them as text "
        f"(first: {path}: row 1: '6')"
    )
    # A shipped grader reads the text, too.
    shipped = [*given, "reward.remote_url=domain:math"]
    with pytest.raises(ConfigError, match=r"row 1: answer: label '6', expected a JSON array"):
        input_files.check_prompts(load_config(TINY, shipped))


def test_the_least_room_for_a_response_without_max_new_tokens(
    start: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    """Upstream would ask for one token after a prompt of `data.max_len` - 1."""
    (tmp_path / "a.jsonl").write_bytes(row("who lies? " * 100))
    count = input_files.token_counter(load_config(TINY))
    assert count is not None
    (tokens,) = count(["who lies? " * 100])
    given = [f"data.prompt_dataset={tmp_path}/a.jsonl", "rollout.max_new_tokens=null"]
    assert start(*given, f"data.max_len={tokens + 16}")[0] == 99
    status, _, said = start(*given, f"data.max_len={tokens + 15}")
    assert (
        status == 2
        and (
            f"row 1: the prompt has {tokens} tokens, and data.max_len={tokens + 15} leaves "
            f"{tokens - 1} next to a response of 16 tokens, the least where "
            "rollout.max_new_tokens is not set"
        )
        in said
    )
    # Who wants fewer says so.
    more = "rollout.max_new_tokens=1"
    assert start(given[0], f"data.max_len={tokens + 1}", more)[0] == 99


def test_max_samples_also_cuts_the_held_out_set_which_is_said(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(GOOD)
    (tmp_path / "b.jsonl").write_bytes(GOOD.replace(b"puzzle", b"riddle"))
    given = [f"data.prompt_dataset={tmp_path}/a.jsonl", f"eval.dataset={tmp_path}/b.jsonl"]
    (remark,) = input_files.check_prompts(load_config(TINY, [*given, "data.max_samples=4"]))
    assert remark.startswith("data.max_samples=4 holds for eval.dataset too: its first 4 of 16")
    assert not input_files.check_prompts(load_config(TINY, [*given, "data.max_samples=16"]))
    sets = f"sg.eval_sets=[{{name: b, dataset: {tmp_path}/b.jsonl, temperature: 0}}]"
    own = [given[0], "eval.dataset=null", sets, "data.max_samples=4"]
    assert not input_files.check_prompts(load_config(TINY, own))

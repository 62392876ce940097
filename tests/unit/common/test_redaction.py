"""Secrets are used, and neither written nor shown."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from wandb.util import json_friendly_val

from sg_rlhf.common.redaction import (
    HIDDEN,
    SecretStr,
    is_secret,
    mask_namespace,
    redact_argv,
    redact_text,
)
from sg_rlhf.config import load_config
from sg_rlhf.config.resume_compatibility import Change
from sg_rlhf.config.upstream_flags import flags
from sg_rlhf.launch.command import main as launch
from sg_rlhf.overlay.driver.arguments import upstream_arguments
from sg_rlhf.overlay.driver.prepare import prepare_run_dir
from sg_rlhf.overlay.reporting import error_report, terminal
from sg_rlhf.plan.load import with_run_dir
from sg_rlhf.train import main

ROOT = Path(__file__).parents[3]
TINY = str(ROOT / "configs" / "kk" / "grpo_sg_tiny_cpu.yaml")
KEY, PASSWORD, TOKEN = "0123456789abcdef0123456789abcdef01234567", "opensesame", "hf_" + "Q" * 34
SECRETS = (KEY, PASSWORD, TOKEN)
OVERRIDES = [
    f"logger.wandb.key={KEY}",
    f"reward.remote_url=http://ann:{PASSWORD}@host:5000/score",
    f"sg.search.url=http://ann:{PASSWORD}@host:8000/retrieve?token={TOKEN}",
]


def hides(text: str) -> bool:
    return not any(secret in text for secret in SECRETS)


def test_of_upstreams_keys_one_is_a_secret() -> None:
    assert [key for key in flags() if is_secret(key)] == ["logger.wandb.key"]
    names = ("HF_TOKEN", "WANDB_API_KEY", "OPENAI_API_KEY", "AWS_SECRET_ACCESS_KEY", "PGPASSWORD")
    assert [is_secret(name) for name in names] == [True, True, True, True, False]


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("http://ann:opensesame@host/x", f"http://{HIDDEN}@host/x"),
        ("see https://ann@host, then", f"see https://{HIDDEN}@host, then"),
        ("http://host/x?a=1&token=abc&b=2", f"http://host/x?a=1&token={HIDDEN}&b=2"),
        (f"login {TOKEN}.", f"login {HIDDEN}."),
        (f"Bearer {KEY}", f"Bearer {HIDDEN}"),
        ("mail ann@host about data@v1", "mail ann@host about data@v1"),
        ("a word: correcthorse", f"a word: {HIDDEN}"),
    ],
)
def test_what_is_hidden_of_a_text(text: str, shown: str) -> None:
    assert redact_text(text, {"SOME_TOKEN": "correcthorse", "MY_KEY": "short"}) == shown


def test_a_command_line_shows_no_secret() -> None:
    words = ["--logger.wandb.key", KEY, "--train.seed", "1", *OVERRIDES, f"--token={TOKEN}"]
    shown = redact_argv(words)
    assert hides(" ".join(shown)) and shown[2:4] == ["--train.seed", "1"]
    assert shown[1] == HIDDEN and shown[5] == f"reward.remote_url=http://{HIDDEN}@host:5000/score"


def test_upstreams_namespace_works_and_prints_without_secrets() -> None:
    args = upstream_arguments(load_config(TINY, OVERRIDES))
    mask_namespace(args)
    # Upstream prints it whole, and hands its sections to wandb, which makes text of them.
    assert hides(repr(args)) and hides(json.dumps(json_friendly_val(args.__dict__)))
    assert args.logger.wandb.key == KEY and PASSWORD in args.sg.domains["search"]["url"]
    assert isinstance(args.logger.wandb.key, SecretStr)
    assert args.train.seed == 42 and "ann" not in repr(args)


def test_the_files_of_a_run_hold_no_secret(tmp_path: Path) -> None:
    config = with_run_dir(load_config(TINY, OVERRIDES), tmp_path)
    prepare_run_dir(config)
    assert config.value("logger.wandb.key") == KEY  # it is still used
    try:
        raise RuntimeError(f"cannot reach http://ann:{PASSWORD}@host with {TOKEN}")
    except RuntimeError as error:
        error_report.save_traceback(error, tmp_path)
    session = tmp_path / "session"
    (session / "logs").mkdir(parents=True)
    (session / "logs" / "worker-1.out").write_bytes(f"{TOKEN} \xff\n".encode("latin-1"))
    terminal.keep_worker_logs(session, tmp_path)
    written = [
        path for path in tmp_path.rglob("*") if path.is_file() and session not in path.parents
    ]
    assert {path.name for path in written} >= {
        "config.yaml", "environment.json", "started_with.json", "failure.log", "worker-1.out",
    }  # fmt: skip
    for path in written:
        assert hides(path.read_bytes().decode("latin-1")), path
    again = load_config(tmp_path / "config.yaml")
    assert {*config.values} - {*again.values} == {"logger.wandb.key"}


@pytest.mark.parametrize(
    ("command", "wrong"),
    [(main, ["sg.search.url=ftp://ann:opensesame@host"]), (main, [f"logger.wandb.key=[{KEY}]"]),
     (main, [f"logger.wandb.key=[{KEY}"]), (launch, [])],
)  # fmt: skip
def test_nothing_that_a_command_prints_shows_a_secret(
    command: Callable[[list[str]], int],
    wrong: list[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SG_PLATFORM", "cpu")
    first = "--dry-run" if command is main else "sbatch"
    status = command([first, "--config", TINY, *OVERRIDES, *wrong])
    found = capsys.readouterr()
    assert status == 2 and found.err.count("\n") == 1
    assert hides(found.out + found.err)


def test_a_dry_run_shows_no_secret(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SG_PLATFORM", "cpu")
    assert main(["--config", TINY, "--dry-run", *OVERRIDES]) == 0
    out = capsys.readouterr().out
    assert hides(out) and "host:5000/score" in out
    change = Change("reward.remote_url", f"http://ann:{PASSWORD}@a", "http://b")
    assert hides(str(change)) and "http://b" in str(change)

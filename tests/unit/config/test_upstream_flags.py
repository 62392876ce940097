"""The shipped table of upstream's flags, which stands in where OpenRLHF is not installed."""

from __future__ import annotations

import subprocess
import sys

import pytest

from sg_rlhf.config import load_config, upstream_flags
from sg_rlhf.config.upstream_flags import SHIPPED, UpstreamMissing, as_json, flags
from sg_rlhf.overlay.driver.arguments import upstream_arguments

WRITE = "from sg_rlhf.config import upstream_flags as u; u.SHIPPED.write_text(u.as_json(u.flags()))"
ARGUMENTS = [
    "actor.model_name_or_path=m", "data.prompt_dataset=d", "reward.remote_url=r.py",
    "vllm.num_engines=1",
]  # fmt: skip


def test_the_shipped_table_is_that_of_the_installed_upstream() -> None:
    assert SHIPPED.read_text() == as_json(flags()), f"python -c '{WRITE}'"
    assert as_json(upstream_flags.shipped_flags()) == as_json(flags())


def test_a_recipe_can_be_read_without_upstream(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(_name: str) -> None:
        return None

    overrides = ["actor.adam.lr=1e-6", "actor.policy_loss_type=cispo", "ds.packing_samples=true"]
    real = load_config(None, overrides)
    upstream_flags.flags.cache_clear()
    upstream_flags.main_block.cache_clear()
    monkeypatch.setattr(upstream_flags.importlib.util, "find_spec", missing)
    try:
        with pytest.raises(UpstreamMissing, match=r"scripts/bootstrap\.sh"):
            upstream_flags.build_parser()
        found = load_config(None, overrides)
        assert found == real
        with pytest.raises(UpstreamMissing):
            upstream_arguments(load_config(None, ARGUMENTS))
    finally:
        upstream_flags.flags.cache_clear()


def test_another_python_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upstream_flags.importlib.util, "find_spec", lambda _name: None)
    monkeypatch.setattr(upstream_flags, "PIPELINE_PYTHON", (3, 10))
    with pytest.raises(UpstreamMissing, match=r"^training needs Python 3\.11, .* this is 3\.\d+"):
        upstream_flags.upstream_root()


def test_checking_flags_imports_no_heavy_package() -> None:
    # They would be seconds of every start and of every dry run.
    code = (
        "import sys\n"
        "from sg_rlhf.config.upstream_flags import build_parser, validate_args\n"
        "args = build_parser().parse_args(['--actor.model_name_or_path', 'm',"
        " '--reward.remote_url', 'r', '--vllm.num_engines', '1'])\n"
        "assert validate_args(args).actor.model_name_or_path == 'm'\n"
        "print({'torch', 'transformers', 'openrlhf.utils'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "set()\n", done.stderr

"""The contract of a domain: those of the package hold it, and one outside is as good."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from sg_rlhf.config import ConfigError, domain_settings, load_config, recipe_listing
from sg_rlhf.data import command as data
from sg_rlhf.environments import command as serve_env
from sg_rlhf.eval import run as evaluation
from sg_rlhf.eval.scores.metrics import scores
from sg_rlhf.eval.suites import suite_at
from sg_rlhf.tasks import registry
from sg_rlhf.tasks.data_source import DataSource
from sg_rlhf.tasks.domain import Domain, load
from sg_rlhf.tasks.questions import EvalError
from sg_rlhf.tasks.reward import reward_function
from sg_rlhf.tasks.settings import DomainSettings
from sg_rlhf.tasks.suite import Suite
from sg_rlhf.tasks.tiny import TinyModel
from tests.domains.reverse import REVERSE
from tests.unit.data_command import lines
from tests.unit.outside_domains import registered

ROOT = Path(__file__).parents[3]
PLACE = "tests.domains.reverse:REVERSE"


@pytest.fixture
def outside(monkeypatch: pytest.MonkeyPatch):
    """The domain of the tests, registered as a user's own would be."""
    with registered(monkeypatch, PLACE):
        yield


@pytest.mark.parametrize("name", [*registry.DOMAINS, PLACE])
def test_every_part_of_a_domain_is_there(name):
    domain = registry.find(name)
    assert name in (domain.name, PLACE)
    assert isinstance(load(domain.data), DataSource)
    assert isinstance(load(domain.suite), Suite)
    if name != "arithmetic":  # it is for a pretrained model
        assert isinstance(load(domain.tiny), TinyModel)
    if domain.settings is not None:
        chosen = load(domain.settings)
        assert issubclass(chosen, DomainSettings) and chosen.section == domain.name
        # A recipe that names one key of a section takes the defaults of the others.
        assert chosen() == chosen(**json.loads(chosen().to_env()))
    if domain.check is not None:
        assert callable(load(domain.check))


def test_listing_the_domains_imports_nothing_heavy():
    code = (
        "import sys; from sg_rlhf.tasks import registry; registry.domains()\n"
        "heavy = {'torch', 'transformers', 'pyarrow', 'httpx', 'pydantic'}\n"
        "found = heavy & sys.modules.keys()\n"
        "sys.exit(f'imported {found}' if found else 0)"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("kkk", "domain 'kkk': expected one of kk, math, search, .*; did you mean kk?"),
        ("nowhere.at_all:X", "nowhere.at_all:X: no module nowhere"),
        ("sg_rlhf.tasks.kk.domain:KNAVES", "no KNAVES in sg_rlhf.tasks.kk.domain"),
        ("sg_rlhf.tasks.kk.prompt:THINK", "is str, expected a Domain"),
        ("sg_rlhf.tasks.kk.domain:", "expected package.module:NAME"),
    ],
)
def test_what_is_no_domain_is_one_line(name, message, capsys, tmp_path):
    with pytest.raises(ValueError, match=message):
        registry.find(name)
    if ":" in name:
        assert data.main([name, "--out", str(tmp_path / "out")]) == 2
        assert capsys.readouterr().err.count("\n") == 1
        with pytest.raises(EvalError, match="--suite "):
            suite_at(name)
        assert evaluation.main(["--suite", name]) == 2
        assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            "from sg_rlhf.tasks.domain import Domain\n"
            "MINE = Domain(name='mine', title='t', grade=len, prompt_end='?')\n",
            "TypeError: .* argument 'prompt_end' .*earlier_domain.py, line 2",
        ),
        ("MINE = 1 +\n", "SyntaxError: invalid syntax .earlier_domain.py, line 1"),
    ],
)
def test_a_module_that_fails_is_one_line(content, message, monkeypatch, capsys, tmp_path):
    (tmp_path / "earlier_domain.py").write_text(content)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "earlier_domain", raising=False)
    with pytest.raises(ValueError, match=message):
        registry.find("earlier_domain:MINE")
    monkeypatch.setenv(registry.VARIABLE, "earlier_domain:MINE")
    with pytest.raises(SystemExit) as ended:
        serve_env.main(["kk", "--data", "rows.jsonl"])
    error = capsys.readouterr().err
    assert ended.value.code == 2 and error.count("\n") == 1
    assert error.startswith("sg-rlhf serve-env: SG_DOMAINS: earlier_domain:MINE: ")
    domain_settings._domains.cache_clear()
    try:
        assert recipe_listing.main([]) == 2
    finally:
        domain_settings._domains.cache_clear()
    error = capsys.readouterr().err
    assert error.startswith("sg-rlhf recipes: SG_DOMAINS: earlier") and error.count("\n") == 1


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("tests.domains.reverse:LETTERS", "SG_DOMAINS: .*: is str, expected a Domain"),
        ("reverse", "SG_DOMAINS: 'reverse': expected package.module:NAME"),
        ("tests.unit.tasks.test_registry:ANOTHER_KK", "there is a domain kk already"),
    ],
)
def test_a_wrong_variable_is_one_line(value, message, monkeypatch, capsys, tmp_path, outside):
    monkeypatch.setenv(registry.VARIABLE, value)
    with pytest.raises(ValueError, match=message):
        registry.domains()
    assert data.main(["kk", "--out", str(tmp_path / "out")]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    with pytest.raises(ConfigError, match=message):
        load_config(None)
    assert evaluation.main(["--list"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


ANOTHER_KK = Domain("kk", "", REVERSE.grade, REVERSE.data)


WITHOUT_DATA = Domain("bare", "", REVERSE.grade)


def test_a_domain_without_a_data_command(capsys, monkeypatch, tmp_path):
    place = f"{__name__}:WITHOUT_DATA"
    monkeypatch.setenv(registry.VARIABLE, place)
    for name in ("bare", place):
        assert data.main([name, "--out", str(tmp_path / "out")]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line == f"sg-rlhf data: {name}: this domain has no data command (Domain.data)"
    with pytest.raises(SystemExit):
        data.main(["--help"])
    assert "kk" in (listed := capsys.readouterr().out) and "bare" not in listed


def test_the_variable_gives_it_its_name_everywhere(outside):
    assert [*registry.domains()] == [*registry.DOMAINS, "reverse"]
    assert registry.find("reverse") is REVERSE


def test_a_domain_in_one_file_is_found_by_its_reward(tmp_path, monkeypatch):
    (tmp_path / "one_file.py").write_text("from sg_rlhf.tasks.kk.domain import KK as IT\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(registry, "DOMAINS", {})
    monkeypatch.setenv(registry.VARIABLE, "one_file:IT")
    for reward in ("one_file.py", f"{tmp_path}/one_file.py", "module:one_file"):
        assert [domain.name for domain in registry.used_by(reward, "")] == ["kk"]
    assert registry.used_by("another_file.py", "") == registry.used_by("", "") == []


def test_a_recipe_names_a_domain_and_one_of_its_graders():
    for value, names in (
        ("domain:kk", ["kk"]),
        ("domain:kk/table5", ["kk"]),
        (f"domain:{PLACE}", ["reverse"]),
    ):
        assert [domain.name for domain in registry.used_by(value, "")] == names
    assert [d.name for d in registry.used_by("domain:kk", "domain:search")] == ["kk", "search"]
    assert registry.used_by("", "my_agent.py", ["search"])[0].name == "search"
    with pytest.raises(ValueError, match="domain:kk/lenient: domain kk has strict, table5"):
        registry.used_by("domain:kk/lenient", "")


def test_its_data_command(outside, tmp_path, capsys):
    for name in ("reverse", PLACE):
        out = tmp_path / name
        assert data.main([name, "--out", str(out), "--generate", "count=5", "seed=3"]) == 0
        rows = lines(out / "train.jsonl")
        assert len(rows) == 5 and len(lines(out / "test.jsonl")) == 16
        for row in rows:
            info = reward_function(REVERSE)(
                [f"{row['input']} {row['answer']}<|im_end|>"], [row["input"]], [row["answer"]]
            )
            assert info["rewards"] == info["scores"] == 1.0
        assert json.loads((out / "manifest.json").read_text())["task"] == "reverse"
    capsys.readouterr()
    assert data.main(["reverse", "--out", str(out), "--generate", "count=5", "seed=3"]) == 0
    assert "is up to date" in capsys.readouterr().out
    assert data.main(["reverse", "--out", str(out), "--generate", "letters=5"]) == 2


def test_its_section_of_a_recipe(outside):
    recipe = ROOT / "tests" / "domains" / "reverse_tiny_cpu.yaml"
    config = load_config(recipe)
    assert config.value("sg.reverse.partial_credit") is True
    again = load_config(recipe, ["sg.reverse.partial_credit=false"])
    assert domain_settings.worker_variables(again.sg.model_dump()["domains"]) == {
        "SG_REVERSE": '{"partial_credit": false}'
    }
    with pytest.raises(ConfigError, match=r"command line: sg.reverse.partial_credit='perhaps'"):
        load_config(None, ["sg.reverse.partial_credit=perhaps"])
    with pytest.raises(ConfigError, match=r"did you mean sg.reverse.partial_credit\?"):
        load_config(None, ["sg.reverse.partial_credits=true"])


def test_its_suite_is_listed(capsys, monkeypatch):
    title = "letters in the reverse order, greedy"
    assert evaluation.main(["--list"]) == 0
    assert title not in capsys.readouterr().out
    assert evaluation.main(["--suite", PLACE, "--list"]) == 0
    assert title in capsys.readouterr().out
    monkeypatch.setenv(registry.VARIABLE, PLACE)
    assert evaluation.main(["--list"]) == 0
    assert title in capsys.readouterr().out
    assert evaluation.main(["--suite", "revers", "--model", "m", "--out", "o"]) == 2
    assert (
        "expected one of kk, math, qa, arithmetic, data, reverse, or package"
        in capsys.readouterr().err
    )


def test_the_rewards_scale_is_the_recipes(monkeypatch):
    reward_func = reward_function(REVERSE)
    prompt = "Reverse: a b c d ="
    for partial, reward in (("true", 0.5), ("false", 0.0)):
        monkeypatch.setenv("SG_REVERSE", f'{{"partial_credit": {partial}}}')
        info = reward_func([prompt + " d c a b"], [prompt], ["d c b a"])
        assert info["rewards"] == reward and info["scores"] == 0.0
        assert info["extra_logs"] == {"correct": 0.0, "format_ok": 1.0, "in_place": 0.5}


def test_groups_without_headline_ones_have_a_mean_over_all_questions():
    benchmark = load(REVERSE.suite).benchmarks[0]
    rows = [
        {"id": f"q{i}", "sample": 0, "group": "3" if i < 6 else "4", "correct": i < 3}
        for i in range(8)
    ]
    found = scores(benchmark, rows, seed=0)
    assert {name: estimate.value for name, estimate in found.items()} == {
        "accuracy": 3 / 8, "accuracy/3": 1 / 2, "accuracy/4": 0.0,
    }  # fmt: skip

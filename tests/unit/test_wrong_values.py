"""A wrong value of an option is one line that names option, value and what is allowed; status 2."""

from __future__ import annotations

import argparse
import importlib

import pytest

from sg_rlhf.data.command import add_options
from sg_rlhf.data.command import main as make_data
from sg_rlhf.eval.engines.base import DTYPES, ENGINES
from sg_rlhf.eval.run import main as evaluate
from sg_rlhf.tasks.domain import load
from sg_rlhf.tasks.registry import DOMAINS, find

COMMANDS = [
    "sg_rlhf.eval.run",
    "sg_rlhf.report.command",
    "sg_rlhf.plan.command",
    "lab.study.command",
    "lab.measure.accuracy",
    "lab.measure.sharpness",
    "lab.measure.token_gradients",
    "lab.measure.minibatch_gradients",
    "sg_rlhf.tiny.command",
    "sg_rlhf.retrieval.index",
    "sg_rlhf.retrieval.server",
    "sg_rlhf.retrieval.verify",
]


class Parsed(Exception):
    pass


@pytest.mark.parametrize("name", COMMANDS)
def test_no_option_is_a_bare_number(name, monkeypatch):
    """`type=int` says "invalid int value", and lets -1 through to wherever it hurts."""
    seen = []

    def parse(self, *args, **kwargs):
        seen.append(self)
        if self.description is None:  # of eval.run, which first looks for the suite alone
            return argparse.Namespace(suite=None), []
        raise Parsed

    module = importlib.import_module(name)
    monkeypatch.setattr(argparse.ArgumentParser, "parse_known_args", parse)
    with pytest.raises(Parsed):
        module.main([])
    options = seen[-1]._actions
    assert len(options) > 2
    bare = [option.option_strings for option in options if option.type in (int, float)]
    assert not bare


@pytest.mark.parametrize("name", DOMAINS)
def test_no_option_of_a_domain_is_a_bare_number(name):
    parser = argparse.ArgumentParser()
    add_options(parser, load(find(name).data))
    assert not [o.option_strings for o in parser._actions if o.type in (int, float)]


COUNT = "expected a whole number, 1 or more"
WRONG = [
    *[(o, v, COUNT) for o in ("--limit", "--concurrency") for v in ("x", "0", "1.5")],
    ("--tensor-parallel", "", COUNT),
    ("--seed", "x", "expected a whole number, 0 or more"),
    ("--seed", "-1", "expected a whole number, 0 or more"),
    ("--dtype", "float99", ", ".join(map(repr, DTYPES))),
    ("--engine", "hf", "choose from 'vllm', 'openai'"),
    ("--engine", "trt", ", ".join(map(repr, ENGINES))),
]


@pytest.mark.parametrize(("option", "value", "allowed"), WRONG)
def test_of_an_evaluation(option, value, allowed, capsys):
    with pytest.raises(SystemExit) as stop:
        evaluate(["--suite", "kk", "--model", "m", "--out", "o", f"{option}={value}"])
    check(stop, capsys, option, value, allowed)


@pytest.mark.parametrize(
    ("domain", "option", "value", "allowed"),
    [
        ("kk", "--test-fraction", "nan", "expected at least 0 and below 1"),
        ("math", "--test-fraction", "1", "expected at least 0 and below 1"),
        ("search", "--test-fraction", "half", "expected at least 0 and below 1"),
        ("math", "--ngram", "0", COUNT),
        ("kk", "--seed", "-3", "expected a whole number, 0 or more"),
    ],
)
def test_of_a_data_set(domain, option, value, allowed, capsys):
    with pytest.raises(SystemExit) as stop:
        make_data([domain, "--out", "o", f"{option}={value}"])
    check(stop, capsys, option, value, allowed)


def check(stop, capsys, option, value, allowed):
    error = capsys.readouterr().err
    assert stop.value.code == 2
    assert option in error and value in error and allowed in error
    assert error.count("\n") == 1

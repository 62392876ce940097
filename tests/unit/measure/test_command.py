"""`python -m sg_rlhf.measure`: the measurements by name."""

import importlib

import pytest

from sg_rlhf.measure import command


def test_the_list_names_every_measurement(capsys):
    assert command.main(["--help"]) == 0
    text = capsys.readouterr().out
    for name in command.MEASUREMENTS:
        assert f"  {name} " in text
        module = importlib.import_module(f"sg_rlhf.measure.{name.replace('-', '_')}")
        # Where the rest of the help is, with examples of this very command.
        with pytest.raises(SystemExit) as stop:
            command.main([name, "--help"])
        assert stop.value.code == 0
        explained = capsys.readouterr().out
        assert module.__doc__.split("\n")[0] in explained
        assert f"python -m {module.__name__} --" in explained


@pytest.mark.parametrize("name", ["token-gradients", "token_gradients"])
def test_a_measurement_gets_its_arguments(name, capsys):
    with pytest.raises(SystemExit) as stop:
        command.main([name, "--model", "m"])
    assert stop.value.code == 2
    assert capsys.readouterr().err == (
        "sg_rlhf.measure.token_gradients: --data FILE: not set; expected it, or --batch with a "
        "file that exists; see --help\n"
    )


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "which measurement? expected one of accuracy, sharpness"),
        (["accurcy"], "'accurcy': no such measurement; did you mean accuracy? expected"),
        (["--model", "m"], "'--model': no such measurement; expected one of"),
    ],
)
def test_another_name_gets_one_line(argv, message, capsys):
    assert command.main(argv) == 2
    captured = capsys.readouterr()
    assert message in captured.err and captured.err.count("\n") == 1 and captured.out == ""

from collections.abc import Callable

import pytest


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """The one line on stderr of a request that a command refuses with exit status 2."""

    def line(main: Callable[[list[str]], int], *arguments: object) -> str:
        capsys.readouterr()
        try:
            status = main([str(argument) for argument in arguments])
        except SystemExit as stop:  # argparse
            status = int(stop.code or 0)
        captured = capsys.readouterr()
        assert status == 2 and captured.out == "" and captured.err.count("\n") == 1
        return captured.err

    return line

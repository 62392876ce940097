from pathlib import Path

import pytest

from tests.unit.eval.puzzle_files import write_puzzle_files


@pytest.fixture(scope="session")
def puzzle_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_puzzle_files(tmp_path_factory.mktemp("kk") / "official")

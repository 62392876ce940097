from __future__ import annotations

from pathlib import Path

import pytest

from sg_rlhf.common.files import write_whole


@pytest.mark.parametrize("data", ["\u03c4 = 9\n", b"\x00\xff"])
def test_the_file_is_all_that_is_left(data: str | bytes, tmp_path: Path) -> None:
    path = tmp_path / "new" / "file"
    write_whole(path, data)
    assert path.read_bytes() == (data.encode() if isinstance(data, str) else data)
    assert list(path.parent.iterdir()) == [path]


def test_what_was_there_survives_a_write_that_fails(tmp_path: Path) -> None:
    folder = tmp_path / "taken"
    folder.mkdir()
    (folder / "before").touch()
    with pytest.raises(OSError, match="taken"):
        write_whole(folder, "a file in the place of a folder")
    assert list(tmp_path.iterdir()) == [folder] and (folder / "before").exists()

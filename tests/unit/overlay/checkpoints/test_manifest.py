"""What a manifest notices, on real folders of any contents."""

from __future__ import annotations

import hashlib
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sg_rlhf.overlay.checkpoints import manifest

FILES = st.dictionaries(
    st.from_regex(r"[a-z]{1,3}(/zero_pp_rank_[0-9]_x\.pt)?", fullmatch=True).map(
        lambda name: name if "/" in name else f"{name}.bin"
    ),
    st.binary(max_size=200),
    min_size=1,
    max_size=6,
)


def written(folder: Path, files: dict[str, bytes]) -> dict[str, manifest.Entry]:
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    manifest.write(folder, manifest.hash_files(folder, manifest.names(folder), sync=True))
    found = manifest.read(folder)
    assert found is not None
    return found


@given(files=FILES)
def test_it_is_of_every_file_and_of_what_is_in_it(files: dict[str, bytes]) -> None:
    with tempfile.TemporaryDirectory() as name:
        found = written(Path(name), files)
        assert found == {
            name: manifest.Entry(len(data), hashlib.sha256(data).hexdigest())
            for name, data in files.items()
        }
        assert manifest.first_mismatch(Path(name), found, found) is None
        assert manifest.names(Path(name)) == sorted(files)


@given(files=FILES, data=st.data())
def test_it_notices_any_change_of_a_file(files: dict[str, bytes], data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(sorted(files)))
    other = data.draw(st.none() | st.binary(max_size=200).filter(lambda new: new != files[name]))
    with tempfile.TemporaryDirectory() as at:
        folder = Path(at)
        found = written(folder, files)
        if other is None:
            (folder / name).unlink()
        else:
            (folder / name).write_bytes(other)
        said = manifest.first_mismatch(folder, found, sorted(found))
        assert said is not None and said.startswith(f"{name} ") and "\n" not in said
        # Who reads the others has nothing to say.
        assert manifest.first_mismatch(folder, found, sorted(set(found) - {name})) is None


@given(files=FILES, cut=st.integers(0, 400))
def test_a_manifest_that_is_cut_short_is_none(files: dict[str, bytes], cut: int) -> None:
    with tempfile.TemporaryDirectory() as at:
        written(Path(at), files)
        path = Path(at) / manifest.NAME
        text = path.read_bytes().rstrip()
        path.write_bytes(text[: min(cut, len(text) - 1)])
        with pytest.raises(
            manifest.InvalidManifest, match=r"manifest\.json cannot be read: its content"
        ):
            manifest.read(Path(at))


def test_a_folder_without_one(tmp_path: Path) -> None:
    assert manifest.read(tmp_path) is None
    assert manifest.read(tmp_path / "gone") is None
    (tmp_path / manifest.NAME).mkdir()
    with pytest.raises(manifest.InvalidManifest, match="Is a directory"):
        manifest.read(tmp_path)


@given(names=st.sets(st.from_regex(r"(rank_?[0-9]{1,3})?[a-z]{1,4}", fullmatch=True)),
       ranks=st.integers(1, 9))  # fmt: skip
def test_each_file_is_read_once(names: set[str], ranks: int) -> None:
    dealt = manifest.assign_files(names, ranks)
    assert len(dealt) == ranks
    assert sorted(name for share in dealt for name in share) == sorted(names)


def test_a_rank_reads_what_it_wrote() -> None:
    names = [f"zero_pp_rank_{rank}_mp_rank_00_{of}.pt" for rank in range(3) for of in "ab"]
    for rank, share in enumerate(manifest.assign_files([*names, "metric.json"], 3)):
        assert {name for name in share if f"pp_rank_{rank}_" in name} == set(
            names[2 * rank : 2 * rank + 2]
        )

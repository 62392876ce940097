"""Machines described by JSON: what is taken, and what is refused in one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sg_rlhf.doctor.facts import _EXPECTED, Disk, Facts, FactsError, Gpu, Hub, Python, parse, read

MACHINES = Path(__file__).parent / "machines"


def test_the_machines_that_are_described() -> None:
    names = {file.stem for file in MACHINES.glob("*.json")}
    assert names == {
        "a100-40x8", "a100-80x8", "h100x1", "h100x4", "h100x8", "b200x8", "4090x1", "driver-550",
        "toolkit-12.8", "toolkit-13.0", "toolkit-13.1", "shm-64mb", "disk-100gb", "host-128gb",
        "cpu-2cores",
    }  # fmt: skip
    for file in MACHINES.glob("*.json"):
        facts = read(file)
        assert parse(facts.to_json()) == facts


def test_every_key_has_its_kind() -> None:
    keys = set(Facts.__dataclass_fields__)
    for prefix, kind in (("gpus", Gpu), ("disks", Disk), ("python", Python), ("hub", Hub)):
        keys |= {f"{prefix}: {name}" for name in kind.__dataclass_fields__}
    assert keys == set(_EXPECTED)


def test_an_empty_description_knows_nothing() -> None:
    assert parse({}) == Facts()
    assert parse({"gpus": None, "host_memory_gib": None}) == Facts()


@pytest.mark.parametrize(
    ("found", "message"),
    [
        ([], "expected an object, found []"),
        ({"gpuss": []}, "unknown key 'gpuss'; did you mean gpus?"),
        ({"x": 1}, "unknown key 'x'; expected one of gpus, gpu_problem, driver"),
        ({"driver": 580}, 'driver=580: expected a version such as "580.65.06", or "none"'),
        ({"driver": "five"}, 'driver="five": expected a version'),
        ({"gpus": "H100"}, 'gpus="H100": expected a list of {name, memory_mib'),
        ({"gpus": [{"name": "H100"}]}, "gpus: memory_mib is missing: expected a number"),
        ({"gpus": [{"name": "H", "memory": 1}]}, "gpus: unknown key 'memory'; did you mean memory"),
        ({"gpus": [{"name": None, "memory_mib": 1}]}, "gpus: name=null: expected text"),
        ({"host_memory_gib": -1}, "host_memory_gib=-1: expected a number, 0 or more"),
        ({"host_memory_gib": True}, "host_memory_gib=true: expected a number"),
        ({"host_memory_gib": float("nan")}, "host_memory_gib=NaN: expected a number"),
        ({"cores": 2.5}, "cores=2.5: expected a whole number"),
        ({"nvlink": "yes"}, 'nvlink="yes": expected one of all, some, none'),
        ({"disks": [{"path": "/", "free_gb": 1}]}, "disks: holds is missing"),
        ({"disks": [{"path": "/", "free_gb": 1, "holds": ["x"]}]}, 'disks: holds=["x"]: expected'),
        ({"python": {}}, "python: version is missing"),
        ({"hub": {"token": "hf_x"}}, 'hub: token="hf_x": expected true or false'),
        ({"models": {"a/b": "here"}}, "expected {name: folder, cache or absent}"),
        ({"data": None}, "data=null: expected {file: true or false}"),
        ({"driver": "58\u00b2"}, "expected a version such as"),
    ],
)
def test_what_is_wrong_is_one_line(found: Any, message: str) -> None:
    with pytest.raises(FactsError) as raised:
        parse(found)
    assert message in str(raised.value) and "\n" not in str(raised.value)


def test_a_file_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(FactsError, match="cannot be read as JSON: No such file"):
        read(tmp_path / "none.json")
    (tmp_path / "broken.json").write_text('{"gpus": [')
    with pytest.raises(FactsError, match=r"broken.json: cannot be read as JSON: Expecting value"):
        read(tmp_path / "broken.json")
    (tmp_path / "odd.json").write_text(json.dumps({"cores": "two"}))
    with pytest.raises(FactsError, match=r"odd.json: cores=\"two\": expected a whole number"):
        read(tmp_path / "odd.json")

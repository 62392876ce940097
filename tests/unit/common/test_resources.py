"""What a container or a job leaves of the machine's memory and cores."""

from __future__ import annotations

from pathlib import Path

from sg_rlhf.common import resources


def files(root: Path, **contents: str) -> Path:
    for name, text in contents.items():
        file = root / name.replace("__", "/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + "\n")
    return root


def test_limits_of_a_cgroup_of_version_2(tmp_path: Path) -> None:
    root = files(
        tmp_path, proc__meminfo="MemTotal:       33554432 kB", proc__self__cgroup="0::/job/step",
    )  # fmt: skip
    assert resources.memory_limit(root) is None
    group = root / "sys" / "fs" / "cgroup"
    for folder, memory, cpu in (
        ("job", str(8 * 2**30), "250000 100000"),
        ("job/step", "max", "max"),
    ):
        (group / folder).mkdir(parents=True)
        (group / folder / "memory.max").write_text(memory)
        (group / folder / "cpu.max").write_text(cpu)
    assert resources.memory(root) == 32 * 2**30
    assert resources.memory_limit(root) == 8 * 2**30  # of the one above ours
    assert resources.cores(root, affinity=16) == 2


def test_limits_of_a_container_of_version_1(tmp_path: Path) -> None:
    root = files(
        tmp_path,
        proc__meminfo="MemTotal:       33554432 kB",
        proc__self__cgroup="4:memory:/docker/abc\n3:cpu,cpuacct:/docker/abc\n1:name=systemd:/",
    )
    group = root / "sys" / "fs" / "cgroup"
    (group / "memory").mkdir(parents=True)
    (group / "cpu").mkdir()
    # The path is the host's: inside, the container's own group is the top.
    (group / "memory" / "memory.limit_in_bytes").write_text(str(12 * 2**30))
    (group / "cpu" / "cpu.cfs_quota_us").write_text("-1")
    assert resources.memory_limit(root) == 12 * 2**30
    assert resources.cores(root, affinity=6) == 6
    (group / "memory" / "memory.limit_in_bytes").write_text("9223372036854771712")
    assert resources.memory_limit(root) is None


def test_what_may_be_used(tmp_path: Path) -> None:
    root = files(
        tmp_path, proc__meminfo="MemTotal: 33554432 kB", proc__self__cgroup="0::/job"
    )  # fmt: skip
    group = root / "sys/fs/cgroup/job"
    group.mkdir(parents=True)
    for limit, usable in (("max", 32 * 2**30), ("3000", 3000)):
        (group / "memory.max").write_text(f"{limit}\n")
        assert resources.usable_memory(root) == usable
    (group.parent / "memory.max").write_text("2900\n")  # the one above allows less
    assert resources.usable_memory(root) == 2900


def test_this_machine() -> None:
    total = resources.memory()
    assert total is not None and 0 < resources.usable_memory() <= total
    assert resources.cores() >= 1

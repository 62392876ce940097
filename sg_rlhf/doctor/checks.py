"""Compare a machine's facts with the needs of a recipe, or of any. Looks at nothing itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sg_rlhf.config.derived.topology import CONTROLLER_CPUS
from sg_rlhf.doctor import preflight
from sg_rlhf.doctor.check import FAILED, OK, SKIPPED, WARNING, Check
from sg_rlhf.doctor.preflight import ON_CPU, REPAIR
from sg_rlhf.machine import names
from sg_rlhf.machine.facts import Disk, Facts, Gpu
from sg_rlhf.machine.gpus import hardware_name
from sg_rlhf.machine.names import SIZES

#: Memory of other processes on a GPU above which the doctor warns, MiB; a desktop takes less.
BUSY_MIB = 2048
#: A run of the tiny model peaks at 4.1 GB (lab/experiments/kk_cpu); the rest is the system's.
CPU_HOST_GIB = 8
#: NCCL's shared-memory transport takes a segment of 9.2 MiB (its log: "size 9637888") for each
#: channel of a pair: at least 2 channels a GPU, and 2 communicators (DeepSpeed's, the weight
#: sync's).
NCCL_SHM_MIB_PER_GPU = 2 * 2 * 9637888 / 2**20
#: Ray puts its object store (30 % of the memory, at most 10 GB then) below /tmp where shared memory
#: cannot hold it (_private/services.py, determine_plasma_store_config). A private one of a run
#: without GPUs has 512 MiB.
RAY_SHARE, RAY_SHM_MIB, RAY_CPU_SHM_MIB = 0.3, 1e10 / 2**20, 512
#: The plan estimates the worst case. A shortage below this share is only a warning.
SLACK = 0.05


@dataclass(frozen=True)
class Needs:
    """What is needed. The defaults are for a machine in general."""

    gpus: int | None = None  # of a node; 0 for a run without GPUs, None for any number
    gpu_gb: int | None = None  # memory of each, by the hardware's name
    nodes: int = 1  # the facts are those of one
    recipe: bool = False  # a recipe is checked, and not a machine in general
    host_gib: float | None = None  # of a node; None if it is not known
    download_gb: float = 0.0  # of the model
    run_gb: float = 0.0  # of everything that the run writes, mostly checkpoints


def of_hardware(name: str) -> Needs:
    """The needs of a hardware name as in SG_HARDWARE; "" for any hardware.

    Raises:
        ValueError: an unknown name.
    """
    if name in ("", "cuda"):
        return Needs()
    try:
        layout = names.parse(name)
    except ValueError as error:
        raise ValueError(f"SG_HARDWARE={error}") from None
    return Needs(gpus=layout.gpus, gpu_gb=layout.size or None, nodes=layout.nodes)


def check(facts: Facts, needs: Needs) -> list[Check]:
    """Every check that applies to these needs, in the order of the report."""
    if facts.ray_address and needs.recipe:
        remedy = "the cluster's nodes were not looked at: run the doctor on one of them"
        return [Check("machine", SKIPPED, f"RAY_ADDRESS={facts.ray_address}", remedy=remedy)]
    mine = used(facts, needs)
    capabilities = [gpu.compute_capability for gpu in mine if gpu.compute_capability]
    found = [
        gpus(facts, needs),
        preflight.driver(facts.driver, facts.driver_cuda) if mine else None,
        preflight.capability(capabilities) if capabilities else None,
        busy(mine),
        memory(facts, needs),
        shared_memory(facts, needs),
        *(disk(one, facts, needs) for one in facts.disks),
        compiler(facts),
        cores(facts, needs),
        cluster(facts, needs),
    ]
    return [item for item in found if item]


def used(facts: Facts, needs: Needs) -> list[Gpu]:
    """The GPUs that a run would use; all if the needs do not say how many."""
    return facts.gpus[: needs.gpus]


def settings_for(gpus: Sequence[Gpu], needs: Needs) -> str:
    """The setting that uses most of these GPUs, of train or a script; "" if they are too small."""
    name = hardware_name(gpus)
    if not name:
        return ""
    return f"--hardware {name}" if needs.recipe else f"SG_HARDWARE={name}"


def gpus(facts: Facts, needs: Needs) -> Check:
    """Number and size of the GPUs: those of the recipe; any for a machine in general."""
    have, found = facts.gpus, _described(facts)
    wanted, size = needs.gpus, needs.gpu_gb
    if wanted == 0:
        return Check("GPUs", SKIPPED, found, "none")
    needed = f"{wanted}" if wanted else "any number"
    needed += f" of {size} GB" if size else ""
    needed += f" on each of {needs.nodes} nodes" if needs.nodes > 1 else ""
    if facts.gpu_problem and not have:
        return Check("GPUs", FAILED, found, needed, f"{REPAIR}, or {ON_CPU}")
    if not have:
        if wanted is None:
            return Check("GPUs", OK, found, needed, remark="the small models train without")
        remedy = "run it where GPUs are (CUDA_VISIBLE_DEVICES must name them), or a CPU recipe"
        return Check("GPUs", FAILED, found, needed, f"{remedy}: configs/kk/grpo_sg_tiny_cpu.yaml")
    fitting = settings_for(have, needs)
    if len(have) < (wanted or 0):
        remedy = f"{fitting} is for these" if fitting else "fewer ranks: actor.num_gpus_per_node"
        return Check("GPUs", FAILED, found, needed, remedy)
    least = min(gpu.memory_mib for gpu in used(facts, needs))
    if size and least < SIZES[size] and fitting:
        return Check("GPUs", FAILED, found, needed, f"{fitting} is for these")
    if least < min(SIZES.values()):
        remedy = "smaller than any recipe is for: lower train.micro_batch_size and data.max_len"
        return Check("GPUs", WARNING, found, needed, remedy)
    spare = len(have) - (wanted or len(have))
    remark = f"{spare} stay idle; {fitting} uses more" if wanted and spare >= wanted else ""
    return Check("GPUs", OK, found, needed, remark=remark)


def _described(facts: Facts) -> str:
    if not facts.gpus:
        return f"none; the driver says: {facts.gpu_problem}" if facts.gpu_problem else "none"
    kinds = " and ".join(sorted({gpu.name for gpu in facts.gpus}))
    sizes = [gpu.memory_mib / 1024 for gpu in facts.gpus]
    each = "in the smallest" if max(sizes) > 1.1 * min(sizes) else "each"
    return f"{len(facts.gpus)} x {kinds}, {min(sizes):.0f} GiB {each}"


def busy(gpus: Sequence[Gpu]) -> Check | None:
    """Memory that other processes already use."""
    taken = [gpu.used_mib for gpu in gpus if gpu.used_mib and gpu.used_mib > BUSY_MIB]
    if not taken:
        return None
    found = f"{len(taken)} of {len(gpus)} in use, up to {max(taken) / 1024:.0f} GiB"
    remedy = "`nvidia-smi` names the processes; end them, or choose others by CUDA_VISIBLE_DEVICES"
    return Check("GPUs free", WARNING, found, "GPUs of our own", remedy)


def memory(facts: Facts, needs: Needs) -> Check:
    """Host memory, or the cgroup's limit if it is lower."""
    have, on_gpus = facts.memory_gib, bool(used(facts, needs) or needs.gpus)
    least = needs.host_gib or (None if on_gpus else CPU_HOST_GIB)
    needed = f"{least:,.0f} GiB" if least is not None else ""
    found = f"{have:,.0f} GiB"
    limited = have < facts.host_memory_gib
    if limited:
        found += f" (the cgroup's limit, of {facts.host_memory_gib:,.0f})"
    if least is None or have >= least:
        return Check("host memory", OK, found, needed)
    remedy = "ask the container or job for more" if limited else "a machine with more"
    status = FAILED if on_gpus and have < least * (1 - SLACK) else WARNING
    return Check("host memory", status, found, needed, f"{remedy}, or a smaller model")


def shared_memory(facts: Facts, needs: Needs) -> Check:
    """/dev/shm: for NCCL's segments between GPUs and Ray's object store."""
    count = needs.gpus or len(used(facts, needs))
    nccl = NCCL_SHM_MIB_PER_GPU * count if count > 1 else 0
    ray = RAY_SHM_MIB if count else RAY_CPU_SHM_MIB
    if count:
        ray = min(ray, RAY_SHARE * facts.memory_gib * 1024)
    needed = f"{ray:,.0f} MiB for Ray" + (f", {nccl:,.0f} for NCCL" if nccl else "")
    have = facts.dev_shm_mib
    found = f"{have:,.0f} MiB free"
    if have >= max(nccl, ray):
        return Check("/dev/shm", OK, found, needed)
    more = (
        "docker run --shm-size=16g; Kubernetes: an emptyDir with medium: Memory; "
        "else as root: mount -o remount,size=16g /dev/shm"
    )
    if have < nccl:
        return Check("/dev/shm", FAILED, found, needed, more)
    remedy = f"Ray keeps objects below /tmp instead; {more}"
    return Check("/dev/shm", WARNING, found, needed, remedy)


def disk(disk: Disk, facts: Facts, needs: Needs) -> Check:
    """Free space of a file system against everything that will be written to it."""
    wanted = {
        "models": (needs.download_gb, "the model", "set HF_HOME to a larger disk"),
        "run": (
            max(0.0, needs.run_gb - facts.written_gb), "checkpoints",
            "--run-dir on a larger disk, or lower ckpt.max_num",
        ),
    }  # fmt: skip
    parts = [wanted[name] for name in disk.holds if name in wanted]
    found = f"{disk.free_gb:,.0f} GB free at {disk.path}"
    needed = " + ".join(f"{gb:,.0f} GB for {what}" for gb, what, _ in parts if gb)
    for name, is_written, remedy in (
        ("run", True, "--run-dir in a folder of yours"),
        ("models", needs.download_gb > 0, "set HF_HOME to a folder of yours"),
    ):
        if is_written and name in disk.read_only:
            found = f"{disk.read_only[name]}, not writable for this user"
            return Check("disk", FAILED, found, needed, remedy)
    if disk.free_gb >= sum(gb for gb, _, _ in parts):
        return Check("disk", OK, found, needed)
    return Check("disk", FAILED, found, needed, max(parts)[2])


def compiler(facts: Facts) -> Check:
    """A C++ compiler on a GPU: ``torch.compile`` and Triton build kernels at run time."""
    needed = "any, for torch.compile and Triton" if facts.gpus else "none without GPUs"
    if facts.compiler == "none" and facts.gpus:
        return Check("C++ compiler", FAILED, "none", needed, "apt-get install g++, or set CXX")
    return Check("C++ compiler", OK, facts.compiler, needed)


def cores(facts: Facts, needs: Needs) -> Check:
    """Ray needs one CPU per GPU and one for the controller."""
    count = needs.gpus or len(used(facts, needs))
    least = count + CONTROLLER_CPUS if count else 2
    needed = f"{least}" if count else f"{least} or more"
    if facts.cores >= least:
        return Check("cores", OK, f"{facts.cores}", needed)
    if count:
        remedy = "ask the container or job for more; Ray takes one per GPU and one"
        return Check("cores", FAILED, f"{facts.cores}", needed, remedy)
    return Check("cores", WARNING, f"{facts.cores}", needed, "trainer and engine take turns: slow")


def cluster(facts: Facts, needs: Needs) -> Check | None:
    """A recipe for several nodes needs a Ray cluster. The other checks are for one node."""
    if not needs.recipe or needs.nodes < 2 or facts.ray_address:
        return None
    remedy = (
        "`ray start --head` on one, `ray start --address=` on the others, then `ray job submit`"
    )
    return Check("cluster", WARNING, "no RAY_ADDRESS", f"{needs.nodes} nodes", remedy)

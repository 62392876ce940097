import gc
import json
import os
import sys

from tests import host

# These tests are of the CPU platform, also on a machine with GPUs, which tests/gpu is for. Before
# anything asks torch; a build for CPUs has no GPU to hide.
os.environ["SG_PLATFORM"] = "cpu"
if host.is_for_cuda():
    os.environ["CUDA_VISIBLE_DEVICES"] = ""

import pytest
import torch

from sg_rlhf.tasks.kk.data import generate_splits, to_records


@pytest.fixture(autouse=True, scope="session")
def one_thread():
    """Tensors this small gain nothing from threads; waiting for busy cores costs a lot."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True, scope="module")
def platform_is_not_installed():
    """The rows of the CPU platform stay applied: what needs them has a process of its own."""
    yield
    if table := sys.modules.get("sg_rlhf.overlay.patches.table"):
        rows = [patch for patch in table._applied if patch.when is table.platform.is_cpu]
        assert not rows, f"{len(rows)} rows were applied in the tests' process"


#: Modules that were imported when the objects of imports were last set aside.
_imported = 0


@pytest.fixture(autouse=True)
def imports_are_not_collected():
    """A collection then reads what the tests made, and not the millions of objects of imports."""
    global _imported
    if len(sys.modules) > _imported + 50:
        gc.collect()
        gc.freeze()
        _imported = len(sys.modules)


@pytest.fixture(scope="session")
def puzzles(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "train.jsonl"
    train, _ = generate_splits((2,), per_size=6, test_per_size=1, seed=0)
    records = to_records(train)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path

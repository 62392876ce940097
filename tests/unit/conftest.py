import json

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


@pytest.fixture(scope="session")
def puzzles(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "train.jsonl"
    splits = generate_splits((2,), per_size=6, test_per_size=1, seed=0)
    records = to_records(splits.train)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path

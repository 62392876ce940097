import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def one_thread():
    """Tensors this small gain nothing from threads; waiting for busy cores costs a lot."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)

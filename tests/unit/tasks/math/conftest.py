import pytest

from sg_rlhf.tasks.math.answers.pool import WorkerPool


@pytest.fixture(scope="session")
def pool():
    pool = WorkerPool(workers=1)
    yield pool
    pool.close()

from __future__ import annotations

import os
from collections.abc import Iterator

os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch
from hypothesis import HealthCheck, settings
from pool import Pool

torch.set_num_threads(1)
# Time depends on who else uses the machine.
settings.register_profile("shared", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("shared")


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """The session's ranks: ``pool.run(world, function, *arguments)``."""
    made = Pool()
    yield made
    made.close()


@pytest.fixture(scope="module")
def not_durable() -> Iterator[None]:
    """Files reach the disk when it suits the system: for tests that write many and cut no power."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda file: None)
        yield

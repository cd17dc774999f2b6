"""One tiny target and one drafter for all decoding tests."""

import pytest
import torch
from tiny_models import make_drafter, make_target


@pytest.fixture(scope="session")
def target():
    torch.set_num_threads(1)
    return make_target()


@pytest.fixture(scope="session")
def drafter(target):
    return make_drafter(target)

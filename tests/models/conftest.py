"""One small classifier, trained once, for all models that build on it."""

import pytest
import torch

from tasks.models import find
from tests.models.synthetic import fit, samples, tiny


@pytest.fixture(scope="package", autouse=True)
def one_thread():
    """Fastest for pictures this small."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="package")
def train():
    return samples(("images",), 48, 0, seed=1)


@pytest.fixture(scope="package")
def valid():
    return samples(("images",), 12, 8, seed=2)


@pytest.fixture(scope="package")
def test_set():
    return samples(("images",), 21, 14, seed=3)


@pytest.fixture(scope="package")
def classifier(one_thread, train, valid):
    kind = find("vgg_classifier")
    model = kind(tiny(kind))
    fit(model, train, valid, seed=5)
    return model

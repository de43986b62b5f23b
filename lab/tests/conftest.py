"""Fixtures of runs in this process."""

import hypothesis
import pytest
import torch
from configs import PENDULUM
from runs import make_mnist, small_mnist

from ghor_lab import data, train

pytest.register_assert_rewrite("faults")
torch.set_num_threads(1)
hypothesis.settings.register_profile("any machine", deadline=None)
hypothesis.settings.load_profile("any machine")


@pytest.fixture
def gen():
    return torch.Generator().manual_seed(0)


@pytest.fixture(scope="module")
def as_before():
    """Training sets torch's threads and what becomes of subnormal numbers."""
    yield
    torch.set_num_threads(1)
    torch.set_flush_denormal(False)


@pytest.fixture
def one_commit(monkeypatch):
    monkeypatch.setattr(train, "commit", lambda: "0000000")


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    make_mnist(folder)
    before = data.DATASETS["mnist"]
    small_mnist(folder)
    yield folder
    data.DATASETS["mnist"] = before


@pytest.fixture(scope="session")
def finished(tmp_path_factory):
    """A run of two epochs: its folder."""
    folder = tmp_path_factory.mktemp("finished")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "commit", lambda: "0000000")
        train.train(PENDULUM, folder)
    return folder

"""Small data in place of the real, and a run of two epochs."""

import hypothesis
import pytest
import torch
from helpers.lab import PENDULUM, TINY, fill

from ghor_lab import tasks, train
from ghor_lab.tasks import text

torch.set_num_threads(1)
hypothesis.settings.register_profile("any machine", deadline=None)  # a busy one takes what time it takes
hypothesis.settings.load_profile("any machine")


@pytest.fixture
def gen():
    return torch.Generator().manual_seed(0)


@pytest.fixture(autouse=True)
def one_commit(monkeypatch):
    """Git takes a while, and an edit between two runs is a change."""
    monkeypatch.setattr(train, "commit", lambda: "0000000")


@pytest.fixture(scope="session", autouse=True)
def small(tmp_path_factory):
    """Images and a library of a few kilobytes; trajectories in a cache of their own."""
    folder = tmp_path_factory.mktemp("small")
    fill(folder / "data" / "tiny")
    (folder / "library").mkdir()
    for i in range(64):
        content = f"def f{i}(x):\n    return {i} * x  # {'law ' * (i % 7)}\n"
        (folder / "library" / f"m{i}.py").write_text(content)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GHOR_CACHE", str(folder / "cache"))
        patch.setenv("GHOR_DATA", str(folder / "data"))
        patch.setattr(tasks.Mnist, "dataset", TINY)
        patch.setattr(text.sysconfig, "get_paths", lambda: {"stdlib": str(folder / "library")})
        yield folder


@pytest.fixture(scope="session")
def finished(tmp_path_factory):
    """The record of a run of two epochs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "commit", lambda: "0000000")
        return train.train(PENDULUM, tmp_path_factory.mktemp("finished"))

"""Fixtures: the devices that are there, and how many threads."""

import hypothesis
import pytest
import torch

pytest.register_assert_rewrite("table", "steps", "refusals", "faults")
torch.set_num_threads(1)
hypothesis.settings.register_profile("any machine", deadline=None)  # a busy one takes what time it takes
hypothesis.settings.load_profile("any machine")


def devices() -> list[str]:
    found = ["cpu"]
    if torch.cuda.is_available():
        found.append("cuda")
    if torch.backends.mps.is_available():
        found.append("mps")
    return found


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    missing = sorted({"cpu", "cuda", "mps"} - set(devices()))
    terminalreporter.write_line(
        f"devices tried: {', '.join(devices())}; not there, not tried: {', '.join(missing) or 'none'}"
    )


@pytest.fixture(params=devices())
def device(request: pytest.FixtureRequest) -> torch.device:
    return torch.device(request.param)


@pytest.fixture
def gen() -> torch.Generator:
    return torch.Generator().manual_seed(0)

"""What a result shows."""

import pytest
import torch

import ghor


def test_a_result_prints_what_happened_and_draws_its_history():
    pytest.importorskip("matplotlib").use("Agg")
    x = torch.zeros(2, dtype=torch.float64)
    result = ghor.minimize(lambda x: (x - 1).square().sum(), x)
    first, *rows = repr(result).splitlines()
    assert first == f"Result(success: {result.status})"
    assert [row.split()[0] for row in rows][:3] == ["value", "gradient_norm", "iterations"]
    assert rows[2].split()[1] == str(result.iterations)
    (line,) = result.draw().lines
    assert list(line.get_ydata()) == [h["gradient_norm"] for h in result.history]
    assert "NO success" in repr(ghor.minimize(lambda x: (x - 1).square().sum(), x, max_iterations=0))

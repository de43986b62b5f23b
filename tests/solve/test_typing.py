"""What type checkers make of `minimize` in a user's script: exact types of results, typos found."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import ghor

SCRIPT = """\
import torch
from torch import Tensor
from typing_extensions import assert_type

import ghor

Y, b = ghor.Stiefel().random(5, 2), torch.zeros(5)
one = ghor.minimize(lambda Y: (Y - 1).square().sum(), Y, ghor.Stiefel(), "trust-region", max_seconds=5)
assert_type(one.x, Tensor)
named = ghor.minimize(lambda x: (x["Y"].sum(1) - x["b"]).sum(), {"Y": Y, "b": b}, {"Y": ghor.Stiefel()})
assert_type(named.x, dict[str, Tensor])
several = ghor.minimize(lambda x: (x[0] @ x[1].mT).sum(), [Y, Y], ghor.Stiefel(), callback=print)
assert_type(several.x, list[Tensor])
pair = ghor.minimize(lambda x: x[0].sum(), (Y, b), [ghor.Stiefel(), ghor.Euclidean()], retraction="geodesic")
assert_type(pair.x, tuple[Tensor, Tensor])
assert_type(one.history[0], dict[str, float])
ghor.minimize(lambda Y: Y.sum(), Y, ghor.Stiefel(), method="trustregion")  # wrong
ghor.minimize(lambda Y: Y.sum(), Y, ghor.Stiefel(), retraction="caley")  # wrong
ghor.minimize(lambda Y: Y.sum(), Y, ghor.Stiefel(), section="implict")  # wrong
ghor.minimize(lambda Y: Y.sum(), Y, ghor.Stiefel(), max_iter=5)  # wrong
ghor.minimize(lambda Y: Y.sum(), Y, ghor.Stiefel)  # wrong
ghor.minimize(lambda Y: Y.sum(), 1.0)  # wrong
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "checker", [["mypy", "--strict"], ["pyright", "--pythonpath", sys.executable]], ids=lambda c: c[0]
)
def test_in_a_users_script(checker, tmp_path):
    """Errors in the lines that are marked as wrong, and in no others."""
    pytest.importorskip(checker[0])
    (tmp_path / "script.py").write_text(SCRIPT)
    path = str(Path(ghor.__file__).parents[1])
    command = [sys.executable, "-m", *checker, "script.py"]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, env={"MYPYPATH": path, "PYTHONPATH": path}
    )
    out = done.stdout
    found = {
        int(line.split(":")[1]) for line in out.splitlines() if "script.py:" in line and " error" in line
    }
    wrong = {i for i, line in enumerate(SCRIPT.splitlines(), 1) if line.endswith("# wrong")}
    assert found == wrong, out + done.stderr


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

"""The spaces of CONTRIBUTING.md as they stand there: linted, and the laws on them."""

import inspect
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import laws.test_frames
import laws.test_functions
import laws.test_points
import pytest
import torch
from helpers.table import LAWS, RETRACTIONS, name, randn, sections

import ghor

ROOT = Path(__file__).parents[2]
CODE = re.findall(r"```python\n(.*?)```", (ROOT / "CONTRIBUTING.md").read_text(), re.DOTALL)


def load(i):
    module = ModuleType(f"space_of_the_guide_{i}")
    sys.modules[module.__name__] = module
    exec(compile(CODE[i], module.__name__, "exec", dont_inherit=True), module.__dict__)
    return module


STRUCTURES, TRIANGULAR = load(0).ComplexStructures(), load(1).UnitTriangular()
SPACES = [(STRUCTURES, (6, 6)), (TRIANGULAR, (2, 4, 4))]


@pytest.mark.parametrize("code", CODE, ids=["with a form", "without"])
def test_the_code_passes_as_pasted(code):
    for command in (["check"], ["format", "--check"]):
        pytest.importorskip("ruff")
        run = [sys.executable, "-m", "ruff", *command, "--stdin-filename", "src/ghor/spaces/pasted.py", "-"]
        done = subprocess.run(run, input=code, text=True, capture_output=True, cwd=ROOT)
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("space", "shape", "law", "options"),
    [
        pytest.param(
            *case, law, options, id="-".join(map(name, [case[0], law.__name__[5:], *options.values()]))
        )
        for case in SPACES
        for law in LAWS.values()
        if law.holds(case[0])
        for options in law.grid
    ],
)
def test_it_obeys_the_laws(space, shape, law, options, gen):
    law(space, shape, **options, gen=gen)


def laws_of(module, *taken):
    """The tests of a module that take these arguments."""
    tests = [f for n, f in vars(module).items() if n.startswith("test_")]
    return [f for f in tests if list(inspect.signature(f).parameters) == [*taken, "gen"]]


@pytest.mark.parametrize("law", laws_of(laws.test_functions, "space", "shape", "dtype"))
@pytest.mark.parametrize(("space", "shape"), SPACES, ids=name)
def test_its_functions_obey_the_laws(space, shape, law, gen):
    law(space, shape, torch.float64, gen)


@pytest.mark.parametrize("law", laws_of(laws.test_frames, "space", "shape", "section", "retraction", "dtype"))
@pytest.mark.parametrize("retraction", RETRACTIONS)
@pytest.mark.parametrize(("space", "shape"), SPACES, ids=name)
def test_its_frames_obey_the_laws(space, shape, retraction, law, gen):
    if law is laws.test_frames.test_repair_squares_the_distance and not space.compact:
        pytest.skip("points are functions of other numbers")
    for section in sections(space):
        law(space, shape, section, retraction, torch.float64, gen)


def test_the_nearest_complex_structure(gen):
    """max <Y J Y^T, K> over SO(2n)/U(n) is the sum of K's singular values, K = Z D J D Z^T with det Z = 1."""
    J = torch.zeros(6, 6, dtype=torch.float64)
    J[:3, 3:], J[3:, :3] = torch.eye(3), -torch.eye(3)
    Z, Y = (ghor.SpecialOrthogonal().random(6, 6, generator=gen, dtype=torch.float64) for _ in range(2))
    D = torch.tensor([1.0, 2.0, 3.0] * 2, dtype=torch.float64).diag()
    K, Y = Z @ D @ J @ D @ Z.mT, torch.nn.Parameter(Y)
    opt = ghor.optim.Adam([Y], space=STRUCTURES, lr=0.1, maximize=True)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(opt, 300)
    for _ in range(300):
        opt.zero_grad()
        ((Y @ J @ Y.mT) * K).sum().backward()
        opt.step()
        schedule.step()
    assert (Y @ J @ Y.mT - Z @ J @ Z.mT).abs().max() < 1e-4
    assert STRUCTURES.residual(Y.detach()) < 1e-13


def test_a_triangular_factor(gen):
    """|U^-1 X| over unit triangular U is smallest for X = U D Q, with orthogonal rows left: an
    elimination."""
    X = randn((4, 6), gen)
    C = X @ X.mT
    U = torch.nn.Parameter(TRIANGULAR.E((4, 4), dtype=torch.float64))
    opt = ghor.optim.Adam([U], space=TRIANGULAR, lr=0.05)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(opt, 800)
    for _ in range(800):
        opt.zero_grad()
        torch.linalg.solve(U, X).square().sum().backward()
        opt.step()
        schedule.step()
    D = torch.linalg.solve(torch.linalg.solve(U.detach(), C), U.detach().mT, left=False)
    assert (D - D.diagonal().diag()).abs().max() < 1e-3
    assert TRIANGULAR.residual(U.detach()) == 0

"""Flags, beyond the laws: what they are for, what they refuse."""

import pytest
import torch
from helpers.table import frame, randn

import ghor

SPACE, SHAPE = ghor.Flag((2, 1)), (9, 3)


@pytest.mark.parametrize(
    ("section", "dtype"),
    [
        ("transported", torch.float64),
        ("implicit", torch.complex128),
        pytest.param("implicit", torch.float64, marks=pytest.mark.slow),
        pytest.param("transported", torch.complex128, marks=pytest.mark.slow),
    ],
)
def test_a_flag_of_eigenspaces(section, dtype, gen):
    """max Re tr(Y^H C Y D), D = diag(2, 2, 1): the first two eigenvectors, then the third."""
    C = randn((9, 9), gen, dtype)
    C = C + C.mH
    D = torch.tensor([2.0, 2.0, 1.0], dtype=torch.float64)
    Y = torch.nn.Parameter(SPACE.random(*SHAPE, generator=gen, dtype=dtype))
    opt = ghor.optim.Adam([Y], space=SPACE, lr=0.05, section=section, maximize=True)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(opt, 600)
    for _ in range(600):
        opt.zero_grad()
        ((Y.mH @ C @ Y).diagonal().real * D).sum().backward()
        opt.step()
        schedule.step()
    top = torch.linalg.eigh(C)[1].flip(1)[:, :3]
    y = Y.detach()
    assert (y[:, :2] @ y[:, :2].mH - top[:, :2] @ top[:, :2].mH).abs().max() < 1e-4
    assert (y[:, 2:] @ y[:, 2:].mH - top[:, 2:] @ top[:, 2:].mH).abs().max() < 1e-4
    assert SPACE.residual(y) < 1e-13


def test_one_block_is_grassmann_and_single_columns_are_stiefel(gen):
    Y, G = ghor.Stiefel().random(*SHAPE, generator=gen, dtype=torch.float64), randn(SHAPE, gen)
    for sizes, other in (((3,), ghor.Grassmann()), ((1, 1, 1), ghor.Stiefel())):
        flag = ghor.Flag(sizes)
        pulled = []
        for space in (flag, other):
            L = frame(space, Y)
            L.pull(G[None], B := L.zeros())
            pulled.append(B)
        assert torch.equal(*pulled)


def test_what_a_flag_refuses():
    assert ghor.Flag([2, 1]) == SPACE
    assert repr(SPACE) == "Flag(sizes=(2, 1))"
    assert repr(ghor.Flag((2, 1), flatten=3)) == "Flag(flatten=3, sizes=(2, 1))"
    for sizes in ((), (0, 1), (1.0,), 3):
        with pytest.raises(ValueError, match="positive numbers of columns"):
            ghor.Flag(sizes)
    with pytest.raises(ValueError, match="3 columns"):
        SPACE.check_shape((9, 4))
    with pytest.raises(ValueError, match="single point"):
        ghor.Flag((3,)).check_shape((3, 3))

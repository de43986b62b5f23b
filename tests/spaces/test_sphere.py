"""The sphere: its section in closed form beside that of matrices, steps of any length, the angle."""

import math

import pytest
import torch
from table import close, randn

import ghor
from ghor.retraction import RETRACTIONS
from ghor.spaces.orthogonal import Orthogonal

S = ghor.Sphere()
F64 = torch.float64
retractions = pytest.mark.parametrize("retraction", list(RETRACTIONS.values()), ids=str)


@retractions
@pytest.mark.parametrize(("space", "shape"), [(S, (6,)), (ghor.Sphere(flatten=2), (3, 4))], ids=str)
def test_the_closed_form_is_the_section_of_matrices(space, shape, retraction, gen):
    """Gradients, 60 steps of 50 points and the vectors that turn with them, through changes of the sign."""
    Y = space.random(50, *shape, generator=gen, dtype=F64)
    R = space.implicit_start(Y)
    m = randn((50, *shape), gen)
    space.matrix(m)[..., 0, :] = 0
    other, sign, n = Y.clone(), R.clone(), m.clone()
    P, Q = space.implicit_inverse(Y, R), Orthogonal.implicit_inverse(space, other, sign)
    moved = torch.ones(50, dtype=torch.bool)
    changes = 0
    for _ in range(60):
        G = randn((50, *shape), gen)
        W = space.implicit_grad(Y, R, P, G, torch.empty_like(G))
        close(W, Orthogonal.implicit_grad(space, other, sign, Q, G, torch.empty_like(G)), 1e-12)
        W, before = W / 2, R.clone()
        P = space.implicit_update(Y, R, P, W, retraction, [m], moved)
        Q = Orthogonal.implicit_update(space, other, sign, Q, W, retraction, [n], moved)
        changes += int((R != before).sum())
        for a, b in ((Y, other), (m, n), (R, sign), (P, Q)):
            close(a, b, 1e-12)
    assert changes > 3


def test_a_point_that_does_not_move_keeps_every_bit(gen):
    Y, start = (torch.nn.Parameter(S.random(8, 5, generator=gen)) for _ in range(2))
    start = Y.detach().clone()
    opt = ghor.optim.SGD([Y], space=S, lr=0.3, momentum=0.9)
    for _ in range(25):
        Y.grad = randn((8, 5), gen, torch.float32)
        Y.grad[::2] = 0
        opt.step()
    assert torch.equal(Y[::2], start[::2])
    assert not opt.state[Y]["momentum_buffer"][::2].any()


def test_squares_spread_in_long_steps_point_by_point(gen):
    """Short steps leave second moments alone, long ones spread them, whatever other points do."""
    start, G = S.random(6, 5, generator=gen, dtype=F64), randn((6, 5), gen)
    G[3:] *= 1e-9  # Adam's eps makes these steps short
    states = {}
    for rows in (slice(0, 6), slice(0, 3), slice(3, 6)):
        Y = torch.nn.Parameter(start[rows].clone())
        opt = ghor.optim.Adam([Y], space=S, lr=0.5)
        Y.grad = G[rows].clone()
        opt.step()
        states[rows.start, rows.stop] = opt.state[Y]["exp_avg_sq"]
    assert torch.equal(states[0, 6], torch.cat([states[0, 3], states[3, 6]]))
    R = S.implicit_start(start)
    B = S.implicit_grad(start, R, S.implicit_inverse(start, R), G, torch.empty_like(G))
    squares = 0.001 * B.square()
    torch.testing.assert_close(states[0, 6][3:], squares[3:], rtol=1e-9, atol=0)
    assert float((states[0, 6][:3] / squares[:3] - 1)[:, 1:].abs().max()) > 0.1
    torch.testing.assert_close(states[0, 6].sum(-1), squares.sum(-1), rtol=1e-9, atol=0)


def test_spheres_carry_no_matrices(gen):
    """Adam's two moments and a sign; complex spheres keep the section of matrices."""
    Y = torch.nn.Parameter(S.random(100, 11, generator=gen))
    opt = ghor.optim.Adam([Y], space=S)
    Y.grad = randn((100, 11), gen, torch.float32)
    opt.step()
    assert opt.state[Y]["frame_anchor"].numel() == 100
    assert sum(v.numel() for v in opt.state[Y].values()) <= 2 * Y.numel() + 102
    assert S.section_kind("auto", (100, 11), torch.complex64) == "transported"
    assert S.section_kind("transported", (100, 11), torch.float32) == "transported"


@pytest.mark.parametrize("angle", [0.0, 1e-8, 1e-3, 1.0, math.pi / 2, 3.1, math.pi - 1e-7, math.pi])
def test_the_angle_is_exact_everywhere(angle):
    y = torch.tensor([1.0, 0.0, 0.0], dtype=F64)
    z = torch.tensor([math.cos(angle), math.sin(angle), 0.0], dtype=F64)
    z = -y if angle == math.pi else z
    y.requires_grad_()
    d = S.dist(y, z)
    assert abs(float(d.detach()) - angle) <= 4e-16 + 4e-16 * angle
    (G,) = torch.autograd.grad(d, y)
    assert torch.isfinite(G).all()
    if 0 < angle < math.pi:
        close(S.rgrad(y.detach(), G), torch.tensor([0.0, -1.0, 0.0], dtype=F64), 1e-8)

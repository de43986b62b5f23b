"""What solvers ask of frames: push, lines, copies, references; laws over every space and both sections."""

import pytest
import torch
from helpers.table import RETRACTIONS, SPACES, name, shapes

from ghor.spaces.frames import ClosedForm, Framed
from ghor.spaces.retraction import by_name, geodesic
from ghor.spaces.vectors import Vectors

CASES = [
    pytest.param(space, shape, section, dtype, id=f"{name(space)}-{name(shape)}-{section}-{name(dtype)}")
    for space in SPACES
    for shape in shapes(space)[:3]
    for section in ("transported", "implicit")
    if section == "transported" or space.implicit
    for dtype in (torch.float64, torch.complex128)
    if dtype == torch.float64 or (space.complex and getattr(space, "radius", 1) == 1)
]
each_case = pytest.mark.parametrize(("space", "shape", "section", "dtype"), CASES)


def framed(space, shape, section, dtype, gen):
    """A frame above points (M, N, n), elements of g^hor and a derivative there."""
    geometry = space.geometry
    y = space.layout.points(space.random(*shape, generator=gen, dtype=dtype)).clone()
    frame = geometry.frame(y / space.scale(y), section, {}, torch.finfo(dtype).eps)
    elements = []
    for _ in range(2):
        w = frame.zeros().copy_(torch.randn(y.shape, generator=gen, dtype=dtype))
        geometry.hor_(w)
        elements.append(w / max(1, float(frame.length(w).max())))
    return frame, *elements, torch.randn(y.shape, generator=gen, dtype=dtype)


def pulled(frame, g):
    out = frame.zeros()
    frame.pull(g, out)
    return out


@each_case
def test_a_line_starts_along_w(space, shape, section, dtype, gen):
    """Its derivative is Lambda w E at t = 0."""
    frame, w, *_ = framed(space, shape, section, dtype, gen)
    Delta = frame.push(w.clone())
    for R in map(by_name, RETRACTIONS):
        line, h = frame.along(w.clone(), R), 1e-5
        moved = (line.at(h).y - line.at(-h).y) / (2 * h)
        assert (moved - Delta).abs().max() <= 1e-8 * (1 + Delta.abs().max())


@pytest.mark.parametrize("retraction", RETRACTIONS)
@each_case
def test_a_line_leads_where_a_step_does(space, shape, section, dtype, retraction, gen):
    """To the same point and frame; the frame that it leaves does not change by a bit."""
    frame, w, v, g = framed(space, shape, section, dtype, gen)
    before = [X.clone() for X in frame.parts()]
    R = by_name(retraction)
    line, t = frame.along(w.clone(), R), 0.7
    thin = isinstance(frame, Framed) and not (isinstance(frame, Vectors) and frame.k == -1)
    stepped, W = frame.copy(), w * t
    turned = v.clone()
    stepped.step(W, frame.length(W), R if thin else geodesic, [turned], ())
    trial = line.at(t)
    size = 1 + float(trial.y.abs().max())
    assert (trial.y - stepped.point()).abs().max() <= 1e-12 * size
    reached = line.frame(trial)
    assert (reached.point() - trial.y).abs().max() <= 1e-14 * size
    assert all(map(torch.equal, frame.parts(), before))
    if not isinstance(frame, ClosedForm | Vectors):  # a step may renew a reference
        assert (pulled(reached, g) - pulled(stepped, g)).abs().max() <= 1e-11 * size


@each_case
def test_a_new_reference_leaves_tangent_vectors_what_they_are(space, shape, section, dtype, gen):
    """Far from where the reference was made it is worn; vectors are then seen from another frame."""
    frame, w, v, _ = framed(space, shape, section, dtype, gen)
    renewals = 0
    for _ in range(20):
        trial = (line := frame.along(w.clone(), geodesic)).at(1.0, repair=True)
        frame = line.frame(trial, whole=True)
        new = frame.renewed()
        if new is not None:
            renewals += 1
            u = new.translated(v, frame)
            Delta = frame.push(v.clone())
            assert (new.push(u.clone()) - Delta).abs().max() <= 1e-11 * (1 + Delta.abs().max())
            inner = frame.geometry.hor_inner
            torch.testing.assert_close(inner(u, u), inner(v, v), rtol=1e-10, atol=1e-12)
            frame, v = new, u
    if not isinstance(frame, ClosedForm | Vectors):
        assert renewals == 0
    assert float(space.geometry.residual(frame.point()).max()) <= 1e-12 * (
        1 + float(frame.point().abs().max()) ** 2
    )

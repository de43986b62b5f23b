"""Every configuration of torch's database of optimizers on weights of every kind of space: they stay there,
the loss falls or stays finite, and a run resumes from its state dict to the bit."""

import warnings

import pytest
import torch
from helpers.database import CASES, case_id, options
from helpers.pairs import KINDS, Net, train
from helpers.steps import through_a_file

import ghor

# in the fast suite the first configuration of four classes, in the plainest kernels
FAST = [(cls, 0, "forloop") for cls in ("SGD", "Adam", "Rprop", "Muon")]
MOVING = [
    case if case in FAST else pytest.param(case, marks=pytest.mark.slow)
    for case in CASES
    if case[2] != "differentiable"
]


def build(case, kind, net):
    space, *_ = KINDS[kind]
    section = "transported" if kind.endswith("transported") else "auto"
    return getattr(ghor.optim, case[0])([net.a, net.b], space=space, section=section, **options(case))


@pytest.mark.filterwarnings("ignore:weight_decay=")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", MOVING, ids=case_id)
def test_it_stays_and_resumes(case, kind):
    space, shape, dtype = KINDS[kind]
    if dtype.is_complex and "fused" in options(case):
        pytest.skip("torch's fused kernels take no complex weights")
    net, plain = Net(space, shape, dtype), Net(space, shape, dtype)
    theirs = getattr(ghor.optim, case[0]).Base([plain.a, plain.b], **options(case))
    finite = all(map(torch.isfinite, map(torch.tensor, train(plain, theirs, 8))))
    opt = build(case, kind, net)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*(was clipped to|has come|has grown|is held)")
        losses = train(net, opt, 5)
        twin = Net(space, shape, dtype)
        twin.load_state_dict(net.state_dict())
        other = build(case, kind, twin)
        other.load_state_dict(through_a_file(opt.state_dict()))
        losses += train(net, opt, 3)
        train(twin, other, 3)
    for p, q in zip(net.parameters(), twin.parameters(), strict=True):
        assert bool((space.residual(p.detach()) <= space.tolerance(p.detach())).all())
        assert torch.equal(p, q)
    assert not finite or all(loss < float("inf") for loss in losses)

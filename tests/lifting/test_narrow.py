"""Many short vectors are stored coordinate by coordinate; nobody should notice but the clock."""

import copy
import io

import pytest
import torch

import ghor
from ghor.baselines import ScalarMomentAdam
from ghor.lifting.stack import NarrowStack, Stack
from ghor.spaces.rank_one import Padded

F64 = torch.float64
ELEMENTWISE = [name for name in ghor.optim.__all__ if name != "Muon"]
SPACES = [
    ghor.Sphere(),
    ghor.Sphere(radius=2.5),
    ghor.Sphere(radius="start"),
    ghor.Sphere(padding_idx=3),
    ghor.Hyperbolic(),
    ghor.Hyperbolic(padding_idx=3),
    ghor.Sphere(along="columns"),
]


def weights(space, count, N=3, rows=600, dtype=F64):
    gen = torch.Generator().manual_seed(0)
    shape = (N, rows) if getattr(space, "along", "rows") == "columns" else (rows, N)
    return [torch.nn.Parameter(space.random(*shape, generator=gen, dtype=dtype)) for _ in range(count)]


def gradients(params, steps):
    gen = torch.Generator().manual_seed(1)
    return [[torch.randn(p.shape, generator=gen, dtype=p.dtype) for p in params] for _ in range(steps)]


def run(opt, params, grads):
    for step in grads:
        for p, g in zip(params, step, strict=True):
            p.grad = None if g is None else g.clone()
        opt.step()


def stacks(opt):
    return [type(s) for s in opt._partition.stacks]


def compare(make, space, grads_of, monkeypatch, count=2, N=3, tol=1e-13):
    """Weights and states of narrow stacks and of plain ones after the same steps."""
    found = []
    for narrow in (True, False):
        with monkeypatch.context() as patch:
            if not narrow:
                patch.setattr(Padded, "narrow", lambda *_: False)
            params = weights(space, count, N)
            opt = make(params)
            run(opt, params, grads_of(params))
            assert set(stacks(opt)) == {NarrowStack if narrow else Stack}
            found.append((params, opt.state))
    (ours, states), (plain, expected) = found
    for p, q in zip(ours, plain, strict=True):
        torch.testing.assert_close(p, q, rtol=tol, atol=tol)
        assert states[p].keys() == expected[q].keys()
        for key, value in states[p].items():
            if torch.is_tensor(value):
                assert value.shape == expected[q][key].shape
                torch.testing.assert_close(value, expected[q][key], rtol=tol, atol=tol)


@pytest.mark.parametrize("space", SPACES, ids=str)
@pytest.mark.parametrize("name", ELEMENTWISE)
def test_narrow_stacks_do_what_plain_ones_do(name, space, monkeypatch):
    cls = getattr(ghor.optim, name)
    compare(lambda ps: cls(ps, lr=0.02, space=space), space, lambda ps: gradients(ps, 12), monkeypatch)


@pytest.mark.filterwarnings("ignore:a velocity of length")
@pytest.mark.parametrize("space", [ghor.Sphere(), ghor.Hyperbolic()], ids=str)
@pytest.mark.parametrize(
    "options",
    [
        {"retraction": "geodesic"},
        {"max_angle": 0.01},
        {"lr": 0.9},
        {"lr": 30.0},
        {"amsgrad": True},
        {"foreach": True},
        {"weight_decay": 0.1, "anchor": "start"},
    ],
    ids=str,
)
def test_with_options(options, space, monkeypatch):
    options = {"lr": 0.02, "space": space, **options}
    make, N = lambda ps: ghor.optim.Adam(ps, **options), 16
    compare(make, space, lambda ps: gradients(ps, 12), monkeypatch, N=N, tol=1e-11)


def test_gradients_that_are_missing_split_a_stack(monkeypatch):
    def some(params):
        grads = gradients(params, 9)
        for step in grads[3:6]:
            step[1] = None
        return grads

    for space in (ghor.Sphere(), ghor.Hyperbolic()):
        compare(lambda ps, space=space: ghor.optim.Adam(ps, space=space), space, some, monkeypatch, count=3)


def test_who_gets_a_narrow_stack(gen):
    """Rules that may look at the order of numbers do not, nor do long vectors, few, and half precision."""

    def of(opt, *shape, dtype=F64, space=None, **options):
        space = space or ghor.Sphere()
        p = torch.nn.Parameter(space.random(*shape, generator=gen, dtype=dtype))
        p.grad = torch.randn(p.shape, generator=gen, dtype=torch.float32).to(dtype)
        opt = opt([p], space=space, lr=1e-3, **options)
        opt.step()
        return stacks(opt)[0]

    class Own(torch.optim.Adam):
        pass

    assert of(ghor.optim.Adam, 1001, 16) is NarrowStack
    assert of(ghor.optim.Adam, 1001, 17) is Stack
    assert of(ghor.optim.Adam, 1000, 16) is Stack
    assert of(ghor.optim.Adam, 1001, 16, dtype=torch.bfloat16) is Stack
    assert of(ghor.optim.Adam, 1001, 16, dtype=torch.complex64) is Stack
    assert of(ghor.optim.Adam, 1001, 16, section="transported") is Stack
    assert of(ghor.optim.Muon, 1001, 16) is Stack
    assert of(ScalarMomentAdam, 1001, 16) is Stack
    assert of(ghor.lift(Own), 1001, 16) is Stack
    assert of(ghor.optim.Adam, 1001, 16, space=ghor.Sphere(blocks=2)) is Stack


@pytest.mark.parametrize("space", SPACES, ids=str)
def test_a_run_resumes_to_the_bit(space):
    params = weights(space, 2)
    opt = ghor.optim.Adam(params, space=space, lr=0.02)
    grads = gradients(params, 12)
    run(opt, params, grads[:7])
    file = io.BytesIO()
    torch.save(opt.state_dict(), file)
    file.seek(0)
    again = [torch.nn.Parameter(p.detach().clone()) for p in params]
    other = ghor.optim.Adam(again, space=space, lr=0.02)
    other.load_state_dict(torch.load(file, weights_only=True))
    third, copies = copy.deepcopy((opt, params))
    for o, ps in ((opt, params), (other, again), (third, copies)):
        run(o, ps, grads[7:])
    for p, q, r in zip(params, again, copies, strict=True):
        assert torch.equal(p, q)
        assert torch.equal(p, r)


@pytest.mark.parametrize("split", [False, True], ids=["whole", "split"])
def test_a_write_from_outside_is_noticed(split):
    """Through .data, which no version counter shows; also if the next step splits the stack."""
    space = ghor.Sphere()
    params = weights(space, 2)
    opt = ghor.optim.Adam(params, space=space, lr=0.02)
    grads = gradients(params, 3)
    run(opt, params, grads[:2])
    params[0].data[5] *= -1
    moved = params[0].detach().clone()
    if split:
        grads[2][1] = None
    with pytest.warns(UserWarning, match="changed outside"):
        run(opt, params, grads[2:])
    assert float((params[0].detach() - moved).norm(dim=1).max()) < 0.1  # it goes on from where the weight is
    params[0].data[5] *= 2
    with pytest.raises(ValueError, match="off"):
        run(opt, params, grads[:1])


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
@pytest.mark.parametrize("space", [ghor.Sphere(), ghor.Hyperbolic()], ids=str)
def test_compiled(space, monkeypatch):
    def make(params):
        opt = ghor.optim.Adam(params, space=space, lr=0.02)
        opt.step = torch.compile(opt.step, backend="eager")
        return opt

    compare(make, space, lambda ps: gradients(ps, 4), monkeypatch)

"""torch.compile of the step and of a training step: two graphs a batch, before torch's rule and after it.

The rule itself stays as it is, so that a learning rate is in no graph; and copies between weights and batches
and looks at numbers stay out. The numbers are those of the eager run up to rounding, whatever happens.
"""

import warnings

import pytest
import torch
from helpers.steps import sections, values
from helpers.table import MANIFOLDS, accepts, has_frame
from torch import nn
from torch._dynamo.utils import counters

import ghor

# what torch's compiler says of its own imports, and of a loss that a closure returns
pytestmark = [
    pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]

FLAT, STIEFEL = ghor.Euclidean(), ghor.Stiefel()
# One graph a class: implementations that have their own, and state of every kind
OPTIONS = {
    "SGD": {"momentum": 0.9},
    "RMSprop": {"momentum": 0.9, "centered": True},
    "Adam": {"amsgrad": True},
}


@pytest.fixture(autouse=True)
def _fresh():
    torch.set_default_dtype(torch.float64)
    torch._dynamo.reset()
    counters.clear()
    yield
    torch.set_default_dtype(torch.float32)
    torch._dynamo.reset()


class Net(nn.Module):
    """Two weights of one kind and one by its rows, on a space, and a Euclidean one."""

    def __init__(self, space=STIEFEL, dtype=torch.float64, shape=(6, 2)):
        super().__init__()
        gen = torch.Generator().manual_seed(0)
        for name, size in {"a": shape, "b": shape, "wide": (shape[1], shape[0])}.items():
            self.register_parameter(name, nn.Parameter(space.random(*size, generator=gen).to(dtype)))
        self.bias = nn.Parameter(torch.zeros(shape[0], dtype=dtype))
        self.x, self.y = (torch.randn(8, shape[0], generator=gen).to(dtype) for _ in range(2))
        self.spaces = [space] * 3 + [FLAT]

    def loss(self):
        return (self.x @ (self.a + self.b) @ self.wide + self.bias - self.y).square().sum()


def lifted(cls, net, lr=1e-2, **kwargs):
    return getattr(ghor.optim, cls)(
        [{"params": list(net.parameters()), "space": net.spaces}], lr=lr, **kwargs
    )


def runner(net, opt, compiled, backend="eager", whole=False):
    """A function that makes one training step."""
    step = torch.compile(opt.step, backend=backend) if compiled and not whole else opt.step

    def train():
        opt.zero_grad()
        net.loss().backward()
        step()

    return torch.compile(train, backend=backend) if compiled and whole else train


def count():
    """Graphs and breaks so far."""
    return counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())


def difference(net, twin):
    return max(
        float((a - b).detach().abs().max()) for a, b in zip(net.parameters(), twin.parameters(), strict=True)
    )


def off(net):
    return max(float(s.residual(p.detach()).max()) for p, s in zip(net.parameters(), net.spaces, strict=True))


def compare(make, steps=12, **how):
    """Compiled and eager, from the same start: how far apart, how far off, and the counts."""
    nets = []
    for compiled in (False, True):
        net = Net()
        train = runner(net, make(net), compiled, **how)
        for _ in range(steps):
            train()
        nets.append(net)
    return difference(*nets), off(nets[1]), count()


# To g^hor, and back, of each of two batches; torch.compile breaks at the step itself, as at torch's own
GRAPHS = (4, 1)

REST = [c for c in ghor.optim.__all__ if c != "Adam"]

# Few eps a step, over 12 steps, and the moments' quotients are near 1
CLOSE = 1e-13


OFTEN = ("Adam", "SGD", "RMSprop", "Adagrad", "PaperAdam")


@pytest.mark.parametrize(
    "cls", [c if c in OFTEN else pytest.param(c, marks=pytest.mark.slow) for c in ghor.optim.__all__]
)
def test_step(cls):
    # lr = 1e-2, so the limit holds for the rules that move every coordinate by lr
    apart, distance, counts = compare(lambda net: lifted(cls, net, max_angle=0.02, **OPTIONS.get(cls, {})))
    assert apart <= CLOSE
    assert distance <= 1e-14
    assert counts == GRAPHS


@pytest.mark.slow
def test_decay_towards_an_anchor():
    build = lambda net: lifted("AdamW", net, weight_decay=0.5, anchor="start")  # noqa: E731
    apart, distance, counts = compare(build)
    assert apart <= CLOSE
    assert distance <= 1e-14
    assert counts == GRAPHS


@pytest.mark.parametrize("cls", ["Adam"] + [pytest.param(c, marks=pytest.mark.slow) for c in REST])
def test_whole_training_step(cls):
    apart, distance, counts = compare(lambda net: lifted(cls, net, **OPTIONS.get(cls, {})), whole=True)
    assert apart <= CLOSE
    assert distance <= 1e-14
    assert counts[0] == 1 + GRAPHS[0]


@pytest.mark.parametrize(
    ("section", "retraction"),
    [
        ("implicit", "geodesic"),
        pytest.param("transported", "cayley", marks=pytest.mark.slow),
        pytest.param("transported", "geodesic", marks=pytest.mark.slow),
        pytest.param("implicit", "cayley", marks=pytest.mark.slow),
    ],
)
def test_sections_and_retractions(section, retraction):
    """Through aot_autograd's functional form."""
    make = lambda net: lifted("Adam", net, section=section, retraction=retraction)  # noqa: E731
    apart, distance, counts = compare(make, backend="aot_eager")
    assert apart <= CLOSE
    assert distance <= 1e-14
    assert counts == GRAPHS


@pytest.mark.slow
@sections
def test_inductor(section):
    apart, distance, counts = compare(lambda net: lifted("Adam", net, section=section), backend="inductor")
    assert apart <= CLOSE
    assert distance <= 1e-14
    assert counts == GRAPHS


OTHERS = [
    s for s in MANIFOLDS if s != STIEFEL and has_frame(s) and accepts(s, (6, 2)) and accepts(s, (2, 6))
]  # of Net


@pytest.mark.parametrize("space", OTHERS, ids=str)
def test_other_spaces(space):
    nets = []
    for compiled in (False, True):
        net = Net(space)
        train = runner(net, lifted("SGD", net, lr=1e-3, momentum=0.9), compiled)
        for _ in range(6):
            train()
        nets.append(net)
    assert difference(*nets) <= CLOSE
    assert off(nets[1]) <= 1e-13


@sections
def test_numbers_that_need_a_look(section):
    """Velocities from 1e-3 to 1e9, NaN, zero, and a weight written outside, in float32, over 300 steps.

    The weights stay on the space and go where the eager ones go: 1e-4 apart is what float32 leaves after the
    long ones.
    """
    nets, said = [Net(dtype=torch.float32), Net(dtype=torch.float32)], [[], []]
    gen = torch.Generator().manual_seed(1)
    grads = [[torch.randn(p.shape, generator=gen).float() for p in nets[0].parameters()] for _ in range(300)]
    for compiled, net in enumerate(nets):
        opt = lifted("SGD", net, section=section)
        step = torch.compile(opt.step, backend="eager") if compiled else opt.step
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", UserWarning)
            for k, some in enumerate(grads):
                for p, g in zip(net.parameters(), some, strict=True):
                    p.grad = g * (0.0 if k % 50 == 40 else 10.0 ** (k % 11) if k % 50 == 30 else 0.1)
                if k % 50 == 35:
                    net.a.grad[0, 0] = float("nan")
                before = values(net)
                step()
                if k % 50 == 40:
                    assert all(torch.equal(p, q) for p, q in zip(net.parameters(), before, strict=True))
                if k % 50 == 35:
                    assert torch.equal(net.a, before[0])
                    assert not torch.equal(net.b, before[1])
                assert off(net) <= 3e-6
                if k == 200:
                    with torch.no_grad():
                        net.b.copy_(STIEFEL.random(*net.b.shape, generator=torch.Generator().manual_seed(2)))
        said[compiled] = [str(w.message)[:40] for w in caught]
    if tuple(map(int, torch.__version__.split(".")[:2])) < (
        2,
        10,
    ):  # its own SGD, compiled, rounds otherwise at 1e8
        torch.testing.assert_close(nets[0].bias, nets[1].bias, rtol=1e-6, atol=0)
        nets[0].bias.data.copy_(nets[1].bias)
    assert difference(*nets) <= 1e-4
    assert said[0] == said[1]
    assert len(said[1]) == 3  # not finite, shortened, changed outside; an implicit section is rebuilt as well
    assert count()[0] <= 2 * GRAPHS[0]  # once more for the batches that were formed after the write


@pytest.mark.parametrize("lr", [1e-2, torch.tensor(1e-2)], ids=["number", "tensor"])
def test_schedules_compile_nothing(lr):
    net = Net()
    opt = lifted("Adam", net, lr=lr)
    schedule = torch.optim.lr_scheduler.ExponentialLR(opt, 0.9)
    train = runner(net, opt, True)
    for _ in range(5):
        train()
        schedule.step()
    assert count()[0] == GRAPHS[0]


@sections
def test_many_shapes_share_graphs(section):
    """The first shape has graphs of its own, the second those in which sizes are variables."""
    gen = torch.Generator().manual_seed(0)
    weights = [nn.Parameter(STIEFEL.random(20 + 3 * i, 4 + i, generator=gen)) for i in range(6)]
    opt = ghor.optim.Adam(weights, lr=1e-2, space=STIEFEL, section=section)
    step = torch.compile(opt.step, backend="eager")
    for _ in range(2):
        for p in weights:
            p.grad = torch.randn(p.shape, generator=gen)
        step()
    assert count()[0] == 4
    assert max(float(STIEFEL.residual(p.detach())) for p in weights) <= 1e-14


def test_missing_gradients_state_dicts_and_new_groups():
    """A stack that splits, a state dict loaded, a group added: compiled anew where needed, and right
    throughout."""
    nets = Net(), Net()
    extra = [nn.Parameter(STIEFEL.random(6, 2, generator=torch.Generator().manual_seed(5))) for _ in nets]
    for compiled, net in enumerate(nets):
        opt = lifted("Adam", net)
        step = torch.compile(opt.step, backend="eager") if compiled else opt.step
        for k in range(12):
            opt.zero_grad()
            net.loss().backward()
            if k == 3:
                net.b.grad = None
            if k == 6:
                opt.load_state_dict(opt.state_dict())
            if k == 9:
                opt.add_param_group({"params": [extra[compiled]], "space": STIEFEL})
            if k >= 9:
                extra[compiled].grad = torch.ones(6, 2)
            step()
    assert difference(*nets) <= CLOSE
    assert (extra[0] - extra[1]).abs().max() <= CLOSE
    assert off(nets[1]) <= 1e-14


@sections
def test_half_precision(section):
    """The point in float32 behind the weight is what the graph moves."""
    nets = []
    for compiled in (False, True):
        net = Net(dtype=torch.bfloat16)
        train = runner(net, lifted("SGD", net, section=section), compiled)
        for _ in range(4):
            train()
        nets.append(net)
    assert difference(*nets) <= 2**-7  # a rounding to the neighbour
    assert count() == GRAPHS


def test_euclidean_weights_only():
    nets = Net(FLAT), Net(FLAT)
    for net, cls in zip(nets, (torch.optim.Adam, ghor.optim.Adam), strict=True):
        opt = cls(net.parameters(), lr=1e-2, **({"space": FLAT} if cls is ghor.optim.Adam else {}))
        train = runner(net, opt, True)
        for _ in range(3):
            train()
    assert difference(*nets) <= 1e-15  # torch's own is compiled, ours is left alone


def test_closure():
    net, twin = Net(), Net()
    opt, other = lifted("Adam", net), lifted("Adam", twin)

    def closure(n, o):
        o.zero_grad()
        loss = n.loss()
        loss.backward()
        return loss

    step = torch.compile(opt.step, backend="eager")
    for _ in range(3):
        a, b = step(lambda: closure(net, opt)), other.step(lambda: closure(twin, other))
        assert abs(float((a - b).detach())) <= 1e-10
    assert difference(net, twin) <= CLOSE

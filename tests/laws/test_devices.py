"""Steps on an accelerator that is not there: fake tensors on torch's lazy device, and every read counted.

Values do not exist, but mixing devices raises as on a GPU, and a host read is a call that is seen. A read
gets what a healthy step would read. Nothing is read but by looks, every 100th step, one value each.
"""

import collections

import pytest
import torch
from helpers.table import MANIFOLDS, kinds, name, sections
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode

import ghor

pytestmark = pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")  # it has none: 0

STIEFEL = ghor.Stiefel()
READS = {
    Tensor.item: 0.0,
    Tensor.tolist: 0.0,
    Tensor.__float__: 0.0,
    Tensor.__int__: 0,
    Tensor.__index__: 0,
    Tensor.__bool__: False,
    Tensor.is_nonzero: False,
    torch.is_nonzero: False,
    torch.equal: True,
    Tensor.equal: True,
}


class Reads(TorchFunctionMode):
    """Counts the reads of values on the device; what torch keeps on the CPU, such as step counts, is 2."""

    def __init__(self):
        super().__init__()
        self.steps = collections.Counter()
        self.step = 0

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function not in READS or not torch.is_tensor(args[0]):
            return function(*args, **(kwargs or {}))
        x, value = args[0], READS[function]
        if x.device.type == "cpu":
            is_fake = type(x).__name__ == "FakeTensor"
            return type(value)(2) if is_fake else function(*args, **(kwargs or {}))
        self.steps[self.step] += 1
        return [0.0] * x.numel() if function is Tensor.tolist and x.dim() else value


def reads(cls, space, shape, steps=12, count=1, dtype=torch.float32, **options):
    """{step: reads} of a run on a device without values, and the state that lies elsewhere."""
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad(), Reads() as seen:
        params = [nn.Parameter(torch.empty(*shape, device="lazy", dtype=dtype)) for _ in range(count)]
        opt = cls(params, lr=1e-3, space=space, **options)
        for step in range(steps):
            for p in params:
                p.grad = torch.empty_like(p)
            seen.step = step
            opt.step()
        state = [v for p in params for v in opt.state[p].values() if torch.is_tensor(v) and v.dim()]
        assert {v.device.type for v in state} <= {"lazy"}
    return {
        step: n for step, n in seen.steps.items() if step > 0
    }  # the first makes frames, and checks weights


FRAMES = [
    (STIEFEL, (12, 4), {}),
    (STIEFEL, (1024, 64), {}),
    (STIEFEL, (12, 4), {"section": "implicit"}),
    (STIEFEL, (12, 4), {"retraction": "geodesic"}),
    (STIEFEL, (12, 4), {"max_angle": 0.1}),
    (STIEFEL, (12, 4), {"anchor": "start", "weight_decay": 0.1}),
    (STIEFEL, (12, 4), {"dtype": torch.bfloat16}),
    (STIEFEL, (12, 4), {"dtype": torch.bfloat16, "section": "implicit"}),
    (STIEFEL, (12, 4), {"dtype": torch.complex64}),
    (STIEFEL, (12, 4), {"dtype": torch.complex64, "section": "implicit"}),
    (STIEFEL, (49, 7), {"count": 6}),
    (STIEFEL, (12, 4), {"foreach": True}),
    (ghor.Unitary(), (5, 5), {"dtype": torch.complex64}),
    (ghor.Stiefel(blocks=3), (12, 4), {}),
    (ghor.Sphere(), (5000, 3), {}),
    (ghor.Sphere(), (40, 6), {"section": "transported"}),
    (ghor.Hyperbolic(), (40, 6), {"section": "transported"}),
    (ghor.SPD(), (5, 5), {"dtype": torch.bfloat16}),
]


SPACES = [(space, kinds(space)[-1], {"section": k}) for space in MANIFOLDS for k in sections(space)]
CASES = [(("Adam", "Muon")[i % 2], *case) for i, case in enumerate(SPACES)]
CASES += [("Adam", *case) for case in FRAMES] + [(cls, STIEFEL, (12, 4), {}) for cls in ghor.optim.__all__]


@pytest.mark.parametrize(("cls", "space", "shape", "options"), CASES, ids=name)
def test_a_step_reads_nothing(cls, space, shape, options):
    assert not reads(getattr(ghor.optim, cls), space, shape, **options)


def test_a_look_is_every_hundredth_step():
    """And one read: of its list of four numbers, of which fake tensors have no values, each is counted."""
    assert list(reads(ghor.optim.Adam, STIEFEL, (12, 4), 110).values()) == [4]

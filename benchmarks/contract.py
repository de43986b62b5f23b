"""Adam under the contract of torch.optim: ghor's and geoopt's, each on Euclidean weights and on Stiefel.

    python benchmarks/contract.py                          # seconds
    python benchmarks/contract.py --json contract.json

The configurations, and the inputs that must be refused, are those of PyTorch's own database
(torch.testing._internal.common_optimizers), each in all of torch's implementations (forloop, foreach, fused).
torch's own Adam is in the table too, to show that it passes the checks. A cell counts the cases that behave
as torch's class does. tests/pytorch/test_torch_database.py has these checks, and more, for every class of
ghor.optim. Below the table: how far loaded or copied runs are from those that go on, and the first errors.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import io
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from common import stamp, write_json
from torch import Tensor, nn
from torch.optim import Adam, Optimizer
from torch.optim.lr_scheduler import ExponentialLR
from torch.testing._internal.common_optimizers import OptimizerErrorEnum, optim_db

import ghor

DATABASE = next(info for info in optim_db if info.optim_cls is Adam)
IMPLEMENTATIONS: list[dict[str, Any]] = [{"foreach": False}, {"foreach": True}, {"fused": True}]
CONFIGURATIONS = [
    i.kwargs | impl for i in DATABASE.optim_inputs_func(device="cpu") for impl in IMPLEMENTATIONS
]
Make = Callable[..., Optimizer]


class Net(nn.Module):
    """A matrix with orthonormal columns and a vector; f(a, b) = |x a + b - y|^2."""

    def __init__(self, parameter: Callable[[Tensor], nn.Parameter] = nn.Parameter) -> None:
        super().__init__()
        gen = torch.Generator().manual_seed(0)
        self.a = parameter(ghor.Stiefel().random(6, 3, generator=gen))
        self.b = nn.Parameter(torch.randn(3, generator=gen))
        self.x, self.y = torch.randn(8, 6, generator=gen), torch.randn(8, 3, generator=gen)

    def loss(self) -> Tensor:
        return (self.x @ self.a + self.b - self.y).square().sum()

    def train_for(self, opt: Optimizer, steps: int = 5) -> list[Tensor]:
        for _ in range(steps):
            opt.zero_grad()
            self.loss().backward()
            opt.step()
        return [p.detach().clone() for p in self.parameters()]


def gap(one: list[Tensor], two: list[Tensor]) -> float:
    return max(float((a - b).abs().max()) for a, b in zip(one, two, strict=True))


def same(one: list[Tensor], two: list[Tensor], tolerance: float = 0.0) -> bool:
    return gap(one, two) <= tolerance


def off(net: Net) -> float:
    return float(ghor.Stiefel().residual(net.a.detach()))


# -- the checks: one configuration each ----------------------------------------------------------------------


def goes_where_it_should(make: Make, net: Callable[[], Net], flat: bool, kwargs: dict[str, Any]) -> bool:
    """Euclidean weights equal torch's to 1e-6; on Stiefel they stay within 1e-5 and go the way asked for."""
    one, two = net(), Net()
    before = one.loss().item()
    ends = one.train_for(make(one.parameters(), **kwargs), 20)
    if flat:
        return same(ends, two.train_for(Adam(two.parameters(), **kwargs), 20), 1e-6)
    return off(one) <= 1e-5 and (one.loss().item() > before) is kwargs.get("maximize", False)


def implementations_agree(make: Make, net: Callable[[], Net], flat: bool, kwargs: dict[str, Any]) -> bool:
    """The option is accepted and agrees with the loop over parameters."""
    one, two = net(), net()
    opt = make(one.parameters(), **kwargs)
    loop = make(two.parameters(), **kwargs | {"fused": None, "foreach": False})
    return all(opt.defaults[k] == v for k, v in kwargs.items()) and same(
        one.train_for(opt), two.train_for(loop), 1e-6
    )


def loaded_gap(make: Make, net: Callable[[], Net], kwargs: dict[str, Any]) -> float:
    """How far a run that went through torch.load(weights_only=True) is from the one that went on."""
    one, two = net(), net()
    opt, other = (make(n.parameters(), **kwargs) for n in (one, two))
    one.train_for(opt)
    file = io.BytesIO()
    torch.save((one.state_dict(), opt.state_dict()), file)
    file.seek(0)
    model, state = torch.load(file, weights_only=True)
    two.load_state_dict(model)
    other.load_state_dict(state)
    return gap(one.train_for(opt), two.train_for(other))


def copied_gap(make: Make, net: Callable[[], Net], kwargs: dict[str, Any]) -> float:
    """The same for a copy of model and optimizer."""
    one = net()
    opt = make(one.parameters(), **kwargs)
    one.train_for(opt)
    two, other = copy.deepcopy((one, opt))
    return gap(one.train_for(opt), two.train_for(other))


def resumes_to_the_bit(make: Make, net: Callable[[], Net], flat: bool, kwargs: dict[str, Any]) -> bool:
    return loaded_gap(make, net, kwargs) == 0


def deepcopies_to_the_bit(make: Make, net: Callable[[], Net], flat: bool, kwargs: dict[str, Any]) -> bool:
    return copied_gap(make, net, kwargs) == 0


def leaves_gradients(make: Make, net: Callable[[], Net], flat: bool, kwargs: dict[str, Any]) -> bool:
    """A step does not write into gradients; zero gradients do not move weights without decay."""
    one = net()
    opt = make(one.parameters(), **kwargs)
    one.loss().backward()
    before = [(p.grad.clone(), p.grad._version) for p in one.parameters() if p.grad is not None]
    opt.step()
    unwritten = all(
        p.grad is not None and torch.equal(p.grad, g) and p.grad._version == v
        for p, (g, v) in zip(one.parameters(), before, strict=True)
    )
    still = net()
    start = [p.detach().clone() for p in still.parameters()]
    opt = make(still.parameters(), **kwargs | {"weight_decay": 0.0})
    for p in still.parameters():
        p.grad = torch.zeros_like(p)
    opt.step()
    return unwritten and same(start, list(still.parameters()), 0.0 if flat else 1e-7)


def tensor_rates(make: Make, net: Callable[[], Net], flat: bool, kwargs: dict[str, Any]) -> bool:
    """A tensor learning rate of 0, 1 or 2 dimensions acts like the number; foreach refuses it."""
    for dims in range(3):
        one, two = net(), net()
        rate = kwargs | {"lr": torch.full([1] * dims, 1e-2)}
        if kwargs.get("foreach"):
            if outcome(lambda n=one, r=rate: make(n.parameters(), **r))[0] is not ValueError:  # type: ignore[misc]
                return False
            continue
        number = two.train_for(make(two.parameters(), **kwargs | {"lr": 1e-2}))
        if not same(one.train_for(make(one.parameters(), **rate)), number, 1e-6):
            return False
    return True


def hooks_and_schedules(make: Make, net: Callable[[], Net], flat: bool, kwargs: dict[str, Any]) -> bool:
    """Hooks fire once per step, a closure is called once, and a scheduler's rates arrive."""
    one, calls = net(), list[str]()
    opt = make(one.parameters(), **kwargs)
    opt.register_step_pre_hook(lambda *_: calls.append("pre"))
    opt.register_step_post_hook(lambda *_: calls.append("post"))
    rate = opt.param_groups[0]["lr"]
    schedule = ExponentialLR(opt, 0.5)
    one.train_for(opt, 2)
    opt.step(lambda: calls.append("closure") or 1.0)  # type: ignore[func-returns-value]
    schedule.step()
    return calls == ["pre", "post"] * 2 + ["pre", "closure", "post"] and opt.param_groups[0]["lr"] == rate / 2


def outcome(make: Callable[[], Any]) -> tuple[type | None, str]:
    try:
        make()
    except Exception as error:
        return type(error), str(error)
    return None, ""


def refusals(make: Make) -> tuple[int, int]:
    """How many inputs are refused with torch's exception and a similar message, and out of how many."""
    alike = []
    for error in DATABASE.optim_error_inputs_func("cpu", torch.float32):
        given = error.optimizer_error_input
        assert error.error_on is OptimizerErrorEnum.CONSTRUCTION_ERROR
        theirs = outcome(lambda g=given: Adam(g.params, **g.kwargs))  # type: ignore[misc]
        ours = outcome(lambda g=given: make(g.params, **g.kwargs))  # type: ignore[misc]
        alike.append(ours[0] is theirs[0] and ours[1].startswith(theirs[1]))
    return sum(alike), len(alike)


CHECKS = [
    goes_where_it_should,
    implementations_agree,
    resumes_to_the_bit,
    deepcopies_to_the_bit,
    leaves_gradients,
    tensor_rates,
    hooks_and_schedules,
]


def contenders() -> dict[str, tuple[Make, Callable[[], Net], bool]]:
    """Name: how to build the optimizer and the network, and whether its weights are Euclidean."""
    flat, stiefel = ghor.Euclidean(), (ghor.Stiefel(), ghor.Euclidean())
    out: dict[str, tuple[Make, Callable[[], Net], bool]] = {
        "torch": (Adam, Net, True),
        "ghor": (lambda params, **k: ghor.optim.Adam(params, space=flat, **k), Net, True),
        "ghor, Stiefel": (
            lambda params, **k: ghor.optim.Adam([{"params": list(params), "space": stiefel}], **k),
            Net,
            False,
        ),
    }
    try:
        import geoopt
    except ImportError:
        print('geoopt is not installed and left out: pip install -e ".[bench]"')
        return out
    RiemannianAdam = geoopt.optim.RiemannianAdam
    canonical = geoopt.CanonicalStiefel()
    out["geoopt"] = RiemannianAdam, Net, True
    out["geoopt, Stiefel"] = (
        RiemannianAdam,
        lambda: Net(lambda Y: geoopt.ManifoldParameter(Y, manifold=canonical)),
        False,
    )
    return out


def cases(make: Make, net: Callable[[], Net], flat: bool) -> tuple[dict[str, int], dict[str, str], float]:
    """How many configurations pass each check, its first error, and the largest gap of a resumed run."""
    passed, errors, largest = {check.__name__: 0 for check in CHECKS}, dict[str, str](), 0.0
    for kwargs in CONFIGURATIONS:
        for check in CHECKS:
            try:
                passed[check.__name__] += check(make, net, flat, dict(kwargs))
            except Exception as error:
                errors.setdefault(check.__name__, f"{type(error).__name__}: {error}")
        for resumed in (loaded_gap, copied_gap):
            with contextlib.suppress(Exception):  # counted above
                largest = max(largest, resumed(make, net, dict(kwargs)))
    return passed, errors, largest


def main() -> None:
    from rich.console import Console
    from rich.table import Table

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the counts to this file")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    found = {}
    for name, (make, net, flat) in contenders().items():
        passed, errors, largest = cases(make, net, flat)
        found[name] = {
            "passed": passed,
            "configurations": len(CONFIGURATIONS),
            "refused": refusals(make) if flat else None,
            "resumed_gap": largest,
            "errors": errors,
        }
    table = Table("as torch's Adam does", *found)
    for check in (c.__name__ for c in CHECKS):
        cells = (f"{r['passed'][check]} of {r['configurations']}" for r in found.values())
        table.add_row(check.replace("_", " "), *cells)
    table.add_row(
        "refusals", *("{} of {}".format(*r["refused"]) if r["refused"] else "" for r in found.values())
    )
    console = Console()
    console.print(table)
    for name, r in found.items():
        if r["resumed_gap"]:
            console.print(
                f"{name}: a loaded or copied run is up to {r['resumed_gap']:.1e} off", highlight=False
            )
        for check, why in r["errors"].items():
            console.print(f"{name}, {check}: {why[:110]}", highlight=False)
    if args.json:
        write_json({"benchmark": "contract", **stamp(), "found": found}, args.json)


if __name__ == "__main__":
    main()

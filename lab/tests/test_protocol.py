"""The authors' protocol: start, frame, loss after the step, warm-up, and the gate."""

import copy
import dataclasses

import pytest
import torch
from runs import facts, the_record, weights

import ghor
from ghor.constraints.declare import declared_spaces
from ghor_lab import protocol, tasks, train
from ghor_lab.config import Config
from ghor_lab.record import Run, read

MNIST = Config("mnist", "geometric-adam", (0,), 2, 1e-3, 16, compile=False, network={"blocks": 1})
AUTHORS = {"start": "authors", "frame": "random", "loss": "after"}


pytestmark = pytest.mark.usefixtures("one_commit", "as_before")


def points(**change):
    model = tasks.Classification.network(dataclasses.replace(MNIST, network={"blocks": 16}, **change))
    return model, torch.cat(
        [p.detach().flatten(0, 1) for _, p, space in declared_spaces(model) if space == ghor.Stiefel()]
    )


def test_the_authors_start_is_the_q_of_a_normal_matrix(gen):
    """LAPACK's own, of the matrix that the uniform point comes from; hence a mean of -0.11 on the
    diagonal."""
    X = torch.randn(50, 49, 7, dtype=torch.float64, generator=gen)
    Q, R = torch.linalg.qr(X)
    uniform = Q * R.diagonal(dim1=-2, dim2=-1).sign().unsqueeze(-2)
    model = torch.nn.Linear(7, 49, bias=False, dtype=torch.float64)
    for y, q in zip(uniform, Q, strict=True):
        model.weight.data.copy_(y)
        ghor.constrain(model, "weight", ghor.Stiefel())
        protocol.authors_start(model)
        torch.testing.assert_close(model.weight.detach(), q, rtol=0, atol=1e-13)
    (a, ours), (b, theirs) = points(), points(start="authors")
    # Q's first entry is -|x| / ||X||, of mean -sqrt(2 / pi / 49) = -0.114; 2352 entries of deviation below
    # 1/7
    assert abs(float(theirs.diagonal(dim1=-2, dim2=-1).mean()) + 0.11) < 0.01
    assert abs(float(ours.diagonal(dim1=-2, dim2=-1).mean())) < 0.01
    assert float(ghor.Stiefel().residual(theirs.double()).max()) < 1e-6
    for (name, p), q in zip(a.named_parameters(), b.parameters(), strict=True):
        assert torch.equal(p, q) is ("attention" not in name)  # everything else is paired


def test_the_random_frame_is_the_first_section():
    config = dataclasses.replace(MNIST, frame="random")
    model = tasks.Classification.network(config)
    before = copy.deepcopy(model.state_dict())
    opt = train.optimizer_of(config, model)
    (p,) = protocol.on_manifolds(model)
    Lambda = opt.state[p]["section"].clone()
    assert torch.equal(Lambda[..., :7], p)
    I = torch.eye(49, dtype=torch.float64)
    assert float((Lambda.double().mT @ Lambda.double() - I).abs().max()) < 1e-6
    assert float((Lambda - ghor.Stiefel().section(p.detach())).abs().max()) > 0.1
    assert torch.equal(Lambda, train.optimizer_of(config, model).state[p]["section"])  # the seed decides
    for q in model.parameters():
        q.grad = torch.zeros_like(q)
    opt.step()  # nothing moves, and the section is not made again
    torch.testing.assert_close(opt.state[p]["section"], Lambda, rtol=0, atol=0)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


def test_the_first_step_of_adam_is_in_the_coordinates_of_the_frame(gen):
    """Its sign is taken there: B = Q^T G for the lower block."""
    moved = {}
    for frame in ("closed-form", "random"):
        config = dataclasses.replace(MNIST, frame=frame)
        model = tasks.Classification.network(config)
        opt = train.optimizer_of(config, model)
        (p,) = protocol.on_manifolds(model)
        G = torch.randn(p.shape, generator=torch.Generator().manual_seed(1))
        start, p.grad = p.detach().clone(), G
        Lambda = opt.state[p]["section"].clone() if frame == "random" else ghor.Stiefel().section(start)
        opt.step()
        W = Lambda.mT @ (p.detach() - start)  # to first order the velocity, whose entries are -lr sign
        lower = Lambda[..., 7:].mT @ G
        torch.testing.assert_close(W[..., 7:, :], -1e-3 * lower.sign(), rtol=0.1, atol=2e-5)
        moved[frame] = p.detach().clone()
    assert not torch.equal(*moved.values())


@pytest.mark.parametrize(
    "change", [AUTHORS, {"loss": "after"}, {"warmup": 5}, {"warmup": 2, "manifold_lr": 1e-2}], ids=str
)
def test_a_run_that_was_stopped_ends_as_if_it_was_not(change, images, tmp_path):
    """Also in the middle of a warm-up: an epoch has three steps."""
    config = dataclasses.replace(MNIST, **change)
    train.train(config, tmp_path / "a", data=images)
    train.train(dataclasses.replace(config, epochs=1), tmp_path / "b", data=images)
    train.train(config, tmp_path / "b", data=images)
    a, b = (facts(the_record(tmp_path / name)) for name in "ab")
    assert [x for x in a if x["kind"] == "epoch"] == [x for x in b if x["kind"] == "epoch"]
    assert weights(tmp_path / "a") == weights(tmp_path / "b")


def test_the_loss_after_the_step(images, tmp_path):
    """Only what is written down differs."""
    runs = {}
    for when in ("before", "after"):
        config = dataclasses.replace(MNIST, loss=when, lr=1e-2)
        runs[when] = read(train.train(config, tmp_path / when, data=images))
        (state,) = weights(tmp_path / when).values()
        runs[when, "weights"] = state["model"]
    assert runs["before", "weights"] == runs["after", "weights"]
    before, after = (runs[when].epochs[0]["loss"][0] for when in ("before", "after"))
    assert after < before  # of random labels, learnt by heart
    assert runs["before"].epochs[0]["test_accuracy"] == runs["after"].epochs[0]["test_accuracy"]


def test_warm_up_is_linear(images, tmp_path, monkeypatch):
    rates = []
    step = ghor.optim.Adam.step

    def noted(self, closure=None):
        rates.append([group["lr"] for group in self.param_groups])
        return step(self, closure)

    monkeypatch.setattr(train, "count_state", lambda config, model: {})
    monkeypatch.setattr(ghor.optim.Adam, "step", noted)
    train.train(dataclasses.replace(MNIST, warmup=4, manifold_lr=1e-2), tmp_path, data=images)
    expected = [(1e-3 * share, 1e-2 * share) for share in (0.25, 0.5, 0.75, 1, 1, 1)]
    torch.testing.assert_close(torch.tensor(rates), torch.tensor(expected))


# -- the gate ------------------------------------------------------------------------------------------------


def lines(losses, accuracy=80.0, drift=1e-6):
    return [{"loss": [x], "test_accuracy": [accuracy], "drift": [drift]} for x in losses]


@pytest.mark.parametrize(
    ("optimizer", "epochs", "why"),
    [
        ("geometric-adam", lines([1.0, 0.5]), None),
        ("geometric-adam", lines([1.0]), None),
        ("geometric-adam", lines([1.0, 0.98]), "loss 0.980 after 1.000"),
        ("geometric-adam", lines([1.0, None, 0.5]), "not finite"),
        ("geometric-adam", lines([1.0, 0.5], drift=None), "not finite"),
        ("geometric-adam", lines([1.0, 0.5], drift=1.1e-2), "drift 1.1e-02"),
        ("geometric-adam", lines([1.0, *[0.5] * 48], accuracy=29.9), None),
        ("geometric-adam", lines([1.0, *[0.5] * 49], accuracy=29.9), "accuracy 29.9 %"),
        ("geometric-adam", lines([1.0, *[0.5] * 49], accuracy=30.0), None),
        ("standard-adam", lines([1.0, 1.3], accuracy=10.0), None),
        ("standard-adam", lines([1.0, 1.29], accuracy=10.0), "loss 1.290, not within 0.05 of 1.342"),
        ("standard-adam", [{"loss": [1.34], "test_accuracy": [10.0], "drift": None}], None),
    ],
)
def test_the_gate(optimizer, epochs, why):
    (found,) = protocol.judge(optimizer, epochs)
    assert found == why if why is None else found.startswith(why)


def test_the_gate_judges_each_seed():
    epochs = [{"loss": [1.0, 1.0], "drift": [0.0, 0.0]}, {"loss": [1.1, 0.3], "drift": [0.0, 0.0]}]
    assert protocol.judge("momentum", epochs) == ["loss 1.100 after 1.000 in the first epoch", None]
    network = torch.nn.Linear(3, 2)
    assert protocol.gate("momentum", epochs, network)[1] is None
    with torch.no_grad():
        network.weight[1, 0] = torch.nan  # of the second copy
    assert protocol.gate("momentum", epochs, network)[1] == "not finite"


def test_the_verdict_is_recorded_and_can_be_had_from_old_records(images, tmp_path):
    run = read(train.train(MNIST, tmp_path, data=images))
    assert run.last("end")["gate"] == protocol.verdicts(run)
    old = Run(run.path, run.header, run.epochs, [{"kind": "end", "epochs": 2}])
    assert protocol.verdicts(old) == protocol.judge("geometric-adam", run.epochs)
    run.last("end")["gate"] = ["as recorded"]
    assert protocol.verdicts(run) == ["as recorded"]
    run.epochs.pop()  # it is of other epochs
    assert protocol.verdicts(run) == [None]

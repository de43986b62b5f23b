"""The tasks: data, trajectories, batches, losses by their formulas, the authors' protocol."""

import dataclasses
import gzip
import math
import re

import pytest
import torch
from helpers.lab import ARRAYS, MNIST, PENDULUM, RAW, TEXT, TINY, fill

import ghor
from ghor_lab import data, protocol
from ghor_lab.language import METHODS
from ghor_lab.record import Run
from ghor_lab.tasks import pendulum, task_of, text
from ghor_lab.tasks.task import on_spaces

# -- files of images -----------------------------------------------------------------------------------------


def same(images):
    found = (images.train_images, images.train_labels, images.test_images, images.test_labels)
    return all(torch.equal(a, b.to(a.dtype)) for a, b in zip(found, ARRAYS, strict=True))


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.delenv("GHOR_DATA")
    monkeypatch.setenv("GHOR_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "tiny"


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("place", ["", "tiny", "TINY/raw"])
def test_a_given_folder_is_enough(tmp_path, cache, monkeypatch, place, packed):
    fill(tmp_path / "given" / place, packed)
    assert same(data.load(TINY, tmp_path / "given"))
    monkeypatch.setenv("GHOR_DATA", str(tmp_path / "given"))
    assert same(data.load(TINY))
    assert not cache.exists()


def test_mirrors_are_tried_in_order_and_what_they_have_is_kept(cache, tmp_path):
    """A mirror with a wrong file is passed over; packages come last."""
    wrong, right = (fill(tmp_path / name, packed=True) for name in ("wrong", "right"))
    (wrong / f"{data.NAMES[2]}.gz").write_bytes(gzip.compress(RAW[data.NAMES[0]]))
    mirrors = ("file:///no/such/folder", wrong.as_uri(), right.as_uri())
    assert same(data.load(dataclasses.replace(TINY, mirrors=mirrors)))
    assert len(list(cache.iterdir())) == 4
    assert same(data.load(TINY))
    package = lambda folder: fill(folder / "in")  # noqa: E731
    found = data.load(dataclasses.replace(TINY, mirrors=mirrors[:1], package=package), tmp_path / "given")
    assert same(found)
    assert found.folders == (cache,)  # that of the cache, which comes before what is fetched


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda raw: raw[:-1], "is no IDX file"),
        (lambda raw: b"", "is no IDX file"),
        (lambda raw: raw[:-1] + bytes([raw[-1] ^ 1]), "its SHA-256 is"),
        (lambda raw: gzip.compress(raw)[:-9], "cannot be unpacked"),
        (lambda raw: raw[:2] + b"\x0d" + raw[3:], "is no IDX file"),
    ],
    ids=["cut", "empty", "one bit", "gzip cut", "type"],
)
def test_a_wrong_file_is_named_and_fetched_elsewhere(cache, tmp_path, capsys, damage, said):
    given = fill(tmp_path / "given")
    (given / data.NAMES[0]).write_bytes(damage(RAW[data.NAMES[0]]))
    mirror = fill(tmp_path / "mirror", packed=True)
    assert same(data.load(dataclasses.replace(TINY, mirrors=(mirror.as_uri(),)), given))
    output = capsys.readouterr().err
    assert str(given / data.NAMES[0]) in output
    assert re.search(said, output)


def test_nothing_to_be_had_says_what_was_tried(cache):
    def package(folder):
        data.run(["no-such-client", "pack"], folder)
        return folder

    wanted = dataclasses.replace(TINY, mirrors=("file:///no/such/folder",), package=package)
    with pytest.raises(OSError, match=r"(?s)tiny: train-images.*no/such/folder.*no-such-client.*GHOR_DATA"):
        data.load(wanted)
    with pytest.raises(OSError, match="last words"):
        data.run(["sh", "-c", "echo first; echo last words >&2; exit 3"], cache.parents[1])


def test_a_folder_that_cannot_be_written_to_is_named(tmp_path, cache, capsys):
    (tmp_path / "given").touch()
    mirror = fill(tmp_path / "mirror", packed=True)
    wanted = dataclasses.replace(TINY, mirrors=(mirror.as_uri(),))
    assert data.load(wanted, tmp_path / "given").folders == (cache,)
    assert f"{tmp_path / 'given'} lacks files or cannot be written to; used is" in capsys.readouterr().err


# -- the pendulum --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def angles():
    return pendulum.integrate()


def test_trajectories_begin_on_the_grid_and_conserve_energy(angles):
    theta, velocity = angles.unbind(-1)
    for i in range(10):
        for j in range(10):
            assert math.isclose(theta[10 * i + j, 0], 2 * math.pi * i / 9, abs_tol=1e-15)
            assert math.isclose(velocity[10 * i + j, 0], -2 + 4 * j / 9, abs_tol=1e-15)
    H = velocity.square() / 2 + theta.cos()
    assert float((H - H[:, :1]).abs().max()) < 1e-10


def test_every_point_follows_from_the_one_before(angles):
    """Against 20 steps of the classical Runge-Kutta method: 0.005^4 / 120, times 0.1, is below 1e-12."""
    y, h = angles.permute(2, 0, 1)[:, :, :-1], 0.005
    f = lambda y: torch.stack([y[1], y[0].sin()])  # noqa: E731
    for _ in range(20):
        a = f(y)
        b = f(y + h / 2 * a)
        c = f(y + h / 2 * b)
        y = y + h / 6 * (a + 2 * b + 2 * c + f(y + h * c))
    assert float((y - angles.permute(2, 0, 1)[:, :, 1:]).abs().max()) < 1e-11


def test_the_lift(angles):
    z = pendulum.lift(angles)
    theta, velocity = (float(x) for x in angles[37, 50])
    expected = (math.sin(theta), math.cos(theta), velocity * math.cos(theta), -velocity * math.sin(theta))
    assert z[37, 50].tolist() == pytest.approx(expected, abs=1e-15)
    # p is the derivative of q: central differences of step 0.1 are off by 0.1^2 / 6 of a third derivative
    # below 100
    q, p = z[..., :2], z[..., 2:]
    torch.testing.assert_close((q[:, 2:] - q[:, :-2]) / 0.2, p[:, 1:-1], rtol=0, atol=100 * 0.1**2 / 6)


def test_the_error_is_relative_for_each_seed():
    task = task_of(dataclasses.replace(PENDULUM, dtype="float64"))
    task.read()
    batch = next(task.batches(1))
    assert batch.shape == (2, 4, 5050)
    losses = task.losses(batch)
    with torch.no_grad():
        y = task.model(batch.mT)
    for i in range(2):
        x = batch[i].mT
        assert losses[i] == pytest.approx(float((x - y[i]).norm() / x.norm()), rel=1e-12)
    expected = torch.autograd.grad(
        sum((x.mT - task.model(batch.mT)[i]).norm() / x.norm() for i, x in enumerate(batch)),
        list(task.model.parameters()),
    )
    for p, g in zip(task.model.parameters(), expected, strict=True):
        torch.testing.assert_close(p.grad, g, rtol=1e-9, atol=1e-12)


# -- the transformer -----------------------------------------------------------------------------------------


def test_the_loss_of_pieces_is_that_of_the_batch(monkeypatch):
    """Norm and gradient over the whole batch, however it is cut."""
    task = task_of(dataclasses.replace(MNIST, dtype="float64", batch_size=20))
    task.read()
    assert task.steps == 2
    images, labels = batch = next(task.batches(1))
    onehot = torch.nn.functional.one_hot(labels, 10).double()
    loss = torch.linalg.matrix_norm(task.model(images) - onehot) / torch.linalg.matrix_norm(onehot)
    expected = torch.autograd.grad(loss, list(task.model.parameters()))
    for size in (7, 256):
        monkeypatch.setattr("ghor_lab.tasks.mnist.PIECE", size)
        task.model.zero_grad()
        assert task.losses(batch) == pytest.approx([float(loss.detach())], rel=1e-12)
        for p, g in zip(task.model.parameters(), expected, strict=True):
            torch.testing.assert_close(p.grad, g, rtol=1e-9, atol=1e-13)
    before = [p.grad.clone() for p in task.model.parameters()]
    assert task.losses(batch, backward=False) == pytest.approx([float(loss.detach())], rel=1e-12)
    assert all(torch.equal(p.grad, g) for p, g in zip(task.model.parameters(), before, strict=True))
    guesses = task.model(task.pixels(task.images.test_images)).argmax(-1)
    right = 100 * float((guesses == task.images.test_labels).double().mean())
    assert task.evaluate()["test_accuracy"] == pytest.approx([right])


def test_batches_are_decided_by_seed_and_epoch():
    """The same images for every optimizer; another order in another epoch."""
    a, b = (task_of(dataclasses.replace(MNIST, optimizer=o)) for o in ("geometric-adam", "standard-adam"))
    for task in (a, b):
        task.read()
    first, second = ([labels.tolist() for _, labels in a.batches(epoch)] for epoch in (1, 2))
    assert first == [labels.tolist() for _, labels in b.batches(1)] != second


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"batch_size": 51}, "batch_size 51 is more than the 50 images"),
        ({"experiment": "pendulum", "batch_size": 10101, "network": {}}, "more than the 10100 points"),
    ],
)
def test_data_that_does_not_fit_is_refused(change, words):
    task = task_of(dataclasses.replace(MNIST, **change))
    with pytest.raises(ValueError, match=words):
        task.read()


# -- the language model --------------------------------------------------------------------------------------


def test_files_are_split_by_their_content(small, tmp_path):
    """Every byte once; names, copies, empty files and what was installed beside the library do not count."""
    train, held_out, facts = text.load(small / "library")
    assert sum(facts["files"]) == 64
    for path in sorted((small / "library").glob("*.py")):
        content = path.read_bytes()
        first = text.hashlib.sha256(content).digest()[0]
        assert (content in bytes(held_out)) == (first < text.HELD_OUT)
        for name in (f"a/{path.name}", f"copies/{path.name}", f"site-packages/{path.name}"):
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_bytes(content + b"#" * name.startswith("site"))
    (tmp_path / "empty.py").touch()
    again = text.load(tmp_path)
    assert again[2] == facts
    assert torch.equal(again[0], train)
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "x.py").write_text("x = 1\n")
    with pytest.raises(ValueError, match="no readable standard library"):
        text.load(tmp_path / "one")


@pytest.mark.parametrize("name", METHODS)
def test_a_method_changes_the_network_as_little_as_its_space_asks(name):
    """The size of every head of a matrix is that of the free network: scales make up for the space."""
    free = task_of(TEXT).model.matrices()
    on = task_of(dataclasses.replace(TEXT, optimizer=name)).model.matrices()
    for key, matrix in free.items():
        x = torch.eye(matrix.weight.shape[1])
        sizes = [m(x).detach().unflatten(1, (m.parts, -1)).norm(dim=(0, 2)) for m in (matrix, on[key])]
        assert torch.allclose(*sizes, rtol=1e-5)


# -- the authors' protocol -----------------------------------------------------------------------------------


def test_the_authors_start_is_the_q_of_a_normal_matrix(gen):
    """LAPACK's own, of the matrix that the uniform point comes from: a mean of -0.11 on the diagonal."""
    X = torch.randn(50, 49, 7, dtype=torch.float64, generator=gen)
    Q, R = torch.linalg.qr(X)
    uniform = Q * R.diagonal(dim1=-2, dim2=-1).sign().unsqueeze(-2)
    protocol.authors_start([uniform])
    torch.testing.assert_close(uniform, Q, rtol=0, atol=1e-13)
    ours, theirs = (
        task_of(dataclasses.replace(MNIST, network={"blocks": 16}, start=start)).model
        for start in ("uniform", "authors")
    )
    means = []
    for model in (ours, theirs):
        points = torch.cat([p.detach().flatten(0, 1) for _, p, _ in on_spaces(model)])
        assert float(ghor.Stiefel().residual(points.double()).max()) < 1e-6
        means.append(float(points.diagonal(dim1=-2, dim2=-1).mean()))
    # Q's first entry is -|x| / ||X||, of mean -sqrt(2 / pi / 49) = -0.114; 2352 of deviation below 1/7
    assert means == pytest.approx([0, -0.11], abs=0.01)
    for (name, p), q in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert torch.equal(p, q) is ("attention" not in name)  # everything else is paired


def test_the_first_step_of_adam_is_in_the_coordinates_of_the_frame():
    """Its sign is taken there, B = Q^T G for the lower block; the seed decides the frame."""
    moved = {}
    for frame in ("closed-form", "random"):
        task, again = (task_of(dataclasses.replace(MNIST, frame=frame)) for _ in range(2))
        opt = task.optimizer()
        ((_, p, _),) = on_spaces(task.model)
        Lambda = ghor.Stiefel().section(p.detach())
        if frame == "random":
            other, Lambda = Lambda, opt.state[p]["section"].clone()
            ((_, q, _),) = on_spaces(again.model)
            assert torch.equal(Lambda, again.optimizer().state[q]["section"])
            assert torch.equal(Lambda[..., :7], p)
            assert float((Lambda - other).abs().max()) > 0.1
        I = torch.eye(49, dtype=torch.float64)
        assert float((Lambda.double().mT @ Lambda.double() - I).abs().max()) < 1e-6
        G = torch.randn(p.shape, generator=torch.Generator().manual_seed(1))
        start, p.grad = p.detach().clone(), G
        opt.step()
        W = Lambda.mT @ (p.detach() - start)  # to first order the velocity, whose entries are -lr sign
        lower = Lambda[..., 7:].mT @ G
        torch.testing.assert_close(W[..., 7:, :], -1e-3 * lower.sign(), rtol=0.1, atol=2e-5)
        moved[frame] = p.detach().clone()
    assert not torch.equal(*moved.values())


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


def test_the_gate_judges_each_seed_and_its_weights():
    epochs = [{"loss": [1.0, 1.0], "drift": [0.0, 0.0]}, {"loss": [1.1, 0.3], "drift": [0.0, 0.0]}]
    assert protocol.judge("momentum", epochs) == ["loss 1.100 after 1.000 in the first epoch", None]
    network = torch.nn.Linear(3, 2)
    assert protocol.gate("momentum", epochs, network)[1] is None
    with torch.no_grad():
        network.weight[1, 0] = torch.nan  # of the second copy
    assert protocol.gate("momentum", epochs, network)[1] == "not finite"
    header = {"config": {"optimizer": "momentum"}}
    run = Run(None, header, epochs=epochs, others=[{"kind": "end", "epochs": 2, "gate": ["recorded", None]}])
    assert protocol.verdicts(run) == ["recorded", None]
    run.epochs.pop()  # the verdict is of other epochs
    assert protocol.verdicts(run) == [None, None]

"""The compiled gradient layers against the formula in float64; what they do with what they do not take."""

import contextlib
import copy
import gc
import os
import shutil
import threading
import warnings
import weakref

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx

import ghor
from ghor_lab.compiled import build, parts, use, used
from ghor_lab.compiled import gradients as compiled
from ghor_lab.networks import PSD, GradientP, GradientQ, SymplecticAutoencoder, symplecticity
from ghor_lab.networks.phase_space import Chain, jacobian

F64 = torch.float64
EPS = 2**-23
SMALL = {"encoder_layers": 3, "decoder_layers": 4, "decoder_output_layers": 5, "upscale": 7}

pytestmark = pytest.mark.skipif(
    not (os.environ.get("CC") or any(map(shutil.which, ("cc", "gcc", "clang")))),
    reason="there is no C compiler",
)


def clear():
    compiled.library.cache_clear()
    compiled.missing.cache_clear()


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    """A cache folder of our own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GHOR_CACHE", str(tmp_path_factory.mktemp("cache")))
        clear()
        yield
    clear()


def run(layers, d, m, copies, gen):
    """Gradient layers that take turns, biases away from zero."""
    kinds = (GradientQ, GradientP)
    chain = use(Chain([kinds[i % 2](2 * d, m, copies, gen) for i in range(layers)]))
    with torch.no_grad():
        for layer in chain.layers:
            layer.bias.normal_(generator=gen)
    return chain


def plain(model, dtype=F64):
    return use(copy.deepcopy(model).to(dtype), False)


def gradients(model, z, weights):
    z = z.detach().requires_grad_()
    y = model(z)
    model.zero_grad()
    (y * weights).sum().backward()
    return [y.detach(), z.grad, *(p.grad for p in model.parameters())]


def off(found, exact):
    return float((found.double() - exact).norm() / exact.norm())


# -- the formula ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("points", [1, 16, 37, 256])
@pytest.mark.parametrize("copies", [(), (3,)])
@pytest.mark.parametrize(
    ("d", "m", "layers"), [(1, 20, 1), (1, 5, 6), (2, 40, 1), (2, 40, 5), (3, 7, 4), (4, 1, 3)]
)
def test_values_and_gradients_are_those_of_the_formula(d, m, layers, copies, points, gen):
    chain = run(layers, d, m, copies, gen)
    z, weights = torch.randn(2, *copies, points, 2 * d, generator=gen)
    exact = gradients(plain(chain), z.double(), weights.double())
    rounded = gradients(plain(chain, torch.float32), z, weights)
    names = ["y", "z", *(name for name, _ in chain.named_parameters())]
    for name, ours, formula, value in zip(names, gradients(chain, z, weights), rounded, exact, strict=True):
        # Sums of m and of `points` numbers, layer after layer. Their rounding depends on the weights: what
        # the formula loses in float32 says how much, up to luck; 30 eps of the norm is the least that is
        # asked for.
        assert off(ours, value) <= max(30 * EPS, 8 * off(formula, value)), name


def test_a_run_that_begins_with_p(gen):
    chain = use(Chain([GradientP(4, 10, generator=gen), GradientQ(4, 10, generator=gen)]))
    z, weights = torch.randn(2, 20, 4, generator=gen)
    for ours, value in zip(
        gradients(chain, z, weights), gradients(plain(chain), z.double(), weights.double()), strict=True
    ):
        assert off(ours, value) <= 30 * EPS


def test_runs(gen):
    """Layers of one size that take turns are one run; others are not."""
    Q, P = (lambda m=6: GradientQ(4, m, generator=gen)), (lambda m=6: GradientP(4, m, generator=gen))
    layers = [Q(), P(), Q(), Q(), P(5), PSD(4, 2, generator=gen), GradientQ(2, 6, generator=gen)]
    chain = use(Chain(layers))
    assert compiled.runs(chain.layers) == [layers[:3], layers[3:4], layers[4:5], layers[5:6], layers[6:]]
    z, weights = torch.randn(9, 4, generator=gen), torch.randn(9, 2, generator=gen)
    for ours, value in zip(
        gradients(chain, z, weights), gradients(plain(chain), z.double(), weights.double()), strict=True
    ):
        assert off(ours, value) <= 30 * EPS


def test_tanh():
    """One layer with K = a = 1, b = 0 at x = 0 is tanh: all binades, both signs, what is 1, infinite, or no
    number."""
    layer = use(Chain([GradientQ(2, 1)]))
    with torch.no_grad():
        layer.layers[0].weight.fill_(1)
        layer.layers[0].scale.fill_(1)
        x = torch.cat([torch.logspace(-37, 2, 40001), torch.linspace(0, 10, 40001)])
        x = torch.cat([x, -x])
        y = layer(torch.stack([torch.zeros_like(x), x], -1))[:, 0]
        exact = x.double().tanh()
        assert bool(((y - exact).abs() <= 1.5e-7 * exact.abs()).all())  # 2.4 ulp by a scan of floats
        assert float(y.abs().max()) == 1.0
        edge = torch.tensor([torch.inf, -torch.inf, torch.nan, 0.0])
        y = layer(torch.stack([torch.zeros(4), edge], -1))[:, 0]
        assert y[:2].tolist() == [1, -1]
        assert y.isnan().tolist() == [False, False, True, False]


def test_no_points_and_strided_halves(gen):
    chain = run(3, 2, 5, (3,), gen)
    assert chain(torch.zeros(3, 0, 4)).shape == (3, 0, 4)
    x = torch.randn(3, 20, 4, generator=gen).mT  # features first, but not as they lie in memory
    y = torch.cat(chain.features_first(*x.chunk(2, 1)), 1)
    assert torch.equal(y, torch.cat(chain.features_first(*x.contiguous().chunk(2, 1)), 1))


# -- the network ---------------------------------------------------------------------------------------------


def network(gen, **options):
    return use(SymplecticAutoencoder(8, 2, 4, 2, **SMALL, copies=(3,), generator=gen, **options))


def test_threads_do_not_change_bits(gen):
    model = network(gen)
    z, weights = torch.randn(2, 3, 37, 8, generator=gen)
    before = torch.get_num_threads()
    try:
        made = []
        for threads in (1, 2, 3, 5):
            torch.set_num_threads(threads)
            # PSD layers are torch's, whose bits may depend on the threads: the runs alone
            made.append(gradients(use(Chain(list(model.encoder.layers)[:3])), z, weights))
    finally:
        torch.set_num_threads(before)
    for other in made[1:]:
        assert all(torch.equal(a, b) for a, b in zip(made[0], other, strict=True))


@pytest.mark.parametrize("name", ["forward", "backward"])
def test_parameters_are_kept_while_threads_use_them(name, gen, monkeypatch):
    """Also if we are interrupted while they run, and once more while we wait for them."""
    library, addresses = compiled.library(2), compiled.addresses
    pool = parts.pool(1, parts.flushes())
    go, used, seen = threading.Event(), [], []

    class Interrupted:
        def __getattr__(self, key):
            return self.call if key == name else getattr(library, key)

        def call(self, *args):
            if threading.current_thread() is threading.main_thread():
                raise KeyboardInterrupt
            go.wait(20)
            seen.extend(t() is not None for t in used)

    def noted(tensors):
        used.extend(map(weakref.ref, tensors))
        return addresses(tensors)

    def again(waiting):
        raise KeyboardInterrupt

    def interrupt():
        used.clear()
        monkeypatch.setattr(compiled, "library", lambda d: Interrupted())
        monkeypatch.setattr(compiled, "addresses", noted)
        monkeypatch.setattr(parts, "wait", again)

    def go_on():
        x = torch.randn(3, 2, 5, generator=gen)
        w = [
            torch.randn(*shape, 2, generator=gen)[..., 0].requires_grad_()
            for shape in ((3, 4, 2), (3, 4), (3, 4))
        ]
        if name == "forward":
            interrupt()
        y, _ = compiled.kicks(x, x, w)  # what is not contiguous is copied, and the copies are its own
        interrupt()
        y.sum().backward()

    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with contextlib.suppress(KeyboardInterrupt):
            go_on()
            pytest.fail("it was not interrupted")
    finally:
        torch.set_num_threads(before)
    gc.collect()
    go.set()
    pool.submit(int).result(20)  # after the part that was waiting
    assert seen == [True] * {"forward": 3, "backward": 6}[name]


def test_a_copy_has_the_bits_of_the_network_alone(gen):
    many = run(4, 2, 6, (3,), gen)
    z = torch.randn(3, 21, 4, generator=gen)
    for i in range(3):
        one = run(4, 2, 6, (), gen)
        one.load_state_dict({name: p[i] for name, p in many.state_dict().items()})
        assert torch.equal(many(z)[i], one(z[i]))


def test_symplecticity_of_a_compiled_model(gen):
    model = network(gen)
    for part, dim in ((model.encoder, 8), (model.decoder, 2)):
        z = torch.randn(4, dim, generator=gen)
        M, exact = jacobian(part, z), jacobian(plain(part), z.double())
        assert off(M, exact) <= 100 * EPS  # 12 and 9 layers
        defect = symplecticity(part, z)
        assert defect.shape == (3,)
        assert float(defect.max()) <= 100 * EPS * max(1.0, float(exact.square().sum((-2, -1)).max()))
        assert used(part)


def test_training_stays_close_to_the_formula(gen):
    ours = network(gen)
    theirs = plain(ours, torch.float32)
    z = torch.randn(3, 32, 8, generator=gen)
    errors = []
    for model in (ours, theirs):
        opt = ghor.optim.Adam(model, lr=1e-3)
        for _ in range(20):
            opt.zero_grad()
            error = (model(z) - z).square().mean((-2, -1))
            error.sum().backward()
            opt.step()
        errors.append(error.detach())
    torch.testing.assert_close(*errors, rtol=1e-3, atol=0)
    # Adam turns gradients that are rounding into steps of lr: no more than its 20 of them, and few of these
    pairs = zip(ours.parameters(), theirs.parameters(), strict=True)
    apart = torch.cat([(p - q).detach().abs().flatten() for p, q in pairs])
    assert float(apart.max()) <= 20 * 1e-3
    assert float(apart.median()) <= 1e-5


def test_frozen_layers_and_inputs(gen):
    """Gradients of some parameters only."""
    chain = run(4, 2, 6, (), gen)
    whole = gradients(
        chain, z := torch.randn(9, 4, generator=gen), weights := torch.randn(9, 4, generator=gen)
    )
    chain.layers[1].requires_grad_(False)
    chain.zero_grad()
    (chain(z) * weights).sum().backward()
    for p, g in zip(chain.parameters(), whole[2:], strict=True):
        assert torch.equal(p.grad, g) if p.requires_grad else p.grad is None


def test_it_can_be_copied_saved_and_set(gen, tmp_path):
    model = network(gen)
    z = torch.randn(5, 8, generator=gen)
    torch.save(model, tmp_path / "model.pt")
    for other in (copy.deepcopy(model), torch.load(tmp_path / "model.pt", weights_only=False)):
        assert used(other)
        assert torch.equal(other(z), model(z))
    assert not used(SymplecticAutoencoder())


# -- what it does not take -----------------------------------------------------------------------------------


def assert_close(ours, theirs):
    for mine, right in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, right, rtol=0, atol=100 * EPS * float(right.detach().abs().max()))


def pair(gen, copies=(), layers=3):
    """A run with the compiled layers, and the same without."""
    chain = run(layers, 2, 5, copies, gen)
    return chain, plain(chain, torch.float32)


@pytest.mark.parametrize("layers", [1, 2, 3])
@pytest.mark.parametrize("copies", [(), (3,)])
def test_differentiated_twice_it_is_the_formula(copies, layers, gen):
    def second(model, z):
        z = z.detach().requires_grad_()
        first = torch.autograd.grad(model(z).pow(3).sum(), (z, *model.parameters()), create_graph=True)
        return [*first, *torch.autograd.grad(sum(g.square().sum() for g in first), (z, *model.parameters()))]

    chain, _ = pair(gen, copies, layers)
    z = torch.randn(*copies, 6, 4, generator=gen)
    for ours, exact in zip(second(chain, z), second(plain(chain), z.double()), strict=True):
        assert off(ours.detach(), exact.detach()) <= 100 * EPS


def test_differentiated_twice_with_frozen_layers(gen):
    chain, formula = pair(gen)
    z, made = torch.randn(6, 4, generator=gen), []
    for model in (chain, formula):
        model.layers[0].requires_grad_(False)
        wanted = list(model.layers[1].parameters())
        first = torch.autograd.grad(model(z).pow(3).sum(), wanted, create_graph=True)
        made.append(torch.autograd.grad(first[0].square().sum(), wanted))
    assert_close(*made)


def backward_passes(gen):
    """Cotangents, and the backward pass of the compiled layers and of the formula, both run forward as they
    are."""
    z = torch.randn(6, 4, generator=gen)

    def of(model):
        x = z.clone().requires_grad_()
        y, wanted = model(x), (x, *model.parameters())
        return lambda dy, **options: torch.autograd.grad(y, wanted, dy, retain_graph=True, **options)

    return torch.randn(3, 6, 4, generator=gen), [of(model) for model in pair(gen)]


def test_backward_for_a_batch_of_gradients(gen):
    dys, (ours, theirs) = backward_passes(gen)
    right = theirs(dys, is_grads_batched=True)
    assert_close(ours(dys, is_grads_batched=True), right)
    assert_close(torch.func.vmap(ours)(dys), right)
    z = torch.randn(2, 4, generator=gen)
    assert_close(*([torch.autograd.functional.jacobian(model, z, vectorize=True)] for model in pair(gen)))


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # of what makes fake tensors
def test_backward_that_is_traced(gen):
    """With fake tensors, whose numbers are nowhere, and as a graph."""
    dys, (ours, theirs) = backward_passes(gen)
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert [g.shape for g in ours(dys[0])] == [g.shape for g in theirs(dys[0])]
    assert_close(make_fx(ours)(dys[0])(dys[1]), theirs(dys[1]))


def test_backward_with_autocast_is_in_float32(gen):
    dys, (ours, theirs) = backward_passes(gen)
    right = theirs(dys[0])
    with torch.autocast("cpu", torch.bfloat16):
        found = ours(dys[0])
    assert_close(found, right)


def fake(model, z):
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        y = model(mode.from_tensor(z))
    return torch.tensor(y.shape)


def dual(model, z):
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(model(forward_ad.make_dual(z, z + 1))).tangent


def autocast(model, z):
    with torch.autocast("cpu", torch.bfloat16):
        return model(z)


class Mine(torch.Tensor):
    pass


@pytest.mark.filterwarnings(
    "ignore:.torch.jit.*:DeprecationWarning"
)  # of torch's own forward mode, and of tracing
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")  # of the check of the shape
@pytest.mark.parametrize(
    ("use", "why"),
    [
        (fake, "FakeTensor|dispatch mode"),
        (dual, "forward mode"),
        (autocast, "autocast is on|bfloat16"),
        (lambda model, z: model(z.as_subclass(Mine)), "not Mine"),
        (lambda model, z: make_fx(model)(z)(z + 1), "tracer or dispatch mode"),
        (lambda model, z: torch.jit.trace(model, z, check_trace=False)(z + 1), "tracer or dispatch mode"),
        (lambda model, z: torch.func.vmap(model)(z.expand(3, 6, 4)), r"torch\.func"),
        (lambda model, z: torch.func.grad(lambda z: model(z).square().sum())(z), r"torch\.func"),
        (lambda model, z: torch.func.jvp(model, (z,), (z + 1,))[1], r"torch\.func"),
    ],
    ids=["fake", "dual", "autocast", "subclass", "make_fx", "trace", "vmap", "grad", "jvp"],
)
def test_where_operations_of_torch_are_needed_it_is_the_formula(use, why, gen):
    chain, formula = pair(gen)
    z = torch.randn(6, 4, generator=gen)
    with pytest.warns(UserWarning, match=f"compiled gradient layers are not used: .*({why})"):
        ours = use(chain, z)
    right = use(formula, z)
    assert type(ours) is type(right)
    assert torch.equal(ours, right)
    chain(z)  # warnings are errors: nothing is said
    assert chain.formula.unused is None


def test_a_weight_changed_before_the_backward_pass_is_noticed(gen):
    chain = run(2, 2, 5, (), gen)
    y = chain(torch.randn(6, 4, generator=gen))
    with torch.no_grad():
        chain.layers[0].weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize("dims", [(4, 2), (36, 34)])
def test_the_formula_is_used_with_a_warning(dims, gen):
    dtype, why = (
        (F64, "float32 on the CPU, not float64 on cpu") if dims == (4, 2) else (None, "at most 16 dimensions")
    )
    model = use(SymplecticAutoencoder(*dims, **SMALL, generator=gen, dtype=dtype))
    z = torch.randn(5, dims[0], dtype=dtype, generator=gen)
    with pytest.warns(UserWarning, match=f"compiled gradient layers are not used: it is for .*{why}"):
        y = model(z)
    assert why in model.encoder.formula.unused
    assert torch.equal(y, plain(model, z.dtype)(z))
    with warnings.catch_warnings():  # said once, and no longer true in float32
        warnings.simplefilter("error")
        model(z)
        if dims == (4, 2):
            model.float()(z.float())
            assert model.encoder.formula.unused is None


def test_without_a_compiler(gen, monkeypatch, tmp_path):
    def none():
        raise RuntimeError("there is no C compiler")

    clear()
    monkeypatch.setenv("GHOR_CACHE", str(tmp_path))
    monkeypatch.setattr(build, "_compiler", none)
    chain, z = run(2, 2, 5, (), gen), torch.randn(5, 4, generator=gen)
    with pytest.warns(UserWarning, match="not used: .*there is no C compiler"):
        y = chain(z)
    assert torch.equal(y, plain(chain, torch.float32)(z))
    clear()


def test_kicks_refuses_what_does_not_fit(gen):
    x, w = torch.zeros(3, 2, 5), [torch.zeros(3, 4, 2), torch.zeros(3, 4), torch.zeros(3, 4)]
    for halves, parameters, words in [
        ((x, x[..., 1:]), w, "expected two of"),
        ((x, x), w[:2], "and 2 parameters"),
        ((x, x), [w[0], w[1], torch.zeros(3, 5)], r"parameter 2 is \(3, 5\), not of 3 copies, width 4"),
        ((x, x), [torch.zeros(3, 4, 3), *w[1:]], r"parameter 0 is \(3, 4, 3\), not of .* and 2 dimensions"),
        ((x, x), [w[0], w[1].double(), w[2]], "not float64"),
        ((x.double(), x), w, "not float64"),
    ]:
        with pytest.raises(ValueError, match=words):
            compiled.kicks(*halves, parameters)

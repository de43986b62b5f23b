"""The compiled block against the formula in float64; what it does with what it does not take."""

import contextlib
import copy
import gc
import math
import os
import re
import shutil
import signal
import stat
import threading
import time
import warnings
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.modules.module import register_module_forward_hook
from torch.utils.flop_counter import FlopCounterMode

import ghor
from ghor.nn import StiefelAttention, VisionTransformer, attention, fused
from ghor.nn.vision_transformer import Block

# heads, features of a head, tokens; for each one file is compiled
SIZES = [(7, 7, 16), (2, 3, 4), (3, 5, 8), (2, 7, 32)]
TINY = (2, 1, 4)
ULP = 2**-23

pytestmark = pytest.mark.skipif(
    not (os.environ.get("CC") or any(map(shutil.which, ("cc", "gcc", "clang")))), reason="there is no C compiler"
)


def clear() -> None:
    fused.library.cache_clear()
    fused.missing.cache_clear()


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    """A cache folder of our own, with the libraries of SIZES; they are compiled two at a time."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GHOR_CACHE", str(folder))
        clear()
        with ThreadPoolExecutor(2) as workers:
            list(workers.map(lambda size: fused.library(*size), [*SIZES, TINY]))
        yield folder
    clear()


@pytest.fixture
def empty(tmp_path, monkeypatch):
    """An empty cache folder, and nothing remembered."""
    monkeypatch.setenv("GHOR_CACHE", str(tmp_path / "cache"))
    clear()
    yield tmp_path / "cache"
    clear()


def exact(heads: int, x: Tensor, M: Tensor, A: Tensor | None = None, b: Tensor | None = None) -> Tensor:
    """z = concat_h softmax(Q_h^T K_h) V_h with [Q; K; V] = M x, and z + tanh(A z + b) with A and b."""
    Q, K, V = (M @ x).unflatten(1, (3, heads, -1)).unbind(1)  # (batch, heads, features, tokens)
    P = torch.softmax(torch.einsum("bhfi,bhfj->bhij", Q, K), -1)
    z = torch.einsum("bhij,bhfj->bhfi", P, V).flatten(1, 2)
    return z if A is None or b is None else z + torch.tanh(A @ z + b[:, None])


def compiled(heads: int, *inputs: Tensor) -> Tensor:
    return fused.block(attention.formula, heads, *inputs)


def with_gradients(block, heads: int, inputs: list[Tensor], dy: Tensor) -> list[Tensor]:
    """The output, and the gradients of sum(output * dy)."""
    inputs = [t.detach().requires_grad_() for t in inputs]
    y = block(heads, *inputs)
    y.backward(dy)
    return [y.detach(), *(t.grad for t in inputs)]


def inputs(heads: int, features: int, tokens: int, batch: int, gen, alone: bool = False) -> tuple[list[Tensor], Tensor]:
    """x, M and, unless the attention is alone, A and b; dy."""
    D = heads * features
    x, dy = torch.randn(2, batch, D, tokens, generator=gen)
    M, A, b = (torch.randn(*shape, generator=gen) for shape in ((3 * D, D), (D, D), (D,)))
    return [x, M / D**0.5, *(() if alone else (A / D**0.5, b))], dy


def double(inputs: list[Tensor]) -> list[Tensor]:
    return [t.double() for t in inputs]


def copied(x: Tensor) -> list[Tensor]:
    """x, and M with which Q, K and V are x itself."""
    return [x, torch.eye(x.shape[1]).repeat(3, 1)]


def off(found: Tensor, right: Tensor) -> float:
    return float((found.detach().double() - right.detach()).norm() / right.detach().norm())


def assert_same_bits(a, b):
    for x, y in zip(a, b, strict=True):
        assert torch.equal(x.view(torch.int32), y.view(torch.int32))


# -- numbers -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize("batch", [1, 3, 4, 9])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_it_is_the_formula(sizes, batch, alone, gen):
    for size in (0.1, 1.0, 3.0):
        given, dy = inputs(*sizes, batch, gen, alone)
        given[0] *= size
        right = with_gradients(exact, sizes[0], double(given), dy.double())
        plain = with_gradients(attention.formula, sizes[0], given, dy)
        ours = with_gradients(compiled, sizes[0], given, dy)
        for mine, theirs, value in zip(ours, plain, right, strict=True):
            # Scores are rounded by their size, which exp makes the relative error of a probability, and differences of
            # gradients cancel: what the formula loses in float32 says how much, up to luck.
            assert off(mine, value) <= max(8 * ULP, 5 * off(theirs, value))


def test_batches_that_are_shared_unevenly(gen):
    """33 chunks of 64 images, the last with one; then one chunk for each four images, the last with three."""
    for batch in (2049, 95):
        given, dy = inputs(*SIZES[0], batch, gen)
        right = with_gradients(exact, 7, double(given), dy.double())
        plain = with_gradients(attention.formula, 7, given, dy)
        for mine, theirs, value in zip(with_gradients(compiled, 7, given, dy), plain, right, strict=True):
            assert off(mine, value) <= max(8 * ULP, 3 * off(theirs, value))


def test_layers_and_networks_are_the_same_with_it(gen):
    x, images = torch.randn(3, 16, 49, generator=gen), torch.rand(3, 28, 28, generator=gen)
    for make, given in (
        (lambda **o: StiefelAttention(49, 7, **o), x),
        (lambda **o: VisionTransformer(blocks=3, **o), images),
    ):
        results = []
        for option in (False, True):
            model = make(fused=option, generator=torch.Generator().manual_seed(1))
            out = model(given)
            out.square().sum().backward()
            results.append([out.detach(), *(p.grad for p in model.parameters())])
        for plain, compiled in zip(*results, strict=True):
            # three blocks of 49-term sums, each rounded at ULP
            torch.testing.assert_close(compiled, plain, rtol=0, atol=50 * ULP * float(plain.abs().max()))


def test_tanh():
    """With M = 0 the block is tanh(b): all binades, both signs, what is 1, infinite, or no number."""
    D = 49
    x = torch.cat([torch.logspace(-37, 2, 100 * D), torch.linspace(0, 10, 100 * D)])
    zeros = torch.zeros(1, D, 16), torch.zeros(3 * D, D), torch.zeros(D, D)
    for b in torch.cat([x, -x]).split(D):
        y = compiled(7, *zeros, b)[0, :, 3]
        right = b.double().tanh()
        assert bool(((y - right).abs() <= 2.5 * ULP * right.abs()).all())
        assert bool((y.abs() <= 1).all())
    b[:4] = torch.tensor([torch.inf, -torch.inf, torch.nan, 0.0])
    y = compiled(7, *zeros, b)[0, :, 3]
    assert y[:2].tolist() == [1, -1]
    assert y.isnan().nonzero().flatten().tolist() == [2]


def test_huge_scores_do_not_overflow(gen):
    given, dy = inputs(*SIZES[0], 3, gen, alone=True)
    given = copied(given[0].mul(20).round())  # whole numbers: the scores, up to 1e4, are exact in float32
    right = with_gradients(exact, 7, double(given), dy.double())
    plain = with_gradients(attention.formula, 7, given, dy)
    for mine, theirs, value in zip(with_gradients(compiled, 7, given, dy), plain, right, strict=True):
        assert off(mine, value) <= max(8 * ULP, 3 * off(theirs, value))
    given[0] *= 1e17  # up to 1e38: every query sees its largest key alone
    assert all(t.isfinite().all() for t in with_gradients(compiled, 7, given, dy))


@pytest.mark.parametrize("place", [0, 1, 2, 3], ids="xMAb".__getitem__)
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_what_is_no_number_stays_none(place, value, gen):
    """As in the plain formula in float32, forward and backward."""
    given, dy = inputs(*SIZES[0], 3, gen)
    given[place].view(-1)[5] = value
    plain = with_gradients(exact, 7, given, dy)
    for mine, theirs in zip(with_gradients(compiled, 7, given, dy), plain, strict=True):
        assert torch.equal(mine.isfinite(), theirs.isfinite())
        if math.isnan(value):
            assert torch.equal(mine.isnan(), theirs.isnan())


def test_scores_beyond_float32_are_no_numbers():
    """All of them -inf, or all of them inf: the softmax does not exist."""
    for sign in (-1, 1):
        x, M = copied(torch.full((1, 6, 4), 1e30))
        M[6:12] *= sign
        assert compiled(2, x, M).isnan().all()


def test_an_empty_batch(gen):
    given, dy = inputs(*SIZES[0], 0, gen)
    results = with_gradients(compiled, 7, given, dy)
    assert [t.shape for t in results] == [dy.shape, *(t.shape for t in given)]
    assert not any(t.any() for t in results)
    assert StiefelAttention(49, 7, fused=True)(torch.empty(0, 16, 49)).shape == (0, 16, 49)
    assert VisionTransformer(fused=True)(torch.empty(0, 28, 28)).shape == (0, 10)


def test_memory_in_another_order(gen):
    given, dy = inputs(*SIZES[0], 3, gen)
    right = with_gradients(compiled, 7, given, dy)
    turned = [t.T.contiguous().T if t.dim() == 2 else torch.stack([t, t], -1)[..., 1] for t in given]
    assert not any(t.is_contiguous() for t in turned)
    assert_same_bits(with_gradients(compiled, 7, turned, dy.mT.contiguous().mT), right)
    features_first = [given[0].transpose(0, 1).contiguous().transpose(0, 1), *given[1:]]
    assert_same_bits(with_gradients(compiled, 7, features_first, dy), right)
    one = torch.ones(()).expand(dy.shape)  # what sum() sends back
    results = (with_gradients(compiled, 7, given, ones) for ones in (one, one.contiguous()))
    assert_same_bits(*results)


def test_another_default_dtype(gen):
    given, dy = inputs(*SIZES[0], 3, gen)
    right = with_gradients(compiled, 7, given, dy)
    torch.set_default_dtype(torch.float64)
    try:
        assert_same_bits(with_gradients(compiled, 7, given, dy), right)
    finally:
        torch.set_default_dtype(torch.float32)


def test_gradients_of_some(gen):
    """Frozen weights, and an input that needs no gradient."""
    given, dy = inputs(*SIZES[0], 5, gen)
    _, *whole = with_gradients(compiled, 7, given, dy)
    for wanted in range(4):
        some = [t.detach().requires_grad_(i == wanted) for i, t in enumerate(given)]
        compiled(7, *some).backward(dy)
        assert_same_bits([some[wanted].grad], [whole[wanted]])
        assert sum(t.grad is not None for t in some) == 1


@pytest.mark.parametrize("alone", [False, True])
def test_differentiated_twice_it_is_the_formula(alone, gen):
    def second(block, given, dy):
        given = [t.detach().requires_grad_() for t in given]
        y = block(2, *given)
        y = block(2, y, *given[1:])  # the weights are also before the second block's input
        first = torch.autograd.grad((y * dy).sum(), given, create_graph=True)
        return [*first, *torch.autograd.grad(sum(g.square().sum() for g in first), given)]

    given, dy = inputs(*SIZES[1], 3, gen, alone)
    for mine, value in zip(second(compiled, given, dy), second(exact, double(given), dy.double()), strict=True):
        assert off(mine, value) <= 100 * ULP  # two blocks, and the squares of what they give


def test_a_weight_changed_before_the_backward_pass_is_noticed(gen):
    given, _ = inputs(*SIZES[1], 3, gen)
    given[1].requires_grad_()
    y = compiled(2, *given)
    given[2].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_what_does_not_fit_is_refused(gen):
    x, M, A, b = inputs(*SIZES[1], 3, gen)[0]
    for heads, given, words in (
        (4, (x, M), r"expected \(batch, 4 \* features, tokens\), got \(3, 6, 4\)"),
        (0, (x, M), r"expected \(batch, 0 \* "),
        (2, (x[0], M), r"got \(6, 4\)"),
        (2, (x, M[1:]), r"expected M \(18, 6\) for 6 features, got \(17, 6\)"),
        (2, (x, M, A[:, 1:], b), r"expected A \(6, 6\) for 6 features, got \(6, 5\)"),
        (2, (x, M, A, b[1:]), r"expected b \(6,\) for 6 features, got \(5,\)"),
        (2, (x, M, A), "A and b come together"),
        (2, (x.double(), M), "not float64 on cpu"),
        (2, (x, M, A, b.double()), "not float64 on cpu"),
    ):
        with pytest.raises(ValueError, match=words):
            compiled(heads, *given)


# -- threads -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize("batch", [1, 3, 50, 300])
def test_any_number_of_threads_gives_the_same_bits(batch, threads, gen):
    given, dy = inputs(*SIZES[0], batch, gen)
    results = []
    for count in (1, 2, 2, 3, 8):
        threads(count)
        results.append(with_gradients(compiled, 7, given, dy))
    for other in results[1:]:
        assert_same_bits(other, results[0])


def test_an_image_has_the_same_bits_in_any_batch(gen):
    given, dy = inputs(*SIZES[0], 9, gen)
    y, dx, *_ = with_gradients(compiled, 7, given, dy)
    for i in (0, 3, 8):
        one = with_gradients(compiled, 7, [given[0][i:][:1], *given[1:]], dy[i:][:1])
        assert_same_bits(one[:2], [y[i:][:1], dx[i:][:1]])


def test_threads_flush_subnormals_as_their_caller_does(threads, gen):
    """It is a setting of every thread: also those that were there before it changed have to follow."""
    given = copied(inputs(*SIZES[0], 4, gen)[0][0] * 1e-39)  # so is the output
    kept = {}
    try:
        for flush in (False, True, False):
            if not torch.set_flush_denormal(flush):
                pytest.skip("this processor has no such setting")
            for count in (1, 2, 3):
                threads(count)
                y = compiled(7, *given)
                assert_same_bits([y], [kept.setdefault(flush, y)])
    finally:
        torch.set_flush_denormal(False)
    assert kept[False].ne(0).any()
    assert kept[True].view(torch.int32).bitwise_and(0x7FFFFFFF).eq(0).all()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
def test_it_works_after_a_fork(threads, gen):
    """The child has none of its parent's threads; without threads of its own it would wait for ever."""
    given, _ = inputs(*SIZES[0], 4, gen)
    threads(2)
    right = compiled(7, *given)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forking beside threads, which is the point
        child = os.fork()
    if child == 0:
        signal.alarm(20)
        same = compiled(7, *given).tolist() == right.tolist()
        os._exit(0 if same else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_an_interrupt_waits_for_the_threads(threads):
    threads(2)
    done = []

    def call(b0, b1):
        if b0 == 0:
            raise KeyboardInterrupt
        time.sleep(0.2)
        done.append(b1)

    with pytest.raises(KeyboardInterrupt):
        fused.in_parts(call, 2)
    assert done == [2]


@pytest.mark.parametrize("accepted", [0, 1])
def test_parts_that_no_thread_takes_are_ours(accepted, threads, monkeypatch):
    """When the interpreter shuts down the pool takes no more, perhaps after it has taken some."""
    threads(3)
    done = []

    class Closing(ThreadPoolExecutor):
        def submit(self, *args):
            if len(taken) == accepted:
                self.shutdown()
            taken.append(args)
            return super().submit(*args)

    taken, pool = [], Closing(2)
    monkeypatch.setattr(fused, "pool", lambda *settings: pool)
    fused.in_parts(lambda b0, b1: done.append((b0, b1)), 6)
    assert sorted(done) == [(0, 2), (2, 4), (4, 6)]


def test_other_errors_of_the_pool_are_raised(threads, monkeypatch):
    class Full:
        def submit(self, *args):
            raise RuntimeError("can't start new thread")

    threads(2)
    monkeypatch.setattr(fused, "pool", lambda *settings: Full())
    with pytest.raises(RuntimeError, match="can't start new thread"):
        fused.in_parts(lambda b0, b1: None, 2)


@pytest.mark.parametrize("name", ["forward", "backward"])
def test_memory_is_kept_while_threads_use_it(name, threads, gen, monkeypatch):
    """Also if we are interrupted once more while we wait for them."""
    threads(2)
    library, pool = fused.library(*SIZES[0]), fused.pool(1, fused.flushes())
    go, used, seen = threading.Event(), [], []

    class Interrupted:
        def __getattr__(self, key):
            return self.call if key == name else getattr(library, key)

        def call(self, *args):
            if threading.current_thread() is threading.main_thread():
                raise KeyboardInterrupt
            go.wait(20)
            seen.extend(t() is not None for t in used)

    def address(t):
        if t is not None and threading.current_thread() is not threading.main_thread():
            used.append(weakref.ref(t))
        return 0

    def again(waiting):
        raise KeyboardInterrupt

    def interrupt():
        monkeypatch.setattr(fused, "library", lambda *sizes: Interrupted())
        monkeypatch.setattr(fused, "address", address)
        monkeypatch.setattr(fused, "wait", again)

    def run():
        given, dy = inputs(*SIZES[0], 8, gen)
        given = [torch.stack([t, t], -1)[..., 0].requires_grad_() for t in given]  # copied, and the copies ours
        if name == "forward":
            interrupt()
        y = compiled(7, *given)
        interrupt()
        y.backward(torch.stack([dy, dy], -1)[..., 0])

    with contextlib.suppress(KeyboardInterrupt):
        run()
        pytest.fail("it was not interrupted")
    gc.collect()
    go.set()
    pool.submit(int).result(20)  # after the part that was waiting
    assert seen == [True] * {"forward": 6, "backward": 8}[name]


# -- where it cannot be had --------------------------------------------------------------------------------------------


def assert_plain(layer: StiefelAttention, x: Tensor, reason: str) -> None:
    """The layer says why it does not use the compiled block, once, and gives what a layer without it gives."""
    with pytest.warns(UserWarning, match=f"fused attention is not used: .*{reason}"):
        y = layer(x)
    plain = StiefelAttention(layer.dim, layer.heads, dtype=x.dtype)
    plain.load_state_dict(layer.state_dict())
    assert torch.equal(y, plain(x))
    assert torch.equal(layer(x), y)  # warnings are errors: it says nothing now
    assert re.search(reason, layer.unfused)


def tiny() -> tuple[StiefelAttention, Tensor]:
    heads, features, tokens = TINY
    return StiefelAttention(heads * features, heads, fused=True), torch.ones(3, tokens, heads * features)


def script(path, text: str):
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def test_the_layer_shows_whether_it_is_fused():
    assert "fused=True" in repr(StiefelAttention(49, 7, fused=True))
    assert "fused=False" in repr(StiefelAttention(49, 7))


@pytest.mark.parametrize(
    ("dtype", "tokens", "features", "reason"),
    [
        (torch.float64, 16, 7, "float32 on the CPU, not float64 on cpu"),
        (torch.float32, 7, 7, "not 7 tokens and 14 features, 7 of them a head"),
        (torch.float32, 2, 7, "not 2 tokens"),
        (torch.float32, 128, 7, "not 128 tokens"),
        (torch.float32, 16, 65, "at most 128 features, 64 of them a head, not 16 tokens and 130 features, 65 of"),
    ],
)
def test_what_it_does_not_take(dtype, tokens, features, reason, gen):
    layer = StiefelAttention(2 * features, 2, fused=True, dtype=dtype)
    assert_plain(layer, torch.randn(3, tokens, 2 * features, dtype=dtype, generator=gen), reason)


def test_every_call_decides(gen):
    layer, x = StiefelAttention(49, 7, fused=True), torch.randn(2, 16, 49, generator=gen)
    right = layer(x)
    assert layer.unfused is None
    for _ in range(2):
        with pytest.warns(UserWarning, match="not 7 tokens"):
            layer(x[:, :7])
        assert "not 7 tokens" in layer.unfused
        assert layer.fused
        assert torch.equal(layer(x), right)
        assert layer.unfused is None


def pair(gen, make=StiefelAttention) -> list:
    """A layer with the compiled block, and the same without."""
    layers = [make(6, 2, ghor.Stiefel(), "dim", fused) for fused in (True, False)]
    layers[0].reset_parameters(gen)
    layers[1].load_state_dict(layers[0].state_dict())
    return layers


def test_autocast_computes_as_it_does_without(gen):
    (layer, plain), x = pair(gen), torch.randn(2, 4, 6, generator=gen)
    with torch.autocast("cpu", torch.bfloat16), pytest.warns(UserWarning, match="autocast is on"):
        y, right = layer(x), plain(x)
    assert y.dtype == right.dtype == torch.bfloat16
    assert torch.equal(y, right)


@pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")  # of torch's own forward mode
def test_torch_func_and_forward_mode(gen):
    (layer, plain), (x, v) = pair(gen), torch.randn(2, 3, 4, 6, generator=gen)
    with pytest.warns(UserWarning, match=r"torch\.func and forward mode"):
        results = [
            [
                torch.func.vmap(f)(x),
                torch.func.grad(lambda x, f=f: f(x).square().sum())(x),
                *torch.func.jvp(f, (x,), (v,)),
                torch.autograd.functional.jvp(f, x, v)[1],
            ]
            for f in (layer, plain)
        ]
    for mine, theirs in zip(*results, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=8 * ULP * float(theirs.detach().abs().max()))


@pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")
def test_dual_numbers(gen):
    (layer, plain), (x, v) = pair(gen), torch.randn(2, 3, 4, 6, generator=gen)
    with forward_ad.dual_level(), pytest.warns(UserWarning, match="forward mode"):
        tangents = [forward_ad.unpack_dual(f(forward_ad.make_dual(x, v))).tangent for f in (layer, plain)]
    assert torch.equal(*tangents)


def test_what_watches_operations_sees_the_formula(gen):
    (layer, plain), x = pair(gen), torch.randn(2, 4, 6, generator=gen)
    counts = []
    for f, says in (layer, pytest.warns(UserWarning, match="watched or traced")), (plain, contextlib.nullcontext()):
        with says, FlopCounterMode(display=False) as counter:
            f(x).sum().backward()
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1] > 0


def test_a_tensor_subclass(gen):
    class Mine(Tensor):
        pass

    (layer, plain), x = pair(gen), torch.randn(2, 4, 6, generator=gen).as_subclass(Mine)
    with pytest.warns(UserWarning, match="not Mine"):
        y = layer(x)
    assert type(y) is Mine
    assert torch.equal(y, plain(x))


def test_sparse_tensors_are_refused():
    M = torch.eye(6).repeat(3, 1).to_sparse()
    with pytest.raises(ValueError, match="not for sparse tensors"):
        compiled(2, torch.ones(1, 6, 4), M)


def backward_passes(gen) -> tuple[list[Tensor], list]:
    """Cotangents, and the backward pass of the compiled block and of the formula, both run forward as they are."""
    given, dy = inputs(*SIZES[1], 3, gen)
    given = [t.requires_grad_() for t in given]
    dys = torch.stack([dy, 2 * dy.flip(0), dy.mT.reshape(dy.shape)])

    def of(y):
        return lambda dy, **options: torch.autograd.grad(y, given, dy, retain_graph=True, **options)

    return dys, [of(block(2, *given)) for block in (compiled, attention.formula)]


def assert_close(ours, theirs):
    for mine, right in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, right, rtol=0, atol=20 * ULP * float(right.abs().max()))  # sums of 12 terms


def test_backward_for_a_batch_of_gradients(gen):
    dys, (ours, theirs) = backward_passes(gen)
    right = theirs(dys, is_grads_batched=True)
    assert_close(ours(dys, is_grads_batched=True), right)
    assert_close(torch.func.vmap(ours)(dys), right)
    layer, plain = pair(gen)
    x = torch.randn(2, 4, 6, generator=gen)
    assert_close(*([torch.autograd.functional.jacobian(f, x, vectorize=True)] for f in (layer, plain)))


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # of what makes fake tensors
def test_backward_that_is_watched_or_traced(gen):
    """With fake tensors, whose numbers are nowhere; as a graph; and counted."""
    dys, (ours, theirs) = backward_passes(gen)
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert [g.shape for g in ours(dys[0])] == [g.shape for g in theirs(dys[0])]
    assert_close(make_fx(ours)(dys[0])(dys[1]), theirs(dys[1]))
    with FlopCounterMode(display=False) as counter:
        ours(dys[0])
    assert counter.get_total_flops() > 0


def test_backward_with_autocast_is_in_float32(gen):
    """The forward pass was: what is saved and what is computed again have to fit."""
    dys, (ours, theirs) = backward_passes(gen)
    right = theirs(dys[0])
    with torch.autocast("cpu", torch.bfloat16):
        found = ours(dys[0])
    assert_close(found, right)


def test_fake_tensors(gen):
    (layer, _), x = pair(gen), torch.randn(2, 4, 6, generator=gen)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, pytest.warns(UserWarning, match="FakeTensor|watched"):
        y = layer(mode.from_tensor(x))
    assert y.shape == x.shape


def test_compiled_graphs_have_the_formula(gen):
    """Whole, and without a word."""
    (block, plain), x = pair(gen, Block), torch.randn(3, 6, 4, generator=gen)
    y = torch.compile(block, backend="eager", fullgraph=True)(x)
    assert torch.equal(y, plain(x))
    assert not torch.equal(y, block(x))  # other rounding


@pytest.mark.parametrize("where", ["module", "pre", "backward", "global", "forward"])
def test_hooks_of_the_attention_in_a_block_are_called(where, gen):
    (block, plain), x = pair(gen, Block), torch.randn(3, 6, 4, generator=gen)
    inner, seen = block.attention, []

    def hook(module, *given):
        if module is inner:
            seen.append(given[0][0].shape)

    if where == "forward":  # as wrappers put another one into its place
        inner.forward = lambda x, f=inner.forward: hook(inner, (x,)) or f(x)
    else:
        handle = {
            "module": inner.register_forward_hook,
            "pre": inner.register_forward_pre_hook,
            "backward": inner.register_full_backward_hook,
            "global": register_module_forward_hook,
        }[where](hook)
    try:
        y = block(x.requires_grad_())
        y.sum().backward()
    finally:
        if where != "forward":
            handle.remove()
    assert seen == [(3, 4, 6)]
    torch.testing.assert_close(y, plain(x), rtol=0, atol=8 * ULP * float(y.detach().abs().max()))
    assert inner.unfused is None  # what is called is still the compiled attention


def test_it_can_be_copied_and_saved(gen, tmp_path):
    model, x = VisionTransformer(blocks=1, fused=True), torch.rand(2, 28, 28, generator=gen)
    torch.save(model, tmp_path / "model.pt")
    for other in (copy.deepcopy(model), torch.load(tmp_path / "model.pt", weights_only=False)):
        assert other.blocks[0].attention.fused
        assert torch.equal(other(x), model(x))


def test_without_a_compiler(empty, monkeypatch):
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert_plain(*tiny(), "there is no C compiler")


def test_with_a_compiler_that_is_not_there(empty, monkeypatch):
    monkeypatch.setenv("CC", "no-such-compiler -O1")
    assert_plain(*tiny(), "No such file.*no-such-compiler")
    clear()
    monkeypatch.setenv("CC", "'")
    assert_plain(*tiny(), "compiled or loaded: No closing quotation")


def test_with_a_compiler_that_fails(empty, monkeypatch, tmp_path):
    """The reason has the command and its words; the other layers of a network do not try again."""
    log = tmp_path / "log"
    text = f'echo run >> "{log}"; [ "$1" = --version ] && exit; echo out of ink >&2; exit 3'
    monkeypatch.setenv("CC", str(script(tmp_path / "broken", text)))
    for _ in range(3):
        assert_plain(*tiny(), "broken .*-DH=2 -DC=1 -DT=4.* failed: out of ink")
    assert log.read_text().split() == ["run", "run"]  # for its version, and to compile
    assert not empty.exists()


def test_with_a_compiler_that_makes_rubbish(empty, monkeypatch, tmp_path):
    rubbish = script(tmp_path / "rubbish", '[ "$1" = --version ] && exit; for last; do :; done; echo rubbish > "$last"')
    monkeypatch.setenv("CC", str(rubbish))
    assert_plain(*tiny(), "loaded: .*block-.*so")


def test_with_a_cache_that_cannot_be_written(empty):
    empty.write_text("a file where the folder should be")
    assert_plain(*tiny(), f"loaded: .*{empty}")


# -- the file that is kept ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("damage", ["cut", "changed"])
def test_a_damaged_library_is_made_again(damage, cache, empty, gen):
    """It is found out before it is loaded: to load half a library ends the process."""
    given, _ = inputs(*TINY, 2, gen)
    right = compiled(2, *given)
    (path,) = empty.iterdir()
    whole = path.read_bytes()
    clear()
    assert torch.equal(compiled(2, *given), right)  # found, and nothing is said
    middle = len(whole) // 2
    path.unlink()  # not in place: this process has it mapped
    path.write_bytes(whole[:middle] if damage == "cut" else whole[:middle] + b"?" + whole[middle + 1 :])
    clear()
    with pytest.warns(UserWarning, match=f"{path} was damaged: removed and made again"):
        again = compiled(2, *given)
    assert torch.equal(again, right)
    assert [p.read_bytes() for p in empty.iterdir()] == [whole]


def test_a_library_is_found_again(cache, monkeypatch):
    """Once compiled, the compiler is asked for its version only."""
    clear()
    commands = []
    run = fused._run
    monkeypatch.setattr(fused, "_run", lambda command: commands.append(command) or run(command))
    fused.library(*SIZES[0])
    assert [command[-1] for command in commands] == ["--version"]


def test_other_sizes_flags_and_processors_have_files_of_their_own(empty, monkeypatch):
    fused.library(*TINY)
    monkeypatch.setattr(fused, "processor", lambda: "another")
    clear()
    fused.library(*TINY)
    assert len(list(empty.iterdir())) == 2
    assert all(path.stat().st_mode & 0o022 == 0 for path in empty.iterdir())  # nobody else can change what we run


def test_a_compiler_with_arguments(empty, monkeypatch):
    monkeypatch.setenv("CC", f"{' '.join(fused._compiler())} -O1")
    assert fused.missing(*TINY) is None

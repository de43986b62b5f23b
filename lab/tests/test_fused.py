"""The compiled block against the formula in float64, on any number of threads."""

import contextlib
import gc
import math
import os
import signal
import threading
import time
import warnings
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from blocks import (  # noqa: F401
    COMPILER,
    SIZES,
    ULP,
    assert_same_bits,
    cache_folder,
    compiled,
    copied,
    double,
    empty_folder,
    exact,
    inputs,
    off,
    with_gradients,
)

from ghor_lab.compiled import attention, parts, use
from ghor_lab.networks import StiefelAttention, VisionTransformer
from ghor_lab.networks.attention import formula

pytestmark = COMPILER


# -- numbers -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize("batch", [1, 3, 4, 9])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_it_is_the_formula(sizes, batch, alone, gen):
    for size in (0.1, 1.0, 3.0):
        given, dy = inputs(*sizes, batch, gen, alone)
        given[0] *= size
        right = with_gradients(exact, sizes[0], double(given), dy.double())
        plain = with_gradients(formula, sizes[0], given, dy)
        ours = with_gradients(compiled, sizes[0], given, dy)
        for mine, theirs, value in zip(ours, plain, right, strict=True):
            # Scores are rounded by their size, which exp makes the relative error of a probability, and
            # differences of gradients cancel: what the formula loses in float32 says how much, up to luck.
            assert off(mine, value) <= max(8 * ULP, 5 * off(theirs, value))


def test_batches_that_are_shared_unevenly(gen):
    """33 chunks of 64 images, the last with one; then one chunk for each four images, the last with three."""
    for batch in (2049, 95):
        given, dy = inputs(*SIZES[0], batch, gen)
        right = with_gradients(exact, 7, double(given), dy.double())
        plain = with_gradients(formula, 7, given, dy)
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
            model = use(make(generator=torch.Generator().manual_seed(1)), option)
            out = model(given)
            out.square().sum().backward()
            results.append([out.detach(), *(p.grad for p in model.parameters())])
        for plain, fast in zip(*results, strict=True):
            # three blocks of 49-term sums, each rounded at ULP
            torch.testing.assert_close(fast, plain, rtol=0, atol=50 * ULP * float(plain.abs().max()))


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
    plain = with_gradients(formula, 7, given, dy)
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
    assert use(StiefelAttention(49, 7))(torch.empty(0, 16, 49)).shape == (0, 16, 49)
    assert use(VisionTransformer())(torch.empty(0, 28, 28)).shape == (0, 10)


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
    for mine, value in zip(
        second(compiled, given, dy), second(exact, double(given), dy.double()), strict=True
    ):
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


# -- threads -------------------------------------------------------------------------------------------------


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
        parts.in_parts(call, 2)
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
    monkeypatch.setattr(parts, "pool", lambda *settings: pool)
    parts.in_parts(lambda b0, b1: done.append((b0, b1)), 6)
    assert sorted(done) == [(0, 2), (2, 4), (4, 6)]


def test_other_errors_of_the_pool_are_raised(threads, monkeypatch):
    class Full:
        def submit(self, *args):
            raise RuntimeError("can't start new thread")

    threads(2)
    monkeypatch.setattr(parts, "pool", lambda *settings: Full())
    with pytest.raises(RuntimeError, match="can't start new thread"):
        parts.in_parts(lambda b0, b1: None, 2)


@pytest.mark.parametrize("name", ["forward", "backward"])
def test_memory_is_kept_while_threads_use_it(name, threads, gen, monkeypatch):
    """Also if we are interrupted once more while we wait for them."""
    threads(2)
    library, pool = attention.library(*SIZES[0]), parts.pool(1, parts.flushes())
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
        monkeypatch.setattr(attention, "library", lambda *sizes: Interrupted())
        monkeypatch.setattr(attention, "address", address)
        monkeypatch.setattr(parts, "wait", again)

    def run():
        given, dy = inputs(*SIZES[0], 8, gen)
        given = [
            torch.stack([t, t], -1)[..., 0].requires_grad_() for t in given
        ]  # copied, and the copies ours
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

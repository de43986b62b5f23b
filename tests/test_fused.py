"""The compiled attention against the formula in float64; what it does with what it does not take."""

import math
import os
import shutil
import signal
import stat
import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from ghor.nn import StiefelAttention, VisionTransformer, fused

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
            list(workers.map(lambda size: fused.library(*size[1:]), [*SIZES, TINY]))
        yield folder
    clear()


@pytest.fixture
def empty(tmp_path, monkeypatch):
    """An empty cache folder, and nothing remembered."""
    monkeypatch.setenv("GHOR_CACHE", str(tmp_path / "cache"))
    clear()
    yield tmp_path / "cache"
    clear()


def formula(QKV: Tensor, heads: int, tokens: int) -> Tensor:
    """concat_h softmax(Q_h^T K_h) V_h, features first."""
    Q, K, V = QKV.unflatten(0, (3, heads, -1)).unflatten(-1, (-1, tokens))  # (heads, features, batch, tokens)
    P = torch.softmax(torch.einsum("hfbi,hfbj->hbij", Q, K), -1)
    return torch.einsum("hbij,hfbj->hfbi", P, V).reshape(-1, QKV.shape[1])


def with_gradient(attend, QKV: Tensor, dO: Tensor, *sizes: int) -> tuple[Tensor, Tensor]:
    """The output, and the gradient of sum(output * dO)."""
    QKV = QKV.detach().requires_grad_()
    O = attend(QKV, *sizes)
    O.backward(dO)
    return O.detach(), QKV.grad


def inputs(heads: int, features: int, tokens: int, batch: int, gen) -> tuple[Tensor, Tensor]:
    D, columns = heads * features, batch * tokens
    return torch.randn(3 * D, columns, generator=gen), torch.randn(D, columns, generator=gen)


def assert_same_bits(a, b):
    for x, y in zip(a, b, strict=True):
        assert torch.equal(x.view(torch.int32), y.view(torch.int32))


# -- numbers -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [1, 2, 5])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_it_is_the_formula(sizes, batch, gen):
    heads, _, tokens = sizes
    for size in (0.1, 1.0, 3.0):
        QKV, dO = inputs(*sizes, batch, gen)
        QKV *= size
        ours = with_gradient(fused.attend, QKV, dO, heads, tokens)
        exact = with_gradient(formula, QKV.double(), dO.double(), heads, tokens)
        Q, K, _ = QKV.double().unflatten(0, (3, heads, -1)).unflatten(-1, (-1, tokens))
        score = float(torch.einsum("hfbi,hfbj->hbij", Q, K).abs().max())
        for mine, right in zip(ours, exact, strict=True):
            # a score s is rounded by |s| ulp, which exp makes the relative error of a probability; 4: of exp and sums
            atol = (4 + score) * ULP * float(right.abs().max())
            torch.testing.assert_close(mine.double(), right, rtol=0, atol=atol)


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


def test_huge_scores_do_not_overflow(gen):
    heads, features, tokens = SIZES[0]
    QKV, dO = inputs(*SIZES[0], 3, gen)
    QKV[: 2 * heads * features].mul_(20).round_()  # whole numbers: the scores, up to 1e4, are exact in float32
    ours = with_gradient(fused.attend, QKV, dO, heads, tokens)
    exact = with_gradient(formula, QKV.double(), dO.double(), heads, tokens)
    for mine, right in zip(ours, exact, strict=True):
        torch.testing.assert_close(mine.double(), right, rtol=0, atol=16 * ULP * float(right.abs().max()))
    QKV[: 2 * heads * features] *= 1e17  # up to 1e38: every query sees its largest key alone
    assert all(x.isfinite().all() for x in with_gradient(fused.attend, QKV, dO, heads, tokens))


@pytest.mark.parametrize("part", [0, 1, 2], ids="QKV".__getitem__)
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_what_is_no_number_stays_none(part, value, gen):
    """As in the plain formula in float32, forward and backward."""
    heads, features, tokens = SIZES[0]
    QKV, dO = inputs(*SIZES[0], 2, gen)
    QKV[part * heads * features + 1, 5] = value
    plain = with_gradient(formula, QKV, dO, heads, tokens)
    ours = with_gradient(fused.attend, QKV, dO, heads, tokens)
    assert plain[0].isfinite().logical_not().any()
    for mine, theirs in zip(ours, plain, strict=True):
        assert torch.equal(mine.isfinite(), theirs.isfinite())
        if math.isnan(value):
            assert torch.equal(mine.isnan(), theirs.isnan())


def test_scores_beyond_float32_are_no_numbers():
    """All of them -inf, or all of them inf: the softmax does not exist."""
    for sign in (-1, 1):
        QKV = torch.full((3 * 2, 4), 1e30)
        QKV[2:4] *= sign
        assert fused.attend(QKV, 2, 4).isnan().all()


def test_an_empty_batch(gen):
    heads, _, tokens = SIZES[0]
    O, dQKV = with_gradient(fused.attend, *inputs(*SIZES[0], 0, gen), heads, tokens)
    assert (O.shape, dQKV.shape) == ((49, 0), (147, 0))
    assert StiefelAttention(49, 7, fused=True)(torch.empty(0, 16, 49)).shape == (0, 16, 49)


def test_memory_in_another_order(gen):
    heads, _, tokens = SIZES[0]
    QKV, dO = inputs(*SIZES[0], 3, gen)
    right = with_gradient(fused.attend, QKV, dO, heads, tokens)
    assert_same_bits(with_gradient(fused.attend, QKV.T.contiguous().T, dO.T.contiguous().T, heads, tokens), right)
    wide = torch.stack([QKV, QKV], -1)
    assert_same_bits(with_gradient(fused.attend, wide[..., 1], dO, heads, tokens), right)
    one = torch.ones(()).expand(dO.shape)  # what sum() sends back
    assert_same_bits(
        with_gradient(fused.attend, QKV, one, heads, tokens),
        with_gradient(fused.attend, QKV, one.contiguous(), heads, tokens),
    )


def test_it_cannot_be_differentiated_twice(gen):
    QKV = inputs(*SIZES[1], 2, gen)[0].requires_grad_()
    (gradient,) = torch.autograd.grad(fused.attend(QKV, 2, 4).square().sum(), QKV, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


def test_what_does_not_fit_is_refused(gen):
    for QKV, heads, tokens in (
        (torch.ones(6, 8), 4, 4),
        (torch.ones(6, 8), 2, 16),
        (torch.ones(6, 2, 4), 2, 4),
        (torch.ones(6, 8), 0, 4),
        (torch.ones(6, 8), 2, 0),
    ):
        with pytest.raises(ValueError, match=rf"expected \(3 \* {heads} \* features, batch \* {tokens}\), got \(6, "):
            fused.attend(QKV, heads, tokens)
    with pytest.raises(ValueError, match="not float64 on cpu"):
        fused.attend(torch.ones(6, 8, dtype=torch.float64), 2, 4)


# -- threads -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize("batch", [1, 2, 5])
def test_any_number_of_threads_gives_the_same_bits(batch, threads, gen):
    heads, _, tokens = SIZES[0]
    given = inputs(*SIZES[0], batch, gen)
    results = []
    for count in (1, 2, 3, 8):
        threads(count)
        results.append(with_gradient(fused.attend, *given, heads, tokens))
    for other in results[1:]:
        assert_same_bits(other, results[0])


def test_threads_flush_subnormals_as_their_caller_does(threads, gen):
    """It is a setting of every thread: also those that were there before it changed have to follow."""
    heads, features, tokens = SIZES[0]
    QKV, dO = inputs(*SIZES[0], 4, gen)
    QKV[2 * heads * features :] *= 1e-39  # so is the output
    kept = {}
    try:
        for flush in (False, True, False):
            if not torch.set_flush_denormal(flush):
                pytest.skip("this processor has no such setting")
            for count in (1, 2, 3):
                threads(count)
                O, _ = with_gradient(fused.attend, QKV, dO, heads, tokens)
                assert_same_bits([O], [kept.setdefault(flush, O)])
    finally:
        torch.set_flush_denormal(False)
    assert kept[False].ne(0).any()
    assert kept[True].view(torch.int32).bitwise_and(0x7FFFFFFF).eq(0).all()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
def test_it_works_after_a_fork(threads, gen):
    """The child has none of its parent's threads; without threads of its own it would wait for ever."""
    heads, _, tokens = SIZES[0]
    QKV, _ = inputs(*SIZES[0], 4, gen)
    threads(2)
    right = fused.attend(QKV, heads, tokens)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forking beside threads, which is the point
        child = os.fork()
    if child == 0:
        signal.alarm(20)
        same = fused.attend(QKV, heads, tokens).tolist() == right.tolist()
        os._exit(0 if same else 1)
    assert os.waitpid(child, 0)[1] == 0


# -- where it cannot be had --------------------------------------------------------------------------------------------


def assert_plain(layer: StiefelAttention, x: Tensor, reason: str) -> None:
    """The layer says why it does not use the compiled attention, once, and gives what a layer without it gives."""
    with pytest.warns(UserWarning, match=f"fused attention is not used: .*{reason}"):
        y = layer(x)
    plain = StiefelAttention(layer.dim, layer.heads, dtype=x.dtype)
    plain.load_state_dict(layer.state_dict())
    assert torch.equal(y, plain(x))
    assert torch.equal(layer(x), y)  # warnings are errors: it says nothing now
    assert "fused=False" in repr(layer)


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
        (torch.float32, 7, 7, "not 7 and 7"),
        (torch.float32, 2, 7, "not 2 and 7"),
        (torch.float32, 128, 7, "not 128 and 7"),
        (torch.float32, 16, 65, "at most 64 features, not 16 and 65"),
    ],
)
def test_what_it_does_not_take(dtype, tokens, features, reason, gen):
    layer = StiefelAttention(2 * features, 2, fused=True, dtype=dtype)
    assert_plain(layer, torch.randn(3, tokens, 2 * features, dtype=dtype, generator=gen), reason)


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
        assert_plain(*tiny(), "broken .*-DC=1 -DT=4.* failed: out of ink")
    assert log.read_text().split() == ["run", "run"]  # for its version, and to compile
    assert not empty.exists()


def test_with_a_compiler_that_makes_rubbish(empty, monkeypatch, tmp_path):
    rubbish = script(tmp_path / "rubbish", '[ "$1" = --version ] && exit; for last; do :; done; echo rubbish > "$last"')
    monkeypatch.setenv("CC", str(rubbish))
    assert_plain(*tiny(), "loaded: .*attention-.*so")


def test_with_a_cache_that_cannot_be_written(empty):
    empty.write_text("a file where the folder should be")
    assert_plain(*tiny(), f"loaded: .*{empty}")


# -- the file that is kept ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("damage", ["cut", "changed"])
def test_a_damaged_library_is_made_again(damage, cache, empty, gen):
    """It is found out before it is loaded: to load half a library ends the process."""
    QKV, _ = inputs(*TINY, 2, gen)
    right = fused.attend(QKV, 2, 4)
    (path,) = empty.iterdir()
    whole = path.read_bytes()
    clear()
    assert torch.equal(fused.attend(QKV, 2, 4), right)  # found, and nothing is said
    middle = len(whole) // 2
    path.unlink()  # not in place: this process has it mapped
    path.write_bytes(whole[:middle] if damage == "cut" else whole[:middle] + b"?" + whole[middle + 1 :])
    clear()
    with pytest.warns(UserWarning, match=f"{path} was damaged: removed and made again"):
        again = fused.attend(QKV, 2, 4)
    assert torch.equal(again, right)
    assert [p.read_bytes() for p in empty.iterdir()] == [whole]


def test_a_library_is_found_again(cache, monkeypatch):
    """Once compiled, the compiler is asked for its version only."""
    clear()
    commands = []
    run = fused._run
    monkeypatch.setattr(fused, "_run", lambda command: commands.append(command) or run(command))
    fused.library(*SIZES[0][1:])
    assert [command[-1] for command in commands] == ["--version"]


def test_other_sizes_flags_and_processors_have_files_of_their_own(empty, monkeypatch):
    fused.library(1, 4)
    monkeypatch.setattr(fused, "processor", lambda: "another")
    clear()
    fused.library(1, 4)
    assert len(list(empty.iterdir())) == 2
    assert all(path.stat().st_mode & 0o022 == 0 for path in empty.iterdir())  # nobody else can change what we run


def test_a_compiler_with_arguments(empty, monkeypatch):
    monkeypatch.setenv("CC", f"{' '.join(fused._compiler())} -O1")
    assert fused.missing(1, 4) is None

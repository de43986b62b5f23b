"""Where the compiled block cannot be had the formula is used; the file that is kept."""

import contextlib
import copy
import re
import shutil
import stat

import pytest
import torch
from blocks import COMPILER, SIZES, TINY, ULP, cache_folder, clear, compiled, empty_folder, inputs  # noqa: F401
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.modules.module import register_module_forward_hook
from torch.utils.flop_counter import FlopCounterMode

import ghor
from ghor_lab.compiled import attention, build, use, used
from ghor_lab.networks import StiefelAttention, VisionTransformer
from ghor_lab.networks.attention import formula
from ghor_lab.networks.vision_transformer import Block

pytestmark = COMPILER


# -- where it cannot be had ----------------------------------------------------------------------------------


def assert_plain(layer: StiefelAttention, x: Tensor, reason: str) -> None:
    """The layer says why it does not use the compiled block, once, and gives what a layer without it
    gives."""
    with pytest.warns(UserWarning, match=f"compiled attention is not used: .*{reason}"):
        y = layer(x)
    plain = StiefelAttention(layer.dim, layer.heads, dtype=x.dtype)
    plain.load_state_dict(layer.state_dict())
    assert torch.equal(y, plain(x))
    assert torch.equal(layer(x), y)  # warnings are errors: it says nothing now
    assert re.search(reason, layer.formula.unused)


def tiny() -> tuple[StiefelAttention, Tensor]:
    heads, features, tokens = TINY
    return use(StiefelAttention(heads * features, heads)), torch.ones(3, tokens, heads * features)


def script(path, text: str):
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def test_it_can_be_used_and_left():
    model, images = VisionTransformer(blocks=1), torch.rand(2, 28, 28)
    plain = model(images)
    assert not used(model)
    assert not torch.equal(use(model)(images), plain)  # other rounding
    assert used(model)
    assert torch.equal(use(model, False)(images), plain)
    assert not used(model)


@pytest.mark.parametrize(
    ("dtype", "tokens", "features", "reason"),
    [
        (torch.float64, 16, 7, "float32 on the CPU, not float64 on cpu"),
        (torch.float32, 7, 7, "not 7 tokens and 14 features, 7 of them a head"),
        (torch.float32, 2, 7, "not 2 tokens"),
        (torch.float32, 128, 7, "not 128 tokens"),
        (
            torch.float32,
            16,
            65,
            "at most 128 features, 64 of them a head, not 16 tokens and 130 features, 65 of",
        ),
    ],
)
def test_what_it_does_not_take(dtype, tokens, features, reason, gen):
    layer = use(StiefelAttention(2 * features, 2, dtype=dtype))
    assert_plain(layer, torch.randn(3, tokens, 2 * features, dtype=dtype, generator=gen), reason)


def test_every_call_decides(gen):
    layer, x = use(StiefelAttention(49, 7)), torch.randn(2, 16, 49, generator=gen)
    right = layer(x)
    assert layer.formula.unused is None
    for _ in range(2):
        with pytest.warns(UserWarning, match="not 7 tokens"):
            layer(x[:, :7])
        assert "not 7 tokens" in layer.formula.unused
        assert torch.equal(layer(x), right)
        assert layer.formula.unused is None


def pair(gen, make=StiefelAttention) -> list:
    """A layer with the compiled block, and the same without."""
    layers = [use(make(6, 2, ghor.Stiefel(), "dim"), wanted) for wanted in (True, False)]
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
    for f, says in (
        (layer, pytest.warns(UserWarning, match="tracer or dispatch mode")),
        (plain, contextlib.nullcontext()),
    ):
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
    """Cotangents, and the backward pass of the compiled block and of the formula, both run forward as they
    are."""
    given, dy = inputs(*SIZES[1], 3, gen)
    given = [t.requires_grad_() for t in given]
    dys = torch.stack([dy, 2 * dy.flip(0), dy.mT.reshape(dy.shape)])

    def of(y):
        return lambda dy, **options: torch.autograd.grad(y, given, dy, retain_graph=True, **options)

    return dys, [of(block(2, *given)) for block in (compiled, formula)]


def assert_close(ours, theirs):
    for mine, right in zip(ours, theirs, strict=True):
        torch.testing.assert_close(
            mine, right, rtol=0, atol=20 * ULP * float(right.abs().max())
        )  # sums of 12 terms


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
    with (
        FakeTensorMode(allow_non_fake_inputs=True) as mode,
        pytest.warns(UserWarning, match="FakeTensor|dispatch mode"),
    ):
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
    assert inner.formula.unused is None  # what is called is still the compiled attention


def test_it_can_be_copied_and_saved(gen, tmp_path):
    model, x = use(VisionTransformer(blocks=1)), torch.rand(2, 28, 28, generator=gen)
    torch.save(model, tmp_path / "model.pt")
    for other in (copy.deepcopy(model), torch.load(tmp_path / "model.pt", weights_only=False)):
        assert used(other)
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
    rubbish = script(
        tmp_path / "rubbish", '[ "$1" = --version ] && exit; for last; do :; done; echo rubbish > "$last"'
    )
    monkeypatch.setenv("CC", str(rubbish))
    assert_plain(*tiny(), "loaded: .*block-.*so")


def test_with_a_cache_that_cannot_be_written(empty):
    empty.write_text("a file where the folder should be")
    assert_plain(*tiny(), f"loaded: .*{empty}")


# -- the file that is kept -----------------------------------------------------------------------------------


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
    run = build._run
    monkeypatch.setattr(build, "_run", lambda command: commands.append(command) or run(command))
    attention.library(*SIZES[0])
    assert [command[-1] for command in commands] == ["--version"]


def test_other_sizes_flags_and_processors_have_files_of_their_own(empty, monkeypatch):
    attention.library(*TINY)
    monkeypatch.setattr(build, "processor", lambda: "another")
    clear()
    attention.library(*TINY)
    assert len(list(empty.iterdir())) == 2
    assert all(
        path.stat().st_mode & 0o022 == 0 for path in empty.iterdir()
    )  # nobody else can change what we run


def test_a_compiler_with_arguments(empty, monkeypatch):
    monkeypatch.setenv("CC", f"{' '.join(build._compiler())} -O1")
    assert attention.missing(*TINY) is None

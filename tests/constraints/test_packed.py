"""Weights as modules have them: several matrices in one, kernels, padding; chosen by pattern; moved by
others."""

import copy
import re
import warnings
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from helpers.conv1d import Conv1D
from helpers.steps import through_a_file
from helpers.table import randn
from torch import nn

import ghor
from ghor.constraints.registry import declared_space
from ghor.constraints.validation import batch_dims

ST = ghor.Stiefel()
FLOAT32 = 2e-6
assert_close = partial(torch.testing.assert_close, rtol=1e-12, atol=1e-13)


def off(W, blocks):
    """max ||M^T M - I||_F over blocks of rows, each taken tall: written without the library."""
    worst = 0.0
    for M in W.detach().double().chunk(blocks):
        M = M.flatten(1)
        M = M if M.shape[0] >= M.shape[1] else M.T
        worst = max(worst, float((M.T @ M - torch.eye(M.shape[1])).norm()))
    return worst


def train(module, x, steps=5, **options):
    opt = ghor.optim.Adam(module, lr=1e-2, **options)
    for _ in range(steps):
        opt.zero_grad()
        out = module(*x)
        (out[0] if isinstance(out, tuple) else out).square().sum().backward()
        opt.step()
    return opt


@pytest.fixture
def mha():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.MultiheadAttention(12, 3)


# -- blocks ------------------------------------------------------------------------------------------------

SPACES = [ST, ghor.Grassmann(), ghor.Flag((2, 1)), ghor.SymplecticStiefel(), ghor.Sphere()]


RULES = {
    "Adam": partial(ghor.optim.Adam, lr=0.1),
    "Muon": partial(ghor.optim.Muon, lr=0.1),
    "anchor": partial(ghor.optim.AdamW, lr=0.1, weight_decay=0.5, anchor="start"),
}


@pytest.mark.parametrize("section", ["transported", "implicit"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("space", SPACES, ids=repr)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("along", ["rows", "columns"])
def test_blocks_are_a_batch(along, rule, space, section, dtype, gen):
    """A stacked weight moves to the bit as the same matrices with a batch dimension, and so does its
    state; so does its transpose, whose blocks lie side by side."""
    if section == "implicit" and not space.implicit:
        pytest.skip("no implicit section")
    columns = along == "columns" and isinstance(
        space, ghor.Sphere
    )  # which are the points: there are no blocks
    several = replace(space, blocks=None if columns else (2, 2), along=along)
    shape = (4, 8, 4) if isinstance(space, ghor.SymplecticStiefel) else (4, 8, 3)
    if isinstance(space, ghor.Sphere):
        shape = (5, 4, 3)
    whole = (*shape[:-3], -1, shape[-1]) if not isinstance(space, ghor.Sphere) else (5, -1)
    whole = shape if columns else whole
    batch = [
        nn.Parameter(space.random(*shape, generator=gen, dtype=torch.float64).to(dtype)) for _ in range(2)
    ]

    def laid(X):  # the batch as one weight
        return X.reshape(whole).mT if along == "columns" else X.reshape(whole)

    stacked = [nn.Parameter(laid(p.detach()).clone(memory_format=torch.contiguous_format)) for p in batch]
    opts = [
        RULES[rule](batch, space=space, section=section),
        RULES[rule](stacked, space=several, section=section),
    ]
    for _ in range(12):  # beyond the first polishing
        for p, q in zip(batch, stacked, strict=True):
            p.grad = randn(shape, gen, dtype)
            q.grad = laid(p.grad).contiguous()
        for opt in opts:
            opt.step()
    # Velocities of blocks lie by rows. Symplectic formulas, and products of Muon on some CPUs, round numbers
    # as they lie; Muon's polynomial makes 1e3 of that.
    eps = torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).eps
    tol = 5000 * eps if rule == "Muon" else 8 * eps if isinstance(space, ghor.SymplecticStiefel) else 0.0

    def alike(X, Z):
        return torch.equal(X, Z) if tol == 0 else bool((X - Z).abs().max() <= tol * (1 + X.abs().max()))

    for p, q in zip(batch, stacked, strict=True):
        assert alike(laid(p), q) or (tol > 0 and dtype == torch.bfloat16)  # a rounding to the neighbour
        a, b = opts[0].state[p], opts[1].state[q]
        for k in a:
            if torch.is_tensor(a[k]):
                same = laid(a[k]) if b[k].shape == q.shape else a[k].reshape(b[k].shape)
                assert alike(same, b[k]), k
        assert any(b[k].shape == q.shape for k in ("exp_avg", "momentum_buffer") if k in b)
        assert "decay_target" not in b or b["decay_target"].shape == q.shape
    assert (
        several.residual(stacked[0].detach().double()).shape
        == space.residual(batch[0].detach().double()).shape
    )


@pytest.mark.parametrize(
    ("space", "shape"),
    [
        (ghor.Stiefel(blocks=3), (24, 4)),
        (ghor.Stiefel(blocks=3, along="columns"), (4, 24)),
        (ghor.Sphere(along="columns"), (5, 7)),
    ],
    ids=repr,
)
def test_solvers_take_blocks_and_columns(space, shape, gen):
    """The nearest of several points at once."""
    A, Y = randn(shape, gen), space.random(*shape, generator=gen, dtype=torch.float64)
    found = ghor.minimize(lambda Y: (Y - A).square().sum(), Y, space)
    assert (found.x - space.project(A)).abs().max() < 1e-6


def test_columns_are_not_sharded():
    space, A = ghor.Sphere(along="columns"), torch.zeros(5, 7)
    assert (batch_dims(A, space), batch_dims(A[None], space), batch_dims(A, ghor.Sphere())) == (0, 1, 1)


def test_blocks_that_do_not_come_out_even():
    with pytest.raises(ValueError, match=r"Stiefel\(blocks=5\) cannot split 12 rows into 5 equal blocks"):
        ghor.constrain(nn.Linear(4, 12), "weight", ghor.Stiefel(blocks=5))
    with pytest.raises(ValueError, match=r"along='columns'\) cannot split 4 columns into 3 equal blocks"):
        ghor.constrain(nn.Linear(4, 12), "weight", ghor.Stiefel(blocks=3, along="columns"))
    with pytest.raises(ValueError, match=r"got shape \(4, 12\); its 12 columns can be: along='columns'"):
        ghor.constrain(nn.Linear(12, 4), "weight", ghor.Stiefel(blocks=3))
    for wrong in ({"along": "columns"}, {"blocks": 3, "along": "columns", "flatten": 3}):
        with pytest.raises(ValueError, match="says where the blocks of a matrix lie"):
            ghor.Stiefel(**wrong)
    for more in ({"blocks": 3}, {"flatten": 2}, {"padding_idx": 0}):
        with pytest.raises(ValueError, match=r"makes the columns of a matrix points; .* has other options"):
            ghor.Sphere(along="columns", **more)
    with pytest.raises(ValueError, match=r"holds the columns of matrices \(..., N, K\), got shape \(4,\)"):
        ghor.Sphere(along="columns").random(4)
    with pytest.raises(ValueError, match="lie along='rows' or along='columns', got 'column'"):
        ghor.Stiefel(blocks=3, along="column")
    for wrong in (0, (3, 0), (), 2.0, "3"):
        with pytest.raises(ValueError, match="blocks counts matrices"):
            ghor.Stiefel(blocks=wrong)


@pytest.mark.parametrize("section", ["transported", "implicit"])
@pytest.mark.parametrize("blocks", [{"blocks": 3, "along": "columns"}, {"blocks": (3, 1)}], ids=str)
def test_blocks_resume(blocks, section, gen):
    """To the bit, from a file."""
    model = ghor.constrain(nn.Linear(12, 9), "weight", ghor.Stiefel(**blocks))
    twin = copy.deepcopy(model)
    options = {"lr": 0.1, "weight_decay": 0.1, "anchor": "start", "section": section}
    opts = [ghor.optim.AdamW([m.weight], **options) for m in (model, twin)]
    for step in range(12):
        grad = randn((9, 12), gen, torch.float32)
        for m, opt in zip((model, twin), opts, strict=True):
            m.weight.grad = grad.clone()
            opt.step()
        if step == 5:
            saved = through_a_file(opts[1].state_dict())
            opts[1] = ghor.optim.AdamW([twin.weight], **options)
            opts[1].load_state_dict(saved)
    assert torch.equal(model.weight, twin.weight)
    assert off(model.weight.T if "along" in blocks else model.weight, 3) <= FLOAT32


def test_blocks_lift_lbfgs_and_third_parties(gen):
    target = randn((24, 4), gen)
    for make in (ghor.optim.LBFGS, lambda p, space: ghor.lift(torch.optim.ASGD)(p, space=space)):
        p = nn.Parameter(ghor.Stiefel(blocks=3).random(24, 4, generator=gen, dtype=torch.float64))
        opt = make([p], space=ghor.Stiefel(blocks=3))

        def closure(p=p, opt=opt):
            opt.zero_grad()
            loss = (p - target).square().sum()
            loss.backward()
            return loss.detach()

        before = float(closure())
        for _ in range(5):
            opt.step(closure)
        assert float(closure()) < before
        assert off(p, 3) <= 1e-13


# -- modules that pack -------------------------------------------------------------------------------------


def test_packed_attention_is_refused_with_what_to_write(mha, gen):
    before = mha.in_proj_weight.detach().clone()
    with pytest.raises(
        ValueError, match=r"queries, keys and values.*blocks=3\).*blocks=\(3, 3\)\).*blocks=1\)"
    ):
        ghor.constrain(mha, "in_proj_weight", ST)
    assert torch.equal(mha.in_proj_weight, before)
    ghor.constrain(mha, "in_proj_weight", ghor.Stiefel(blocks=1))
    assert off(mha.in_proj_weight, 1) <= FLOAT32
    ghor.constrain(mha, "in_proj_weight", ghor.Sphere())  # rows are rows, however they are stacked
    ghor.constrain(mha, "in_proj_weight", ghor.Stiefel(blocks=3))
    assert off(mha.in_proj_weight, 3) <= FLOAT32
    train(mha, [randn((5, 2, 12), gen, torch.float32)] * 3)
    assert off(mha.in_proj_weight, 3) <= FLOAT32


@pytest.mark.parametrize(("kind", "gates"), [("LSTM", 4), ("GRU", 3), ("LSTMCell", 4), ("GRUCell", 3)])
def test_packed_gates(kind, gates, gen):
    module = getattr(nn, kind)(5, 6)
    name = "weight_hh" if kind.endswith("Cell") else "weight_hh_l0"
    with pytest.raises(
        ValueError, match=rf"{name} .*holds the {gates} gates.*SpecialOrthogonal\(blocks={gates}\)"
    ):
        ghor.constrain(module, name, ghor.SpecialOrthogonal())
    ghor.constrain(module, name, ghor.SpecialOrthogonal(blocks=gates))
    train(module, [randn((4, 5), gen, torch.float32)])
    W = getattr(module, name)
    assert off(W, gates) <= FLOAT32
    assert all(torch.linalg.det(M) > 0 for M in W.detach().chunk(gates))


def test_the_projection_of_an_lstm_is_one_matrix():
    module = nn.LSTM(5, 6, proj_size=3)
    ghor.constrain(module, "weight_hr_l0", ghor.Stiefel())
    assert off(module.weight_hr_l0, 1) <= FLOAT32


def test_padding_of_embeddings(gen):
    """Left alone by constrain, by steps whatever its gradient is, by project; the other rows are on the
    sphere."""
    e = nn.Embedding(6, 4, padding_idx=2)
    ghor.constrain(e, "weight", ghor.Sphere())
    assert declared_space(e.weight) == ghor.Sphere(padding_idx=2)
    opt = ghor.optim.Adam(e, lr=0.1)
    for _ in range(12):
        e.weight.grad = randn(
            (6, 4), gen, torch.float32
        )  # also in the padding row, as a tied output layer has it
        opt.step()
    ghor.project(e)
    norms = e.weight.detach().norm(dim=1)
    assert torch.equal(e.weight[2], torch.zeros(4))
    assert (norms[[0, 1, 3, 4, 5]] - 1).abs().max() <= FLOAT32
    for space in (ST, ghor.Sphere(along="columns")):
        with pytest.warns(UserWarning, match="weight has the padding row 2, which is a row of the matrix"):
            ghor.constrain(e, "weight", space)


@pytest.mark.parametrize("space", [s for s in (ghor.Sphere, ghor.Hyperbolic) if hasattr(s, "padding_idx")])
@pytest.mark.parametrize("name", ["embed.weight", "head.weight"])
@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_padding_of_bags_and_of_tied_weights(kind, name, space, gen):
    """Whichever module of the model knows of the row, and by whichever name the weight is declared."""
    model = nn.ModuleDict({"head": nn.Linear(4, 6, bias=False), "embed": kind(6, 4, padding_idx=2)})
    model.embed.weight = model.head.weight
    with torch.no_grad():
        model.embed.weight[2] = 0
    ghor.constrain(model, name, space())
    assert declared_space(model.embed.weight) == space(padding_idx=2)
    opt = ghor.optim.Adam(model, lr=0.1)
    for _ in range(3):
        model.embed.weight.grad = randn((6, 4), gen, torch.float32)
        opt.step()
    assert not model.embed.weight[2].any()
    assert space(padding_idx=2).residual(model.embed.weight.detach().double()).max() <= FLOAT32
    with torch.no_grad():
        model.embed.weight[2] = 1
    ghor.constrain(model, name, space(padding_idx=1))  # what is said counts
    assert declared_space(model.embed.weight) == space(padding_idx=1)


@pytest.mark.parametrize(
    ("name", "layer", "words"),
    [
        (
            "qkv",
            lambda: nn.Linear(8, 24),
            [r"ghor\.Stiefel\(blocks=3\)", r"blocks=\(3, heads\)", r"blocks=1\)"],
        ),
        ("Wqkv", lambda: nn.Linear(8, 24), [r"ghor\.Stiefel\(blocks=3\)"]),
        ("in_proj", lambda: nn.Linear(8, 24), [r"ghor\.Stiefel\(blocks=3\)"]),
        ("c_attn", lambda: nn.Linear(8, 24), [r"ghor\.Stiefel\(blocks=3\)"]),
        ("kv_proj", lambda: nn.Linear(8, 16), [r"ghor\.Stiefel\(blocks=2\)"]),
        ("gate_up_proj", lambda: nn.Linear(8, 40), [r"ghor\.Stiefel\(blocks=2\)"]),
        ("qkv_proj", lambda: nn.Linear(8, 12), [r"fewer keys.*ghor\.Stiefel\(blocks=12 // head_dim\)"]),
        (
            "query_key_value",
            lambda: nn.Linear(8, 24),
            [r"head by head: ghor\.Stiefel\(blocks=24 // head_dim"],
        ),
        ("attention_in", lambda: nn.Linear(8, 24), [r"ghor\.Stiefel\(blocks=3\)"]),
        ("c_attn", lambda: Conv1D(24, 8), [r"ghor\.Stiefel\(blocks=3, along='columns'\)", r"blocks=1\)"]),
        ("proj", lambda: Conv1D(24, 8), [r"ghor\.Stiefel\(blocks=3, along='columns'\)"]),
    ],
)
def test_fused_projections_are_pointed_out(name, layer, words):
    """Once for all layers of a kind, and constrained as asked; `blocks` says that it is meant."""
    model = nn.Sequential(*(nn.ModuleDict({name: layer()}) for _ in range(3)))
    with pytest.warns(UserWarning, match=rf"^0\.{name}\.weight of shape .* seems to hold several") as caught:
        ghor.constrain(model, f"*.{name}.weight", ST)
    assert len(caught) == 1
    assert all(re.search(word, str(caught[0].message)) for word in words), caught[0].message
    assert off(model[1][name].weight, 1) <= FLOAT32
    ghor.constrain(model, f"*.{name}.weight", ghor.Stiefel(blocks=1))  # warnings are errors here
    ghor.constrain(model, f"*.{name}.weight", ghor.Sphere())


@pytest.mark.parametrize(("conv", "first"), [(nn.Conv2d, "output"), (nn.ConvTranspose2d, "input")])
def test_kernels_without_flatten_are_a_batch(conv, first):
    words = rf"is a batch of 3 x 2 matrices.*flatten=3\) takes the kernels of an {first} channel as one row"
    with pytest.warns(UserWarning, match=words):
        W = ghor.constrain(conv(8, 8, (3, 2)), "weight", ghor.Stiefel()).weight.detach()
    assert (W.mT @ W - torch.eye(2)).norm(dim=(-2, -1)).max() <= FLOAT32


@pytest.mark.parametrize("conv", [nn.Conv2d, nn.ConvTranspose2d])
def test_groups_of_a_convolution_are_pointed_out(conv):
    with pytest.warns(
        UserWarning, match=r"2 groups.*ghor\.Stiefel\(flatten=3, blocks=2\) constrains those of"
    ):
        ghor.constrain(conv(8, 8, 3, groups=2), "weight", ghor.Stiefel(flatten=3))
    layer = ghor.constrain(conv(8, 8, 3, groups=2), "weight", ghor.Stiefel(flatten=3, blocks=2))
    assert off(layer.weight, 2) <= FLOAT32
    ghor.constrain(conv(8, 8, 3, groups=2), "weight", ghor.Stiefel(flatten=3, blocks=1))
    ghor.constrain(conv(8, 8, 3, groups=2), "weight", ghor.Sphere(flatten=3))  # a row is of one group
    ghor.constrain(conv(8, 8, 3), "weight", ghor.Stiefel(flatten=3))
    ghor.constrain(conv(8, 8, 3), "bias", ghor.Sphere())


def test_projections_that_are_not_fused_are_not_pointed_out():
    """Warnings are errors here."""
    layers = {
        "in_proj": nn.Linear(8, 20),
        "qkv": nn.Linear(8, 8),
        "c_fc": Conv1D(32, 8),
        "c_proj": Conv1D(8, 8),
    }
    model = nn.ModuleDict({"attn": nn.ModuleDict(layers), "qkv": nn.ModuleDict({"lora_A": nn.Linear(8, 2)})})
    model.mlp = nn.ModuleDict({"up": nn.Linear(8, 24)})
    ghor.constrain(model, "*.weight", ST)
    ghor.constrain(model.attn, "c_fc.weight", ghor.Stiefel(blocks=2, along="columns"))
    ghor.constrain(model.attn, "c_proj.weight", ghor.Stiefel(blocks=2))  # the heads are its inputs
    with pytest.warns(UserWarning, match=r"transposed \(in x out\): .* splits its inputs; .*along='columns'"):
        ghor.constrain(model.attn, "c_fc.weight", ghor.Stiefel(blocks=2))
    ghor.constrain(model.mlp.up, "weight", ST)
    with pytest.warns(UserWarning, match=r"^weight of shape \(96, 32\) .* seems to hold several"):
        ghor.constrain(nn.Linear(32, 96), "weight", ST)  # where no path tells the name, the shape decides


# -- other optimizers, other libraries, the wrong order ----------------------------------------------------


def test_a_plain_optimizer_is_noticed(gen):
    layer = ghor.constrain(nn.Linear(9, 3, bias=False), "weight", ST)
    ours, plain = ghor.optim.SGD(layer, lr=0.1), torch.optim.SGD(layer.parameters(), lr=0.1)
    for opt in (ours, plain):
        layer.weight.grad = randn((3, 9), gen, torch.float32)
        opt.step()
    assert "off: moved by another optimizer?" in ghor.check(layer)
    with pytest.raises(ValueError, match=r"off Stiefel\(\).*optimizer that is not ghor's"):
        ours.step()


@pytest.mark.parametrize("cls", ["SGD", "LBFGS"])
@pytest.mark.parametrize("steps", [0, 1])
def test_constrain_after_building_the_optimizer(cls, steps, gen):
    model = nn.Sequential(nn.Linear(9, 3), nn.Linear(3, 3))
    ghor.constrain(model[1], "weight", ST)
    opt = getattr(ghor.optim, cls)(model, lr=0.1)

    def closure():
        opt.zero_grad()
        loss = model(torch.ones(1, 9)).square().sum()
        loss.backward()
        return loss

    for _ in range(steps):
        opt.step(closure)
    ghor.constrain(model[0], "weight", ST)
    with pytest.raises(
        ValueError, match=r"0\.weight was constrained to Stiefel\(\) after this.*then build the"
    ):
        opt.step(closure)


def test_a_parameter_of_geoopt_is_named():
    """Known by name and attribute, as here: geoopt need not be installed."""

    class ManifoldParameter(nn.Parameter):
        manifold = type("CanonicalStiefel", (), {})()

    model = nn.Module()
    model.weight = ManifoldParameter(torch.eye(5, 3))
    model.other = nn.Parameter(torch.eye(5, 3))
    ghor.constrain(model, "other", ST)
    with pytest.warns(
        UserWarning, match=r"weight is a geoopt\.ManifoldParameter on \w*Stiefel.*ghor\.constrain"
    ):
        ghor.optim.Adam(model)
    ghor.constrain(model, "weight", ST)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ghor.optim.Adam(model)


def test_the_recipes_run(capsys):
    """Those that need no Hugging Face: what they print of a weight is 0 or, of determinants and lengths,
    1."""
    page = (Path(__file__).parents[2] / "docs" / "recipes.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    blocks = [b for b in blocks if re.match("(mha|lstm|conv|emb) = nn", b)]
    assert len(blocks) == 4
    scope = {"ghor": ghor, "torch": torch, "nn": nn}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        for block in blocks:
            exec(block, scope)
    printed = [float(x) for x in re.findall(r"tensor\(([^,)]*)", capsys.readouterr().out)]
    assert len(printed) == 1 + 8 + 1 + 2
    assert all(min(abs(x), abs(x - 1)) <= FLOAT32 for x in printed)

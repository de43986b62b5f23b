"""Configurations: their names, their way into a record and back, and what they refuse."""

import dataclasses

import pytest
import torch
from configs import MNIST, PENDULUM
from hypothesis import given
from hypothesis import strategies as st

from ghor.constraints.declare import declared_spaces
from ghor_lab import train
from ghor_lab.config import AUTOENCODER, DEFAULTS, FURTHER, OPTIMIZERS, READINGS, TRANSFORMER, Config
from ghor_lab.networks import VisionTransformer
from ghor_lab.record import decode, encode

CHANGES = {
    "experiment": "fashion-mnist",
    "optimizer": "momentum",
    "seeds": (3,),
    "lr": 0.5,
    "batch_size": 7,
    "label": "other",
    "betas": (0.8, 0.99),
    "eps": 1e-7,
    "momentum": 0.4,
    "norm": "frobenius",
    "retraction": "geodesic",
    "section": "implicit",
    "dtype": "float64",
    "device": "cuda",
    "threads": 2,
    "compile": True,
    "flush_subnormals": False,
    "network": {"blocks": 3},
    "manifold_lr": 0.3,
    "start": "authors",
    "frame": "random",
    "loss": "after",
    "warmup": 3,
    "weight_decay": 0.2,
}


def test_the_name_depends_on_everything_but_the_epochs():
    """And is a plain name of a file, whatever the label."""
    assert set(CHANGES) | {"every", "rest_lr"} == {f.name for f in dataclasses.fields(Config)} - {"epochs"}
    assert dataclasses.replace(MNIST, epochs=9).name == MNIST.name
    names = {MNIST.name} | {dataclasses.replace(MNIST, **{k: v}).name for k, v in CHANGES.items()}
    assert len(names) == 1 + len(CHANGES)
    odd = dataclasses.replace(MNIST, label="../a b/*[?]\n\0")
    assert not set(odd.name) & set("/*[]?\n\0 ")


numbers = st.floats(1e-12, 1e6)


@given(
    pick=st.sampled_from(["mnist", "fashion-mnist"]),
    optimizer=st.sampled_from(OPTIMIZERS),
    seed=st.integers(0, 2**40 - 1),
    rates=st.tuples(numbers, numbers),
    betas=st.tuples(st.floats(0, 1, exclude_max=True), st.floats(0, 1, exclude_max=True)),
    label=st.none() | st.text(max_size=20),
)
def test_a_configuration_comes_back_from_its_record_as_it_was(pick, optimizer, seed, rates, betas, label):
    config = Config(pick, optimizer, (seed,), 3, rates[0], 10, label, betas, rates[1])
    line = decode(encode({"kind": "run", "config": config.to_dict()}))
    back = Config.from_dict(line["config"])
    assert back == config
    assert back.name == config.name
    assert set(line["config"]) | set(DEFAULTS) == {f.name for f in dataclasses.fields(Config)}


def test_manifold_lr_is_the_rate_of_the_weights_on_manifolds():
    config = dataclasses.replace(MNIST, optimizer="scalar-moment-adam", manifold_lr=0.018)
    opt = train.optimizer_of(config, VisionTransformer(blocks=1))
    assert {str(g["space"]): g["lr"] for g in opt.param_groups} == {
        "Euclidean()": MNIST.lr,
        "Stiefel()": 0.018,
    }
    assert Config.from_dict(config.to_dict()) == config


@pytest.mark.parametrize("optimizer", FURTHER)
def test_optimizers_beyond_the_paper(optimizer):
    """They train, and stay on the manifold; nothing about them is in the names of other configurations."""
    model = VisionTransformer(blocks=1)
    opt = train.optimizer_of(dataclasses.replace(MNIST, optimizer=optimizer, manifold_lr=0.01), model)
    before = [p.detach().clone() for p in model.parameters()]
    model(torch.rand(2, 28, 28)).square().sum().backward()
    opt.step()
    assert not any(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
    assert max(space.residual(p.detach()).max() for _, p, space in declared_spaces(model)) < 1e-5
    assert optimizer not in OPTIMIZERS
    assert "weight_decay" not in MNIST.to_dict()


def test_one_and_one_point_nought_are_one_configuration():
    assert dataclasses.replace(MNIST, lr=1).name == dataclasses.replace(MNIST, lr=1.0).name
    assert (
        dataclasses.replace(MNIST, seeds=[0], betas=[0, 0]).name
        == dataclasses.replace(MNIST, betas=(0.0, 0)).name
    )


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"experiment": "cifar"}, "unknown experiment 'cifar'; there are pendulum, mnist"),
        ({"optimizer": "adam"}, "there are geometric-adam"),
        ({"manifold_lr": 0.0}, "manifold_lr must be a positive number, got 0.0"),
        ({"manifold_lr": 1.0, "optimizer": "standard-adam"}, "standard-adam has no weights on manifolds"),
        ({"retraction": "polar"}, "there are cayley, geodesic"),
        ({"start": "zero"}, "there are uniform, authors"),
        ({"frame": "none"}, "there are closed-form, random"),
        (
            {"frame": "random", "optimizer": "standard-adam"},
            "standard-adam has no weights on manifolds: no frame",
        ),
        ({"frame": "random", "section": "implicit"}, "an implicit section has no frame"),
        ({"loss": "never"}, "there are before, after"),
        ({"warmup": -1}, "warmup must be at least 0"),
        ({"section": "none"}, "there are auto, transported, implicit"),
        ({"norm": "max"}, "there are canonical, frobenius"),
        ({"dtype": "float16"}, "there are float32, float64"),
        ({"device": "tpux"}, "unknown device 'tpux'"),
        ({"seeds": ()}, "seeds must be"),
        ({"seeds": (0, 0)}, "seeds must be"),
        ({"seeds": (-1,)}, "seeds must be"),
        ({"seeds": (2**40,)}, "seeds must be"),
        ({"seeds": (0, 1)}, "one seed a run"),
        ({"epochs": 0}, "epochs must be at least 1, got 0"),
        ({"batch_size": 0}, "batch_size"),
        ({"threads": 0}, "threads"),
        ({"lr": 0}, "lr must be a positive number, got 0"),
        ({"lr": -1e-3}, "lr must be"),
        ({"lr": float("nan")}, "lr must be"),
        ({"lr": float("inf")}, "lr must be"),
        ({"eps": 0}, "eps must be"),
        ({"betas": (0.9, 1.0)}, "betas must be"),
        ({"betas": (-0.1, 0.9)}, "betas must be"),
        ({"betas": (0.9,)}, "betas must be two"),
        ({"momentum": 1}, "momentum must be"),
        ({"network": {"layers": 3}}, "unknown network option 'layers'; there are patch_size"),
        ({"network": {"blocks": "many"}}, "blocks must be a whole number"),
        ({"network": {"blocks": 1.5}}, "blocks must be a whole number"),
        ({"network": {"blocks": 0}}, "blocks must be a whole number from 1 on, got 0"),
    ],
)
def test_bad_values_are_refused_with_the_good_ones(change, words):
    with pytest.raises(ValueError, match="^(?s:.*)" + words.replace("(", r"\(")):
        dataclasses.replace(MNIST, **change)


def test_fields_that_do_not_exist_are_refused():
    with pytest.raises(ValueError, match="unknown field 'learning_rate'; there are experiment, "):
        Config.from_dict({**MNIST.to_dict(), "learning_rate": 1})
    with pytest.raises(ValueError, match="standard-adam is for mnist"):
        dataclasses.replace(PENDULUM, optimizer="standard-adam")


def test_defaults_are_the_papers():
    assert Config("mnist", "geometric-adam", (0,), 1, 1e-3, 1).network == TRANSFORMER
    assert dataclasses.replace(PENDULUM, network={}).network == AUTOENCODER
    assert READINGS["as run"]["geometric-adam"] == 1e-3
    assert set(READINGS["as stated"].values()) == {1e-4}

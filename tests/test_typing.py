"""What editors and `help` show of the options; `make lint` checks calls in `typed` by mypy."""

import ast
import dataclasses
import inspect
import pydoc
import typing

import pytest
import torch
from signatures import STUB, stub

import ghor
from ghor.lifting.groups import GROUP_KEYS, Options
from ghor.spaces.retraction import RETRACTIONS, RetractionName

NAMES = [*ghor.optim.__all__, "LBFGS"]


def test_the_stub_is_what_its_script_writes():
    """`python tests/signatures.py`; another torch may have other options, and other words for types."""
    written = [parameters(ast.parse(text)) for text in (STUB.read_text(), stub())]
    assert written[0] == written[1]


def parameters(module: ast.Module) -> dict[str, list[tuple[str, str]]]:
    """{class: [(parameter, default)]}."""
    out = {}
    for node in module.body:
        if isinstance(node, ast.ClassDef):
            args = node.body[0].args
            names = [a.arg for a in (*args.args, *args.kwonlyargs)]
            defaults = [
                None if d is None else ast.literal_eval(d) for d in (*args.defaults, *args.kw_defaults)
            ]
            out[node.name] = [names, defaults, args.kwarg.annotation.slice.id]
    return out


@pytest.mark.parametrize("name", NAMES)
def test_signatures_are_torchs_and_ours(name):
    """As `inspect` shows them: torch's parameters as installed, then our keywords."""
    cls = getattr(ghor.optim, name)
    shown = inspect.signature(cls).parameters
    own = ["adamw", "module", "adamw_names", "ns_dtype"] if name == "Muon" else []
    base = inspect.signature(torch.optim.Muon if own else cls.Base).parameters
    assert list(shown) == [*base, *own, *GROUP_KEYS]
    for key in list(base)[1:]:
        assert shown[key].default == base[key].default
        assert shown[key].kind is base[key].kind
    assert "lr:" in pydoc.render_doc(cls, renderer=pydoc.plaintext).split("\n\n")[1]


def test_a_signature_of_another_library():
    class Other(torch.optim.SGD):
        def __init__(self, params, lr=0.1, *, section=None, **more):
            super().__init__(params, lr)

    class Lifted(ghor.lifting.Lifted):
        Base = Other

    ours = [key for key in GROUP_KEYS if key != "section"]
    assert list(inspect.signature(Lifted).parameters) == ["params", "lr", "section", *ours, "more"]


def test_names_of_options():
    """The literals that type checkers know are those that are there at run time, and so are their types."""
    assert sorted(typing.get_args(RetractionName)) == sorted(RETRACTIONS)
    defaults = inspect.signature(ghor.lifting.Lifted.__init__).parameters
    assert all(defaults[key].default is not inspect.Parameter.empty for key in Options.__annotations__)


@pytest.mark.parametrize("space", [ghor.Stiefel, ghor.Sphere, ghor.Flag, ghor.SPD, ghor.Hyperbolic])
def test_help_shows_the_options_of_a_space(space):
    shown = " ".join(pydoc.render_doc(space, renderer=pydoc.plaintext).splitlines()[:8])
    options = [f.name for f in dataclasses.fields(space)]
    assert all(f"{name}:" in shown for name in options), shown
    assert "given" not in shown

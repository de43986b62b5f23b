"""Type checkers see the mistakes in `typed/wrong.py`, and none in `typed/right.py`."""

import ast
import dataclasses
import inspect
import json
import os
import pydoc
import re
import shutil
import subprocess
import sys
import typing
from pathlib import Path

import pytest
import torch

import ghor
from ghor.lifting.param_groups import GROUP_KEYS, Options
from ghor.retraction import RETRACTIONS, RetractionName

ROOT = Path(__file__).parents[1]
SCRIPTS = Path(__file__).parent / "typed"
NAMES = [*ghor.optim.__all__, "LBFGS"]


def wrong_lines() -> set[tuple[str, int]]:
    lines = enumerate((SCRIPTS / "wrong.py").read_text().splitlines(), 1)
    return {("wrong.py", i) for i, line in lines if line.endswith("# wrong")}


def test_mypy_reports_the_wrong_lines_and_no_others():
    scripts = [str(SCRIPTS.relative_to(ROOT) / name) for name in ("right.py", "wrong.py")]
    done = subprocess.run(  # strict by pyproject.toml, whose cache is that of the linter
        [sys.executable, "-m", "mypy", "--no-error-summary", *scripts],
        cwd=ROOT, env={**os.environ, "MYPYPATH": "src"}, capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    found = re.findall(r"(\w+\.py):(\d+): error", done.stdout, re.MULTILINE)
    assert {(name, int(line)) for name, line in found} == wrong_lines(), done.stdout + done.stderr


def test_pyright_reports_the_wrong_lines_and_no_others():
    pyright = shutil.which("pyright", path=str(Path(sys.executable).parent))
    if pyright is None:
        pytest.skip("pyright is not installed")
    done = subprocess.run(
        [pyright, "--outputjson", "--pythonpath", sys.executable, "right.py", "wrong.py"],
        cwd=SCRIPTS, env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    if not done.stdout.startswith("{"):
        pytest.skip(f"pyright does not start: {done.stderr[-200:]}")
    found = [d for d in json.loads(done.stdout)["generalDiagnostics"] if d["severity"] == "error"]
    lines = {(Path(d["file"]).name, d["range"]["start"]["line"] + 1) for d in found}
    assert lines == wrong_lines(), found


def written(cls: type) -> dict[str, tuple[object, bool]]:
    """{parameter: (default, whether by keyword only)} of the signature that is written for type checkers."""
    files = (ROOT / "src/ghor/optim").glob("*.py")
    nodes = [node for file in files for node in ast.parse(file.read_text()).body]
    found = next(node for node in nodes if isinstance(node, ast.ClassDef) and node.name == cls.__name__)
    branch = next(node for node in found.body if isinstance(node, ast.If))
    init = branch.body[0].args
    assert init.kwarg.annotation.slice.id == "Options"
    positional = zip(init.args[2:], init.defaults, strict=True)
    by_keyword = zip(init.kwonlyargs, init.kw_defaults, strict=True)
    return {a.arg: (ast.literal_eval(value), False) for a, value in positional} | {
        a.arg: (ast.literal_eval(value), True) for a, value in by_keyword
    }


@pytest.mark.parametrize("name", NAMES)
def test_signatures_are_torchs_and_ours(name):
    """As type checkers see them and as `inspect` does: torch's parameters as installed, then our keywords."""
    cls = getattr(ghor.optim, name)
    shown = inspect.signature(cls).parameters
    base = inspect.signature(cls.Base).parameters
    assert list(shown) == [*base, *GROUP_KEYS]
    assert all(shown[key] == base[key] for key in base)
    theirs = {p.name: (p.default, p.kind is p.KEYWORD_ONLY) for p in list(base.values())[1:]}
    assert written(cls) == theirs


def test_a_signature_of_another_library():
    class Other(torch.optim.SGD):
        def __init__(self, params, lr=0.1, *, section=None, **more):
            super().__init__(params, lr)

    class Lifted(ghor.optim.SGD.__mro__[1]):
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

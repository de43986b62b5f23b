"""The package as it is shipped: what importing it costs, that its examples run, that its names and texts are
there."""

import ast
import importlib
import importlib.util
import inspect
import os
import pkgutil
import re
import runpy
import subprocess
import sys
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import pytest
import torch
from helpers.table import SPACES

import ghor
import ghor.optim
import ghor.spaces

ROOT = Path(__file__).parents[1]

CORE = [m.name for m in pkgutil.walk_packages(ghor.__path__, "ghor.")]


def python(*args, **env):
    """Run python in a clean process that finds this package; returns what it printed."""
    path = str(Path(ghor.__file__).parents[1])
    done = subprocess.run(
        [sys.executable, *args],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **env},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_importing_the_core_loads_torch_and_nothing_else():
    """Top-level packages that appear when the core is imported after torch are ghor and the standard library;
    torch's random state and defaults stay, and nothing warns."""
    script = (
        "import sys, torch, importlib\n"
        "def look(): return (torch.get_rng_state().tolist(), torch.get_default_dtype(),\n"
        "    torch.get_num_threads(), torch.is_grad_enabled(), torch.get_float32_matmul_precision())\n"
        "torch.manual_seed(1)\n"
        "before, there = look(), {m.partition('.')[0] for m in sys.modules}\n"
        f"for name in {['ghor', *CORE]}: importlib.import_module(name)\n"
        "new = {m.partition('.')[0] for m in sys.modules} - there - set(sys.stdlib_module_names)\n"
        "print(sorted(new), look() == before)"
    )
    assert python("-W", "error", "-c", script).strip() == "['ghor'] True"


def test_imports_in_the_source_are_torch_and_the_standard_library():
    """Also those inside functions, which importing does not run."""
    allowed = set(sys.stdlib_module_names) | {"torch", "ghor"}
    for module in ["ghor", *CORE]:
        source = inspect.getsource(importlib.import_module(module))
        for node in ast.walk(ast.parse(source)):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.level == 0:
                names = [node.module]
            for name in names:
                assert name.partition(".")[0] in allowed, f"{module} imports {name}"


def test_quickstart_runs_and_learns():
    with torch.random.fork_rng(), redirect_stdout(StringIO()) as out:
        runpy.run_path(str(ROOT / "examples" / "quickstart.py"))
    lines = out.getvalue().splitlines()
    losses = [float(m[1]) for line in lines if (m := re.match(r"step \d+: loss ([\d.]+)", line))]
    assert len(losses) == 5
    assert losses[-1] < 0.5 * losses[0]
    rows = [re.split(r"\s{2,}", line) for line in lines if "Stiefel(" in line]
    assert [row[:3] for row in rows] == [
        [f"layers.{i}.self_attn.in_proj_weight", "192x64", "Stiefel(blocks=(3, 4))"] for i in range(2)
    ]
    assert all(float(row[3]) <= 2e-6 for row in rows)  # the bound for float32


@pytest.mark.parametrize("folder", ["examples", "benchmarks"])
def test_scripts_import_what_is_there(folder):
    """Scripts that no test runs find their names in ghor and ghor_lab."""
    pytest.importorskip("jinja2")  # of the lab
    found = 0
    for path in (ROOT / folder).glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module and re.match(r"ghor(_lab)?\b", node.module):
                module = importlib.import_module(node.module)
                for name in (alias.name for alias in node.names):
                    there = hasattr(module, name) or importlib.util.find_spec(f"{node.module}.{name}")
                    assert there, f"{path}: {node.module}.{name}"
                    found += 1
    assert found


def test_the_readme_shows_the_quickstart():
    readme = (ROOT / "README.md").read_text()
    example = (ROOT / "examples" / "quickstart.py").read_text()
    code = example.split('"""', 2)[2].strip()  # without its docstring
    blocks = re.findall(r"```python\n(.*?)```", readme, re.DOTALL)
    assert blocks[0].strip() == code
    # "15-line example": what is not blank
    assert len([line for line in code.splitlines() if line.strip()]) <= 16


@pytest.mark.parametrize("module", [ghor, ghor.optim, ghor.spaces], ids=lambda m: m.__name__)
def test_all_names_exist_and_are_sorted_out(module):
    assert len(set(module.__all__)) == len(module.__all__)
    for name in module.__all__:
        assert hasattr(module, name)
    star = {}
    exec(f"from {module.__name__} import *", star)
    assert set(star) - {"__builtins__"} == set(module.__all__)


def test_version():
    assert re.fullmatch(r"\d+\.\d+\.\d+((a|b|rc|\.dev)\d+)?", ghor.__version__)
    assert ghor.__version__ in (ROOT / "CHANGELOG.md").read_text()


def test_the_package_is_typed():
    assert (Path(ghor.__file__).parent / "py.typed").exists()


# -- docstrings --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("space", SPACES, ids=repr)
def test_public_methods_of_spaces_have_docstrings(space):
    """Their own or, as inspect.getdoc gives it, that of the method they override; shapes are on the class."""
    assert type(space).__doc__
    methods = [n for n, _ in inspect.getmembers(type(space), callable) if not n.startswith("_")]
    assert {"frame", "random", "project", "dist"} <= set(methods)
    for n in methods:
        assert inspect.getdoc(getattr(type(space), n)), f"{space}.{n}"


@pytest.mark.parametrize("name", ghor.optim.__all__)
def test_lifted_optimizers_are_documented_and_in_their_place(name):
    cls = getattr(ghor.optim, name)
    assert cls.__doc__
    assert "g^hor" in cls.__doc__ or "manifold" in cls.__doc__
    assert cls.__module__ == "ghor.optim"
    assert cls.__qualname__ == name
    assert issubclass(cls, torch.optim.Optimizer)
    assert issubclass(cls.Base, torch.optim.Optimizer)

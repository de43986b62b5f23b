"""The pages: every Python block runs as it stands, and fits; parameters are those of the functions.

A block that cannot run here (it needs a GPU, a download or minutes) says so in a comment before it:

    <!-- not run: reason -->
"""

import importlib
import inspect
import linecache
import re
import runpy
import tomllib
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import pytest
import torch

import ghor

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
BLOCK = re.compile(r"(?:<!-- not run: ([^\n]+) -->\n)?^( *)```python\n(.*?)^ *```", re.DOTALL | re.MULTILINE)
INCLUDED = re.compile(r'^ *--8<-- "([^":]+)(?::(\d+):)?"$', re.MULTILINE)
COLUMNS = 88  # what a page shows at 1280 pixels
QUICKSTART = (ROOT / "examples" / "quickstart.py").read_text().split('"""', 2)[2].strip()
OPTIONAL = {"geoopt", "geotorch", "pymanopt", "lion_pytorch", "transformers", "peft", "safetensors"}
OPTIONAL |= {"timm", "torchvision"}


def source(found):
    """The code of a block: included files put in, indentation of a tab taken out."""

    def lines(include):
        text = (ROOT / include[1]).read_text().splitlines(keepends=True)
        return "".join(text[int(include[2] or 1) - 1 :])

    code = re.sub(rf"^{found[2]}", "", found[3], flags=re.MULTILINE)
    return INCLUDED.sub(lines, code)


def blocks(page):
    """(line, code, reason not to run it or None) of every Python block of a page."""
    text = page.read_text()
    return [(text.count("\n", 0, found.start(3)), source(found), found[1]) for found in BLOCK.finditer(text)]


def run(page):
    """Run the blocks of a page in order, in one namespace; what happened to each."""
    scope, outcomes, missing = {"__name__": "__page__"}, [], None
    for line, code, reason in blocks(page):
        if reason is not None:
            outcomes.append(f"not run: {reason}")
            continue
        if code.strip() == QUICKSTART:  # twenty seconds on a slow machine, and on two pages
            outcomes.append("run by tests/test_package.py")
            continue
        name = f"{page.name}:{line}"
        linecache.cache[name] = (len(code), None, code.splitlines(keepends=True), name)  # for the traceback
        try:
            exec(compile(code, name, "exec"), scope)
        except ModuleNotFoundError as error:
            if error.name not in OPTIONAL:
                raise
            missing = error.name
            outcomes.append(f"no {missing} here")
        except NameError:  # of a block that did not run
            if missing is None:
                raise
            outcomes.append(f"no {missing} here")
        else:
            outcomes.append("run")
    return outcomes


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page)], ids=lambda page: page.stem)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")  # of other libraries
def test_the_blocks_of_a_page_run_as_they_stand(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # some blocks save files
    dtype = torch.get_default_dtype()
    try:
        with torch.random.fork_rng(), redirect_stdout(StringIO()):
            torch.manual_seed(0)
            outcomes = run(page)
    finally:
        torch.set_default_dtype(dtype)
    print(f"{page.name:22} {len(outcomes):2} blocks, {outcomes.count('run'):2} run")
    for outcome in outcomes:
        if outcome != "run":
            print(f"{'':22} {outcome}")
    assert len(outcomes) == page.read_text().count("```python\n")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_code_is_not_cut_off(page):
    """No line of a Python block is wider than what the page shows; included scripts scroll."""
    for line, code, _ in blocks(page):
        for i, text in enumerate(code.splitlines(), 1):
            if not INCLUDED.search(page.read_text().splitlines()[line]):
                assert len(text) <= COLUMNS, f"{page.name}:{line + i}: {len(text)} columns"


def test_parameter_lists_of_the_api_name_what_there_is():
    """docs/build/parameters.toml has each parameter of a function, in the order of its signature."""
    described = tomllib.loads((DOCS / "build" / "parameters.toml").read_text())
    for path, parameters in described.items():
        module, _, name = path.rpartition(".")
        function = getattr(importlib.import_module(module), name)
        assert list(parameters) == list(inspect.signature(function).parameters), path
    public = {name for name in ghor.__all__ if inspect.isfunction(getattr(ghor, name))} - {"levi_civita"}
    assert public <= {path.rpartition(".")[2] for path in described}


def test_powers_and_indices_in_the_text_become_small_letters_and_code_stays():
    page = runpy.run_path(str(DOCS / "build" / "katex.py"))["on_page_content"]
    for plain, made in {
        "Y^T Y = I, Lambda^-1": "Y<sup>T</sup> Y = I, Lambda<sup>-1</sup>",
        "-x_0^2 + x_s^T x_s": "-x<sub>0</sub><sup>2</sup> + x<sub>s</sub><sup>T</sup> x<sub>s</sub>",
        "sum_j T_ij^2 v_j": "sum<sub>j</sub> T<sub>ij</sub><sup>2</sup> v<sub>j</sub>",
        "(I - W/2)^-1, ||X||_F, n^(1/16)": "(I - W/2)<sup>-1</sup>, ||X||<sub>F</sub>, n<sup>1/16</sup>",
    }.items():
        assert page(f"<p>{plain}</p>") == f"<p>{made}</p>"
    for kept in (
        "<p><code>Y^T</code></p>",
        "<pre>x_0</pre>",
        "<p>max_angle, __all__, update_section, ghor.c_x</p>",
        '<a href="x_0">y</a>',
    ):
        assert page(kept) == kept

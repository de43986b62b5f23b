"""What would be published: the files of wheel and sdist, what they say of themselves, links, versions,
linting."""

import email
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import ghor

ROOT = Path(__file__).parents[1]
SOURCES = [p for p in (ROOT / "src").rglob("*") if p.is_file() and "__pycache__" not in p.parts]


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """Wheel and sdist, by the build backend itself: no environment is made and nothing is fetched."""
    pytest.importorskip("hatchling")
    folder = tmp_path_factory.mktemp("dist")
    script = (
        f"from hatchling.build import *; print(build_wheel({str(folder)!r}), build_sdist({str(folder)!r}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return [folder / name for name in done.stdout.split()]


def test_the_wheel_has_the_packages_and_nothing_else(built):
    names = set(zipfile.ZipFile(built[0]).namelist())
    info = f"ghor-{ghor.__version__}.dist-info"
    sources = {p.relative_to(ROOT / "src").as_posix() for p in SOURCES if "egg-info" not in str(p)}
    assert names == sources | {f"{info}/{n}" for n in ("METADATA", "WHEEL", "RECORD", "entry_points.txt")} | {
        f"{info}/licenses/LICENSE"
    }
    assert {"ghor/py.typed", "ghor/adapters.py", "ghor_lab/report.html"} <= names


def test_the_sdist_has_what_builds_and_tests_it(built):
    with tarfile.open(built[1]) as archive:
        names = {n.partition("/")[2] for n in archive.getnames()}
    assert {"pyproject.toml", "README.md", "LICENSE", "CITATION.cff", "hatch_build.py", "Makefile"} <= names
    assert {"tests/test_release.py", "docs/index.md", "examples/quickstart.py", "src/ghor/py.typed"} <= names
    unwanted = ("runs/", "results/", ".venv", "site/", ".git/", ".ci/")
    assert not [n for n in names if n.startswith(unwanted) or "__pycache__" in n]


def test_the_metadata(built):
    with zipfile.ZipFile(built[0]) as wheel:
        (name,) = [n for n in wheel.namelist() if n.endswith("METADATA")]
        metadata = email.message_from_string(wheel.read(name).decode())
        (entry,) = [n for n in wheel.namelist() if n.endswith("entry_points.txt")]
        assert "ghor = ghor_lab:main" in wheel.read(entry).decode()
    assert (metadata["Name"], metadata["Version"]) == ("ghor", ghor.__version__)
    assert metadata["License-Expression"] == "MIT"
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert metadata.get_payload().startswith("# ghor")
    assert any(url.startswith("Paper, https://arxiv.org") for url in metadata.get_all("Project-URL"))
    required = [r for r in metadata.get_all("Requires-Dist") if "extra" not in r]
    assert len(required) == 1
    assert required[0].startswith("torch")


def test_twine_has_no_objection(built):
    pytest.importorskip("twine")
    command = [sys.executable, "-m", "twine", "check", "--strict", *map(str, built)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert done.stdout.count("PASSED") == 2


def test_links_of_the_readme_become_absolute():
    """Those that the package index could not follow: all, once [project.urls] names the repository."""
    pytest.importorskip("hatchling")
    scope = {"__name__": "hatch_build"}
    exec((ROOT / "hatch_build.py").read_text(), scope)
    readme = (ROOT / "README.md").read_text()
    text = scope["absolute"](readme, "https://example.org/ghor/", "main")
    relative = re.findall(r"\]\((?!https?:|#)([^)]*)\)", readme)
    assert relative
    assert not re.findall(r"\]\((?!https?:|#)([^)]*)\)", text)
    for path in relative:
        assert f"(https://example.org/ghor/blob/main/{path})" in text or f"/raw/main/{path})" in text
        assert (ROOT / path.partition("#")[0]).exists(), path


def test_the_citation_has_the_version_and_the_paper():
    text = (ROOT / "CITATION.cff").read_text()
    assert re.search(r"^version: (.*)$", text, re.MULTILINE)[1] == ghor.__version__
    assert "arXiv:2305.16901" in text


def test_a_folder_of_runs_does_not_change_the_lint(tmp_path):
    """`make demo` writes runs/ beside tests/, and tests/lab/ has a runs.py: imports are sorted as before."""
    pytest.importorskip("ruff")
    (tmp_path / "runs").mkdir()
    (tmp_path / "tests").mkdir()
    (tmp_path / "src").symlink_to(ROOT / "src")
    (tmp_path / "pyproject.toml").write_text((ROOT / "pyproject.toml").read_text())
    for path in (ROOT / "tests" / "lab").glob("*.py"):
        (tmp_path / "tests" / path.name).write_text(path.read_text())
    command = [sys.executable, "-m", "ruff", "check", "--no-cache", "--select", "I", "tests"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout

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


def build(kind, source, folder):
    """A wheel or an sdist, by the build backend itself: no environment is made and nothing is fetched."""
    script = f"from hatchling.build import *; print(build_{kind}({str(folder)!r}))"
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=source, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return folder / done.stdout.strip()


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """What is published: the sdist, and the wheel that is built from it, as `python -m build` does."""
    pytest.importorskip("hatchling")
    folder = tmp_path_factory.mktemp("dist")
    sdist = build("sdist", ROOT, folder)
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    return [build("wheel", folder / sdist.name.removesuffix(".tar.gz"), folder), sdist]


def metadata(wheel):
    """The wheel's description of itself."""
    with zipfile.ZipFile(wheel) as archive:
        return email.message_from_bytes(archive.read(f"ghor-{ghor.__version__}.dist-info/METADATA"))


def test_the_wheel_is_the_library(built):
    info = f"ghor-{ghor.__version__}.dist-info"
    files = {f"{info}/{name}" for name in ("METADATA", "WHEEL", "RECORD", "licenses/LICENSE")}
    sources = {p.relative_to(ROOT / "src").as_posix() for p in SOURCES}
    assert set(zipfile.ZipFile(built[0]).namelist()) == files | sources
    assert {"ghor/py.typed", "ghor/adapters/__init__.py"} <= sources
    assert {name.split("/")[0] for name in sources} == {"ghor"}


def test_the_lab_is_a_project_of_its_own(tmp_path):
    """It has the command `ghor`, and asks for the library."""
    pytest.importorskip("hatchling")
    with zipfile.ZipFile(build("wheel", ROOT / "lab", tmp_path)) as archive:
        names = archive.namelist()
        entry, about = (
            archive.read(next(name for name in names if name.endswith(end))).decode()
            for end in ("entry_points.txt", "METADATA")
        )
    assert "ghor = ghor_lab:main" in entry
    assert "Requires-Dist: ghor\n" in about
    assert {name.split("/")[0] for name in names if "dist-info" not in name} == {"ghor_lab"}


def test_the_sdist_has_what_the_wheel_is_built_from(built):
    with tarfile.open(built[1]) as archive:
        names = {n.partition("/")[2] for n in archive.getnames()}
    others = {"pyproject.toml", "README.md", "LICENSE", "CITATION.cff", "CHANGELOG.md"}
    assert names == {p.relative_to(ROOT).as_posix() for p in SOURCES} | others | {".gitignore", "PKG-INFO"}


def test_the_metadata(built):
    found = metadata(built[0])
    assert (found["Name"], found["Version"]) == ("ghor", ghor.__version__)
    assert found["License-Expression"] == "MIT"
    assert found["Description-Content-Type"] == "text/markdown"
    assert found.get_payload().startswith("# ghor")
    assert any(url.startswith("Paper, https://arxiv.org") for url in found.get_all("Project-URL"))
    required = [line for line in found.get_all("Requires-Dist") if "extra ==" not in line]
    assert len(required) == 1
    assert required[0].startswith("torch")
    for version in ("3.11", "3.12", "3.13", "3.14"):
        assert f"Programming Language :: Python :: {version}" in found.get_all("Classifier")


def test_twine_has_no_objection(built):
    pytest.importorskip("twine")
    command = [sys.executable, "-m", "twine", "check", "--strict", *map(str, built)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert done.stdout.count("PASSED") == 2


def test_the_citation_has_the_version_and_the_paper():
    text = (ROOT / "CITATION.cff").read_text()
    assert re.search(r"^version: (.*)$", text, re.MULTILINE)[1] == ghor.__version__
    assert "arXiv:2305.16901" in text

"""The files around the code: workflows and forms that are valid, and agree with the project."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import ghor

ROOT = Path(__file__).parents[1]
FORMS = ROOT / ".github" / "ISSUE_TEMPLATE"
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

SCHEMAS = {
    "vendor.github-workflows": WORKFLOWS,
    "vendor.github-issue-forms": [FORMS / "bug.yml", FORMS / "space.yml"],
    "vendor.github-issue-config": [FORMS / "config.yml"],
    "vendor.dependabot": [ROOT / ".github" / "dependabot.yml"],
    "vendor.citation-file-format": [ROOT / "CITATION.cff"],
}


def workflow(name):
    yaml = pytest.importorskip("yaml")
    return yaml.safe_load((ROOT / ".github" / "workflows" / f"{name}.yml").read_text())


@pytest.mark.parametrize("schema", SCHEMAS)
def test_files_follow_their_schemas(schema):
    pytest.importorskip("check_jsonschema")
    command = [
        sys.executable,
        "-m",
        "check_jsonschema",
        "--builtin-schema",
        schema,
        *map(str, SCHEMAS[schema]),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_every_supported_python_is_tested_with_the_oldest_and_the_newest_torch():
    matrix = workflow("tests")["jobs"]["library"]["strategy"]["matrix"]
    classified = [c.split(" :: ")[-1] for c in PROJECT["classifiers"] if re.search(r"Python :: 3\.\d", c)]
    assert matrix["python"] == classified
    assert PROJECT["requires-python"] == f">={classified[0]}"
    oldest = re.search(r"torch>=(\d+\.\d+)", PROJECT["dependencies"][0])[1]
    assert [version.rpartition(".")[0] for version in matrix["torch"]] == [oldest, ""]
    assert matrix["torch"][1] == "newest"


def test_what_workflows_run_is_there():
    """Targets of the Makefile, scripts, and other workflows."""
    targets = set(re.findall(r"^([a-z-]+):.*##", (ROOT / "Makefile").read_text(), re.MULTILINE))
    made = set()
    for path in WORKFLOWS:
        text = path.read_text()
        made |= set(re.findall(r"run: make ([a-z-]+)", text))
        for script in re.findall(r"python ([\w/]+\.py)|uses: \./([\w./-]+)", text):
            assert (ROOT / "".join(script)).is_file(), f"{path.name}: {script}"
    assert {"test", "test-all", "test-torch", "lint", "docs"} <= made <= targets


def test_workflows_may_read_and_only_publishing_more():
    for path in WORKFLOWS:
        found = workflow(path.stem)
        assert found["permissions"] == {"contents": "read"}, path.name
        more = {name: job["permissions"] for name, job in found["jobs"].items() if "permissions" in job}
        allowed = {"release": {"publish": {"id-token": "write"}}, "docs": {"publish": {"contents": "write"}}}
        assert more == allowed.get(path.stem, {})


def test_a_release_waits_for_tests_and_has_the_library_alone():
    jobs = workflow("release")["jobs"]
    assert set(jobs["publish"]["needs"]) == {"tests", "lint", "build"}
    commands = [step.get("run", "") for step in jobs["build"]["steps"]]
    assert "python -m build" in commands  # the wheel comes from the sdist, which leaves the lab out
    check = next(command for command in commands if command.startswith("grep"))
    for version, code in ((ghor.__version__, 0), ("9.9.9", 1)):
        env = {"GITHUB_REF_NAME": f"v{version}", "PATH": "/usr/bin:/bin"}
        assert subprocess.run(["bash", "-c", check], cwd=ROOT, env=env, check=False).returncode == code

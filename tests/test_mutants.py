"""The list of guards follows the code; `make mutants` takes them out."""

import ast

import pytest
from guards import MUTANTS, SOURCE
from mutants import ROOT


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_guard_stands_once_in_its_file_and_can_be_taken_out(mutant):
    source = (ROOT / mutant.path).read_text()
    without = mutant.applied(source)
    assert without != source
    compile(without, mutant.path, "exec")


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_the_tests_that_miss_it_are_there(mutant):
    for node in mutant.nodes():
        file, _, test = node.partition("::")
        names = {f.name for f in ast.parse((ROOT / file).read_text()).body if isinstance(f, ast.FunctionDef)}
        assert names >= {test.partition("[")[0]} - {""}, f"{file} has no {test}"


def test_guards_are_listed_for_every_room():
    """Names are unique, and no folder of the library is without."""
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)
    rooms = {mutant.path.relative_to(SOURCE).parts[0] for mutant in MUTANTS}
    files = {"linalg.py", "adapters.py"}
    assert rooms >= {"_torch", "constraints", "lifting", "optim", "solve", "spaces"} | files

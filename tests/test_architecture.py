"""The architecture that `ls src/ghor` shows: few rooms, imports in one direction, no cycle, no class with one
heir."""

import ast
from graphlib import TopologicalSorter
from pathlib import Path

import ghor

ROOT = Path(ghor.__file__).parent

# A room imports from itself and from those before it.
ROOMS = ["_torch", "linalg", "retraction", "spaces", "constraints", "lifting", "solve", "optim"]
ROOMS += ["baselines", "adapters", "interop"]


def modules() -> dict[str, Path]:
    """Every module of the package, by name."""
    found = {}
    for path in sorted(ROOT.rglob("*.py")):
        parts = ("ghor", *path.relative_to(ROOT).with_suffix("").parts)
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports(path: Path, known: set[str]) -> set[str]:
    """The modules of ghor that a file imports, also inside functions and for type checkers."""
    out = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            out |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name} has a relative import"
            submodules = {f"{node.module}.{alias.name}" for alias in node.names} & known
            out |= submodules or {node.module}
    return {name for name in out if name == "ghor" or name.startswith("ghor.")}


GRAPH = {name: imports(path, set(modules())) for name, path in modules().items()}


def test_at_most_13_names_and_the_marker_of_types():
    names = {p.name for p in ROOT.iterdir() if p.name != "__pycache__"}
    assert len(names - {"py.typed"}) <= 13
    assert {n.removesuffix(".py") for n in names} == {*ROOMS, "__init__", "py.typed"}


def test_imports_point_to_earlier_rooms():
    def room(module: str) -> int:
        return ROOMS.index(module.split(".")[1])

    for module, others in GRAPH.items():
        if module != "ghor":
            assert "ghor" not in others, f"{module} imports the package itself"
            wrong = [other for other in others if room(other) > room(module)]
            assert wrong == [], f"{module} imports {wrong}"


def test_no_cycle_of_imports():
    TopologicalSorter(GRAPH).prepare()  # raises CycleError with the modules


def test_no_class_is_there_for_a_single_heir():
    """A base class of ours that has one subclass, and is not public, is two halves of one class."""
    heirs: dict[str, list[str]] = {}
    ours = set()
    for path in modules().values():
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef):
                ours.add(node.name)
                for base in node.bases:
                    if isinstance(base, ast.Name):
                        heirs.setdefault(base.id, []).append(node.name)
    public = set(ghor.__all__) | set(ghor.optim.__all__)
    # a named optimizer is its rule (in torch, or with an underscore) and Lifted; a stack may be sharded
    allowed = public | {"_PaperAdam", "_Muon", "Stack", "Lifted"}
    assert {name: heirs[name] for name in (ours & set(heirs)) - allowed if len(heirs[name]) == 1} == {}

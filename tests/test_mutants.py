"""The tool that leaves things out, on a source of its own."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from functools import partial
from pathlib import Path

import pytest
from mutants import ROOT
from mutations import mutants


def made(source: str, kind: str) -> list[str]:
    """The bodies of f(...) that this kind makes of it."""
    text = f"def f(*_):\n{textwrap.indent(textwrap.dedent(source).strip(), '    ')}\n"
    found = [m for m in mutants("ghor/some.py", text.encode()) if m.kind == kind]
    bodies = [m.applied(text.encode()).decode() for m in found]
    for body in bodies:
        compile(body, "some.py", "exec")
    return [textwrap.dedent(body.partition("\n")[2]).strip() for body in bodies]


@pytest.mark.parametrize(
    ("kind", "source", "without"),
    [
        ("never", "if a > 1:\n    raise ValueError(b or c)", ["if False:\n    raise ValueError(b or c)"]),
        ("never", "if a: b\nelif c: d", ["if False: b\nelif c: d", "if a: b\nelif False: d"]),
        ("never", "while a:\n    b()", ["while False:\n    b()"]),
        ("always", "if a:\n    return b\nreturn c", ["if True:\n    return b\nreturn c"]),
        ("always", "if a:\n    raise b", []),
        ("always", "if a is not None:\n    return b", []),
        ("branch", "x = a if c else b", ["x = (a)", "x = (b)"]),
        ("branch", "x = a if c is None else b(c)", ["x = (a)"]),
        ("branch", "x = a if c is not None else b", ["x = (b)"]),
        ("branch", "x = torch.where(c, a, 0)", ["x = (a)"]),
        ("operand", "return a and b > c", ["return ((b > c))", "return ((a))"]),
        ("operand", "a or b or c", ["((b) or (c))", "((a) or (c))", "((a) or (b))"]),
        ("operand", "return a is not None and a.b", ["return ((a is not None))"]),
        ("operand", "x = a & (b | ~c)", ["x = (a)", "x = (b | ~c)", "x = a & ((b))", "x = a & ((~c))"]),
        ("operand", "x: A | None = a", []),
        ("limit", "return (a / b).clamp_min(1).log()", ["return (a / b).log()"]),
        ("limit", "return torch.nan_to_num(a, 0)", ["return (a)"]),
        ("limit", "return max(a, 1e-3)", ["return (a)"]),
        ("limit", "return min(a, b)", ["return (a)", "return (b)"]),
        ("filter", "return [a for a in b if c]", ["return [a for a in b if True]"]),
        ("repair", "x = project(\n    x,\n)  # why", ["pass  # why"]),
        ("repair", "x = y\ni += 1\ni += x", ["x = y\ni += 1\npass"]),
        ("effect", "check(a)\nself.x = a", ["pass\nself.x = a", "check(a)\npass"]),
        ("effect", "x[i] = b\ndel x[i]", ["pass\ndel x[i]", "x[i] = b\npass"]),
        ("effect", "if a:\n    check(a)", []),
        ("context", "with a, b() as c: d", ["with __import__('contextlib').nullcontext(), b() as c: d"]),
        ("context", "@a(1)\n@property\ndef g(): pass", ["@(lambda f: f)\n@property\ndef g(): pass"]),
        ("rescue", "try:\n    a()\nexcept E:\n    b()", ["try:\n    a()\nexcept E:\n    raise"]),
        ("guard", "return project(x, y)", []),
        ("guard", "return f(x, y, 1)  # guard: a", ["return (x)  # guard: a", "return (y)  # guard: a"]),
        ("guard", "x = y.clone()  # guard: y changes", ["x = (y)  # guard: y changes"]),
        ("guard", "# guard: a\nx = y + y.mT", ["# guard: a\nx = (y)", "# guard: a\nx = (y.mT)"]),
        ("guard", "x = y  # guard: found before", ["pass  # guard: found before"]),
        ("guard", "if a:\n    f(x)  # guard: b", ["if a:\n    pass  # guard: b"]),
        ("always", "if a:  # equivalent(always): slow\n    return b", []),
        ("never", "if a:  # equivalent(always): b\n    c", ["if False:  # equivalent(always): b\n    c"]),
        ("never", "# equivalent: the same\nif a:\n    return b", []),
    ],
)  # fmt: skip
def test_what_each_kind_leaves_out(kind, source, without):
    assert made(source, kind) == without


def test_a_decorator_is_left_out():
    (m,) = mutants("ghor/some.py", b"class A:\n    @no_grad()\n    @property\n    def g(self): pass\n")
    assert (m.kind, m.function) == ("context", "A.g")


def test_letters_of_two_bytes_do_not_shift_anything():
    assert made("x = 'Stäbe', a if c else b", "branch") == ["x = 'Stäbe', (a)", "x = 'Stäbe', (b)"]


@pytest.mark.parametrize("marker", ["guard", "equivalent", "equivalent(never)"])
def test_a_marker_that_says_nothing_is_an_error(marker):
    with pytest.raises(SystemExit, match=r"src/ghor/some\.py:1 is marked"):
        mutants("ghor/some.py", f"def f(x):  # {marker}: once there was something\n    return x\n".encode())


def test_every_mutant_of_the_library_is_python():
    """One of each kind in each file: a change that does not compile would count as caught."""
    for path in (ROOT / "src" / "ghor").rglob("*.py"):
        source = path.read_bytes()
        for m in {m.kind: m for m in mutants(path.name, source)}.values():
            compile(m.applied(source), str(path), "exec")


# The whole, on a library with three guards, of which two are missed

SOURCE = """
def root(x):
    if x < 0:
        raise ValueError("negative")
    while x > 100:
        x = x / 2
    return max(x, 1) ** 0.5


def unused(x):
    return abs(x or 1)
"""
TESTS = """
import pytest
from ghor import root


def test_root():
    assert root(4) == 2


def test_of_a_large_number():
    assert root(200) == 10


def test_of_a_negative_number():
    with pytest.raises(ValueError, match="negative"):
        root(-1)
"""


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    for folder in ("src/ghor", "tests", "tmp"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "src/ghor/__init__.py").write_text(SOURCE)
    (tmp_path / "tests/test_root.py").write_text(TESTS)
    (tmp_path / "pyproject.toml").write_text(
        "[tool.pytest.ini_options]\naddopts = '-p no:hypothesispytest'\n"
    )
    return tmp_path


def start(root: Path, *arguments: str) -> subprocess.Popen:
    call = f"""
import pathlib, sys, mutants
mutants.PRELOADED, mutants.PATIENCE = [], 3
sys.exit(mutants.main({arguments}, pathlib.Path({str(root)!r})))"""
    env = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST")}
    env |= {"PYTHONPATH": str(ROOT / "tests"), "TMPDIR": str(root / "tmp")}
    return subprocess.Popen(
        [sys.executable, "-c", call],
        cwd=root,
        env=env,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        # a shell in the background starts its processes with Ctrl-C ignored
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
    )


def finished(root: Path, *arguments: str) -> tuple[int, str]:
    process = start(root, "-j", "2", *arguments)
    out, err = process.communicate(timeout=100)
    assert not list((root / "tmp").iterdir()), "folders are left"
    assert (root / "src/ghor/__init__.py").read_text() == SOURCE
    return process.returncode, out.strip() + (err if process.returncode not in (0, 1) else "")


@pytest.mark.slow
def test_what_is_missed_is_named(tiny):
    code, out = finished(tiny)
    assert code == 1
    assert (
        "src/ghor/__init__.py:7 root (limit)\n    -    return max(x, 1) ** 0.5\n    +    return (x) ** 0.5\n"
        in out
    )
    assert "survived 2 tests" in out
    assert "unused (operand)" in out
    assert "no test runs it" in out
    assert "(never)" not in out  # both are caught
    assert out.endswith("mutants: 6, caught: 3, survived: 3")  # `x = x / 2` by its endless loop


def test_what_is_caught_is_not_named(tiny):
    assert finished(tiny, "--only", "never") == (0, "mutants: 2, caught: 2, survived: 0")


def test_only_what_has_changed_since_a_revision(tiny):
    for command in ("init -q", "add src", "-c user.name=a -c user.email=a@b.c commit -qm a"):
        subprocess.run(["git", *command.split()], cwd=tiny, check=True)
    (tiny / "src/ghor/__init__.py").write_text(SOURCE.replace('"negative"', '"below zero"'))
    process = start(tiny, "--since", "HEAD", "--list")
    out, _ = process.communicate(timeout=100)
    assert "mutants: 1" in out
    assert "root (never)" in out


@pytest.mark.slow
def test_what_was_caught_is_not_tried_again_and_what_survived_is_when_there_is_a_test(tiny):
    finished(tiny)
    (tiny / "tests/test_root.py").write_text(f"{TESTS}\n\ndef test_small():\n    assert root(0.5) == 1\n")
    process = start(tiny)
    out, err = process.communicate(timeout=100)
    assert "mutants: 6, caught: 4, survived: 2" in out
    assert "] 3/3" in err


def test_tests_that_fail_by_themselves_judge_nothing(tiny):
    (tiny / "tests/test_root.py").write_text(TESTS.replace("== 2", "== 3"))
    code, out = finished(tiny, "--only", "never")
    assert "test_root fails with nothing left out" in out
    assert code == 0


def test_an_interrupt_leaves_nothing_behind(tiny):
    (tiny / "tests/test_root.py").write_text(
        TESTS + "\n\ndef test_slow():\n    __import__('time').sleep(60)\n"
    )
    process = start(tiny)
    end = time.monotonic() + 60
    while not list((tiny / "tmp").glob("*/*/src")) and process.poll() is None and time.monotonic() < end:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert "KeyboardInterrupt" in err
    assert not list((tiny / "tmp").iterdir())
    assert (tiny / "src/ghor/__init__.py").read_text() == SOURCE

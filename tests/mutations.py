"""The kinds of mutants: what is left out of a source, found in its syntax tree.

    never      if c:  while c:                  is never done
    always     if c:  with an else or a return  is always done
    branch     a if c else b    where(c, a, b)  is a, is b
    operand    a and b    a or b    a & b       is a, is b
    limit      x.clamp(...)     max(x, 1)       is x
    filter     [... for x in xs if c]           takes every x
    repair     x = f(x)    x += y               is left out
    effect     f(x)    a.b = c    a[i] = c      is left out (not what __init__ sets)
    context    with f():    @decorator          is left out
    rescue     except E:                        raises again
    guard      x = f(a, b)  # guard: why        is x = a, is x = b; what has no such parts is left out

A line that ends in `# equivalent: why` has no mutants, in `# equivalent(always): why` none of that kind;
where there is no room, the comment stands above its line. A marker at a line without mutants is an error.
"""

from __future__ import annotations

import ast
import difflib
import io
import re
import tokenize
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

LIMITS = re.compile(r"(clamp|clamp_min|clamp_max|nan_to_num|masked_fill)_?")
STRUCTURE = re.compile(
    r"property|staticmethod|classmethod|abstract|overload|dataclass|cached_|contextmanager"
)
MARKER = re.compile(r"# (guard|equivalent(?:\((\w+)\))?): \S")
OF_TYPE = re.compile(r" is (not )?None$|^isinstance\(")  # nothing runs without it
WAYS_OUT = (ast.Return, ast.Continue, ast.Break)
WORDS, SKIPPED = (ast.Raise, ast.JoinedStr), {"annotation", "returns", "decorator_list"}
SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


class Mutant(NamedTuple):
    """The bytes from `start` to `end` of a file become `new`."""

    path: str  # from src/
    line: int
    function: str
    kind: str
    start: int
    end: int
    new: str
    rows: range  # a test that runs one of these lines is likely to see it

    def applied(self, source: bytes) -> bytes:
        return source[: self.start] + self.new.encode() + source[self.end :]

    def name(self) -> str:
        return f"src/{self.path}:{self.line} {self.function or 'module'} ({self.kind})"

    def shown(self, source: bytes) -> str:
        """Its name and its lines, before and after."""
        old, new = source.decode().splitlines(), self.applied(source).decode().splitlines()
        diff = difflib.unified_diff(old, new, n=0, lineterm="")
        differ = [line for line in diff if not line.startswith(("---", "+++", "@@"))]
        return "\n    ".join([self.name(), *differ])


def changes(node: ast.AST, text: Callable[[Any], str]) -> Iterator[tuple[str, ast.AST, str]]:
    """Kind, what is replaced, and by what."""

    def one_of(kind: str, *values: ast.expr) -> Iterator[tuple[str, ast.AST, str]]:
        yield from ((kind, node, f"({text(v)})") for v in values if not isinstance(v, ast.Constant))

    match node:
        case ast.If(test=c, body=[*_, last], orelse=other) if text(c) != "TYPE_CHECKING":
            yield "never", c, "False"
            if (other or isinstance(last, WAYS_OUT)) and not OF_TYPE.search(text(c)):
                yield "always", c, "True"
        case ast.While(test=c) if not isinstance(c, ast.Constant):
            yield "never", c, "False"
        case ast.IfExp(test=c, body=a, orelse=b):
            none = re.search(r" is (not )?None$", text(c))  # the other value would not exist
            yield from one_of("branch", *([a, b] if not none else [b] if none[1] else [a]))
        case ast.Call(func=ast.Attribute(attr="where"), args=[_, a, b]):
            yield from one_of("branch", a, b)
        case ast.Call(func=ast.Attribute(attr=name, value=x), args=args) if LIMITS.fullmatch(name):
            yield from one_of("limit", args[0] if text(x) == "torch" else x)
        case ast.Call(func=ast.Name(id="max" | "min"), args=[a, b]) if not isinstance(b, ast.Starred):
            yield from one_of("limit", a, b)
        case ast.BoolOp(op=op, values=values):
            for v in values:
                if not OF_TYPE.search(text(v)):
                    rest = (f"({text(w)})" for w in values if w is not v)
                    yield "operand", node, f"({(' and ' if isinstance(op, ast.And) else ' or ').join(rest)})"
        case ast.BinOp(op=ast.BitAnd() | ast.BitOr(), left=a, right=b):
            yield from one_of("operand", a, b)
        case ast.comprehension(ifs=ifs):
            yield from (("filter", c, "True") for c in ifs)
        case ast.Assign(targets=[ast.Name(id=x)], value=v):
            if x in {n.id for n in ast.walk(v) if isinstance(n, ast.Name)}:
                yield "repair", node, "pass"
        case ast.AugAssign(value=v) if not isinstance(v, ast.Constant):  # no loop without end
            yield "repair", node, "pass"
        case ast.Expr(value=ast.Call()) | ast.Delete():
            yield "effect", node, "pass"
        case ast.Assign(
            targets=[ast.Attribute() | ast.Subscript() | ast.Tuple([ast.Attribute() | ast.Subscript(), *_])]
        ):
            yield "effect", node, "pass"
        case ast.withitem(context_expr=c, optional_vars=None):
            yield "context", c, "__import__('contextlib').nullcontext()"
        case ast.FunctionDef(decorator_list=decorators):
            yield from (("context", d, "(lambda f: f)") for d in decorators if not STRUCTURE.search(text(d)))
        case ast.ExceptHandler(body=[first, *_]) if text(first) != "raise":
            yield "rescue", first, "raise"


def parts(node: ast.stmt) -> list[ast.expr]:
    """What a value is made of, where a comment asks to leave out what is done with it."""
    match getattr(node, "value", None):
        case ast.Call(func=f, args=args):
            found = [f.value, *args] if isinstance(f, ast.Attribute) else args
        case ast.BinOp(left=a, right=b):
            found = [a, b]
        case ast.Subscript(value=a):
            found = [a]
        case _:
            found = []
    return (
        []
        if isinstance(node, ast.Expr)
        else [v for v in found if not isinstance(v, ast.Constant | ast.Starred)]
    )


def sets_self(node: ast.AST) -> bool:
    return isinstance(node, ast.Assign) and ast.unparse(node).startswith("self.")


def mutants(path: str, source: bytes) -> list[Mutant]:
    """All mutants of a file, in the order of its lines."""
    tree, starts = ast.parse(source), [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    comments = {
        t.start[0] + (not t.line[: t.start[1]].strip()): found  # alone on its line: of the next one
        for t in tokenize.tokenize(io.BytesIO(source).readline)
        if t.type == tokenize.COMMENT and (found := MARKER.match(t.string))
    }
    made: list[Mutant] = []
    used: set[int] = set()

    def span(n: Any) -> tuple[int, int]:
        return starts[n.lineno - 1] + n.col_offset, starts[n.end_lineno - 1] + n.end_col_offset

    def text(n: Any) -> str:
        return source[slice(*span(n))].decode()

    def add(kind: str, n: Any, new: str, function: str, first: int, last: int) -> None:
        marks = [line for line in range(n.lineno, n.end_lineno + 1) if line in comments]
        used.update(marks)
        if not any(comments[i][1].startswith("equivalent") and comments[i][2] in (None, kind) for i in marks):
            made.append(Mutant(path, n.lineno, function, kind, *span(n), new, range(first, last + 1)))

    def walk(node: Any, function: str, first: int, last: int, alone: bool) -> None:
        body: Any = getattr(node, "body", None)
        if isinstance(node, SCOPES):
            function = f"{function}.{node.name}".lstrip(".")
        if isinstance(node, ast.stmt):  # its own lines, not those below it
            first, last = node.lineno, max(node.lineno, body[0].lineno - 1) if body else node.end_lineno or 0
        for kind, n, new in changes(node, text):
            if kind in ("repair", "effect") and (
                alone or (function.endswith("__init__") and sets_self(node))
            ):
                continue
            within = (body[0].lineno, body[-1].end_lineno) if kind in ("never", "rescue") else (first, last)
            add(kind, n, new, function, *within)
        marks = (comments[i][1] for i in range(first, last + 1) if i in comments)
        if isinstance(node, ast.stmt) and not body and "guard" in marks:
            left: list[tuple[Any, str]] = [
                (getattr(node, "value", node), f"({text(v)})") for v in parts(node)
            ]
            for n, new in left or [(node, "pass")]:
                add("guard", n, new, function, first, last)
        if isinstance(node, ast.Call) and text(node.func) == "isinstance":  # A | B
            return
        for field, value in ast.iter_fields(node):
            below = value if isinstance(value, list) else [value]
            for child in below:
                if isinstance(child, ast.AST) and field not in SKIPPED and not isinstance(child, WORDS):
                    # a statement alone in its `if`: `never` leaves it out
                    walk(child, function, first, last, isinstance(node, ast.If) and below == [child])

    walk(tree, "", 1, 0, False)
    if lost := sorted(set(comments) - used):
        raise SystemExit(f"src/{path}:{lost[0]} is marked, and there is nothing to leave out")
    return sorted(made, key=lambda m: m.start)

"""A hook of mkdocs: KaTeX sets the formulas when the pages are built. Readers need no script and no network.

LaTeX stands between dollar signs. In plain formulas, those of docstrings included, powers and indices become
small letters: `Y^T`, `x_0`, `||X||_F`. Code is left alone.
"""

import html
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

MODULES = Path(sys.prefix) / "node_modules"
PACKAGES = ("katex@0.19.1", "iframe-worker@1.0.4")  # the second: search in pages that are opened from disk
FILES = ("katex/dist/katex.min.css", "katex/dist/fonts/*.woff2", "iframe-worker/shim/index.js")
RENDER = """
const katex = require(process.argv[1]), formulas = JSON.parse(require("fs").readFileSync(0, "utf8"))
console.log(JSON.stringify(formulas.map(([tex, displayMode]) => katex.renderToString(tex, {displayMode}))))
"""
GHOR = r"\mathfrak{g}^{\mathrm{hor}}"
TOKEN = re.compile(
    r'<(span|div) class="arithmatex">\\(?P<open>[(\[])(?P<tex>.*?)\\[)\]]</\1>'
    r"|<(code|pre|script|style|svg)\b.*?</\4>|<[^>]*>"  # stays as it is
    r"|(?P<ghor>\bg\^hor\b)"
    r"|(?<=[\w)\]|'])\^(?P<power>\([^()]*\)|[-+]?\w+|\*)"
    r"|(?P<base>(?<![\w.])(?:[A-Za-z]|sum|beta)|\|)_(?P<index>perp|\w{1,2})(?!\w)",
    re.DOTALL,
)


def on_files(files: Any, config: Any) -> Any:
    """Install what is missing, and give the site its part of it."""
    from mkdocs.structure.files import File  # here: the tests have no mkdocs

    if not all((MODULES / package.partition("@")[0]).exists() for package in PACKAGES):
        run("npm", "install", "--silent", "--no-save", "--prefix", sys.prefix, *PACKAGES)
    for path in (path for pattern in FILES for path in sorted(MODULES.glob(pattern))):
        name = path.relative_to(MODULES).as_posix()
        files.append(File.generated(config, name, abs_src_path=str(path)))
    return files


def on_page_content(text: str, **_: Any) -> str:
    """The page with its formulas set; one that KaTeX cannot read ends the build."""
    found = [m for m in TOKEN.finditer(text) if m["tex"] or m["ghor"]]
    formulas = [(html.unescape(m["tex"] or GHOR), m["open"] == "[") for m in found]
    command = ("node", "-e", RENDER, str(MODULES / "katex"))
    made = iter(json.loads(run(*command, given=json.dumps(formulas))) if formulas else [])

    def put(m: re.Match[str]) -> str:
        if m["tex"] or m["ghor"]:
            before = "&NoBreak;" if text[m.start() - 1] in "([" else ""
            after = "&NoBreak;" if text[m.end() : m.end() + 1] in {*")].,;:"} else ""
            # of what is marked so, the search keeps the letters
            return f"{before}<span data-search-exclude>{next(made)}</span>{after}"
        if m["power"]:
            return f"<sup>{m['power'].strip('()')}</sup>"
        return f"{m['base']}<sub>{m['index']}</sub>" if m["index"] else m[0]

    return TOKEN.sub(put, text)


def run(*command: str, given: str = "") -> str:
    """What a command of Node.js prints."""
    try:
        return subprocess.run(command, input=given, check=True, capture_output=True, text=True).stdout
    except FileNotFoundError:
        raise SystemExit(f"the formulas need Node.js; there is no {command[0]} here") from None
    except subprocess.CalledProcessError as error:
        raise SystemExit(f"{command[0]}: {error.stderr}") from None

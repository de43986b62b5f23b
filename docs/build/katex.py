"""A hook of mkdocs: KaTeX sets the formulas when the pages are built, so that no page needs a script or a network.

Between dollar signs stands LaTeX. Plain formulas, those of docstrings included, get their powers and indices as
small text: `Y^T`, `x_0`, `||X||_F`. Code is left alone.
"""

import html
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

MODULES = Path(sys.prefix) / "node_modules"
PACKAGES = ("katex@0.19.1", "iframe-worker@1.0.4")  # the second: the theme's search, on pages opened from disk
STYLE = "katex/dist/katex.min.css"
RENDER = """
const katex = require(process.argv[1]), formulas = JSON.parse(require("fs").readFileSync(0, "utf8"))
console.log(JSON.stringify(formulas.map(([tex, displayMode]) => katex.renderToString(tex, {displayMode}))))
"""
TOKEN = re.compile(
    r'<(span|div) class="arithmatex">\\(?P<open>[(\[])(?P<tex>.*?)\\[)\]]</\1>'
    r"|<(code|pre|script|style|svg)\b.*?</\4>|<[^>]*>"  # nothing to do there
    r"|(?P<ghor>\bg\^hor\b)"
    r"|(?<=[\w)\]|'])\^(?P<power>\([^()]*\)|[-+]?\w+|\*)"
    r"|(?P<base>(?<![\w.])(?:[A-Za-z]|sum|beta)|\|)_(?P<index>perp|\w{1,2})(?!\w)",
    re.DOTALL,
)


def on_files(files: Files, config: Any) -> Files:
    """Install what is missing; the site gets KaTeX's style and fonts."""
    if not all((MODULES / name.partition("@")[0]).exists() for name in PACKAGES):
        command = ["npm", "install", "--silent", "--no-save", "--prefix", sys.prefix, *PACKAGES]
        try:
            subprocess.run(command, check=True)
        except (OSError, subprocess.CalledProcessError) as error:
            raise PluginError(f"the formulas need npm, of Node.js: {error}") from error
    fonts = sorted((MODULES / "katex/dist/fonts").glob("*.woff2"))
    for path in (MODULES / STYLE, *fonts, MODULES / "iframe-worker/shim/index.js"):
        files.append(File.generated(config, str(path.relative_to(MODULES)), abs_src_path=str(path)))
    return files


def on_page_content(text: str, **_: Any) -> str:
    """The formulas of a page, set."""
    formulas = [formula(found) for found in TOKEN.finditer(text) if found["tex"] or found["ghor"]]
    made = iter(rendered(formulas) if formulas else [])

    def put(found: re.Match[str]) -> str:
        if found["tex"] or found["ghor"]:
            before, after = text[found.start() - 1], text[found.end() : found.end() + 1]
            glue = ["&NoBreak;" * (before in "(["), "&NoBreak;" * (after in tuple(")].,;:"))]
            return f"{glue[0]}<span data-search-exclude>{next(made)}</span>{glue[1]}"
        if found["power"]:
            return f"<sup>{found['power'].strip('()')}</sup>"
        return f"{found['base']}<sub>{found['index']}</sub>" if found["index"] else found[0]

    return TOKEN.sub(put, text)


def formula(found: re.Match[str]) -> tuple[str, bool]:
    """LaTeX, and whether it has a line of its own."""
    return (r"\mathfrak{g}^{\mathrm{hor}}", False) if found["ghor"] else (html.unescape(found["tex"]), found["open"] == "[")


def rendered(formulas: list[tuple[str, bool]]) -> list[str]:
    """HTML, made by KaTeX; a formula that it does not know ends the build."""
    command = ["node", "-e", RENDER, str(MODULES / "katex")]
    done = subprocess.run(command, input=json.dumps(formulas), capture_output=True, text=True, check=False)
    if done.returncode:
        raise PluginError(done.stderr)
    return json.loads(done.stdout)

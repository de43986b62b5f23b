"""Does every page of site/ fit a phone and two desktops? `make docs-check` asks a browser.

Nothing may be wider than its column unless it scrolls there. A table does not scroll on a desktop, and on a
phone it shows its first column of ghor. No word leaves its cell, no cell or table lies on the next.
"""

import html
import json
import re
import shutil
import subprocess
import sys
import tempfile
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

SITE = Path(__file__).parents[2] / "site"
SCRIPT = Path(__file__).with_suffix(".js").read_text()
WIDTHS = (390, 1280, 1920)
BROWSERS = ("chromium", "google-chrome", "chromium-browser")
SWITCHES = (
    "--headless --no-sandbox --disable-gpu --disable-background-networking --disable-component-update "
    "--disable-sync --no-first-run --hide-scrollbars --dump-dom --virtual-time-budget=600000"
)


class Quiet(SimpleHTTPRequestHandler):
    """Serves files, and says nothing."""

    def log_message(self, *_: object) -> None:
        pass


def main() -> None:
    """Print what does not fit; exit with 1 if anything does not."""
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    pages = sorted(path.relative_to(SITE).as_posix() for path in SITE.rglob("*.html"))
    if browser is None or not pages:
        sys.exit(f"needs one of {', '.join(BROWSERS)}, and the pages, of `make docs`")
    looking = SITE / "look.html"
    looking.write_text(f"<body><script>const PAGES = {pages}, WIDTHS = {[*WIDTHS]}\n{SCRIPT}</script>")
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(SITE)))
    Thread(target=server.serve_forever, daemon=True).start()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        address = f"http://127.0.0.1:{server.server_port}/look.html"
        command = [browser, *SWITCHES.split(), f"--user-data-dir={profile}", address]
        shown = subprocess.run(command, check=True, capture_output=True, text=True, timeout=600).stdout
    looking.unlink()
    found = json.loads(html.unescape(re.search("<pre>(.*)</pre>", shown, re.DOTALL)[1]))
    print(*found["faults"], sep="\n", end="\n" * bool(found["faults"]))
    print(f"{len(pages)} pages at {WIDTHS} px: {found['tables']} tables,", end=" ")
    print(f"{found['scroll']} scroll on a phone, {len(found['faults'])} faults")
    sys.exit(bool(found["faults"]))


if __name__ == "__main__":
    main()

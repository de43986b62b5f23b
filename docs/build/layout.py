"""Look at every page of site/ in a browser, as wide as a phone and two desktops: `make docs-check`.

Nothing may be wider than its column, unless it scrolls in a frame that shows it; a table of a desktop does not
scroll at all, one of a phone shows its column of ghor first. No word lies outside its cell, no cell on another.
"""

import json
import shutil
import subprocess
import sys
import tempfile
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

SITE = Path(__file__).parents[2] / "site"
BROWSERS = ("chromium", "google-chrome", "chromium-browser")
WIDTHS = (390, 1280, 1920)
LIMIT = 300  # seconds
LOOK = (Path(__file__).parent / "layout.js").read_text()


class Pages(SimpleHTTPRequestHandler):
    """The site, a page that looks at all others in a frame, and a place for what it has found."""

    def do_GET(self) -> None:
        if self.path != "/look":
            return super().do_GET()
        pages = sorted(str(path.relative_to(SITE)) for path in SITE.rglob("*.html"))
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.end_headers()
        self.wfile.write(
            f"<body><script>const PAGES = {pages}, WIDTHS = {[*WIDTHS]}\n{LOOK}</script>".encode()
        )

    def do_POST(self) -> None:
        self.server.found = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(204)
        self.end_headers()
        self.server.done.set()

    def log_message(self, *_: object) -> None:
        pass


def look() -> dict:
    """What the browser has found."""
    browser = next((path for name in BROWSERS if (path := shutil.which(name))), None)
    if browser is None:
        sys.exit(f"no browser here; looked for {', '.join(BROWSERS)}")
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Pages, directory=str(SITE))) as server:
        server.done = threading.Event()
        threading.Thread(target=server.serve_forever, daemon=True).start()
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
            switches = ["headless", "no-sandbox", "disable-gpu", "disable-background-networking"]
            switches += ["disable-component-update", "disable-sync", "no-first-run", "hide-scrollbars"]
            switches += ["remote-debugging-port=0", f"user-data-dir={profile}", "window-size=2000,1000"]
            command = [browser, *(f"--{s}" for s in switches), f"http://127.0.0.1:{server.server_port}/look"]
            running = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            came = server.done.wait(LIMIT)
            running.terminate()
            running.wait()
        server.shutdown()
    if not came:
        sys.exit(f"the browser has not answered within {LIMIT} s")
    return server.found


def main() -> None:
    """Print what is wrong; exit with 1 if anything is."""
    found = look()
    for fault in found["faults"]:
        print(fault)
    print(f"{found['pages']} pages at {' '.join(map(str, WIDTHS))} px: {found['tables']} tables seen,", end=" ")
    print(f"{found['scroll']} of them scroll on a phone; {len(found['faults'])} faults")
    sys.exit(bool(found["faults"]))


if __name__ == "__main__":
    main()

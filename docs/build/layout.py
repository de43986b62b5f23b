"""Does every page of site/ fit a phone and two desktops? `make docs-check` asks a browser.

Nothing may be wider than its column unless it scrolls there. A table does not scroll on a desktop, and on a
phone it shows its first column of ghor. No word leaves its cell, no cell or table lies on the next.
"""

import json
import shutil
import subprocess
import sys
import tempfile
from http.server import HTTPServer, SimpleHTTPRequestHandler
from pathlib import Path

HERE = Path(__file__).parent
SITE = HERE.parents[1] / "site"
PAGES = sorted(path.relative_to(SITE).as_posix() for path in SITE.rglob("*.html"))
WIDTHS = (390, 1280, 1920)
BROWSERS = ("chromium", "google-chrome", "chromium-browser")
LIMIT = 60  # seconds
SWITCHES = (
    "--headless --no-sandbox --disable-gpu --disable-background-networking --disable-component-update "
    "--disable-sync --no-first-run --hide-scrollbars --remote-debugging-port=0 --window-size=2000,1000"
)


class Handler(SimpleHTTPRequestHandler):
    """Serves the site, and /look, the page that measures all others and posts what it has found."""

    def __init__(self, *args: object) -> None:
        super().__init__(*args, directory=str(SITE))

    def do_GET(self) -> None:
        if self.path != "/look":
            return super().do_GET()
        script = f"const PAGES = {PAGES}, WIDTHS = {[*WIDTHS]}\n{(HERE / 'layout.js').read_text()}"
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.end_headers()
        self.wfile.write(f"<body><script>{script}</script>".encode())

    def do_POST(self) -> None:
        self.server.found = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(204)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


def main() -> None:
    """Print what does not fit; exit with 1 if anything does not."""
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None or not PAGES:
        sys.exit(f"needs one of {', '.join(BROWSERS)}, and the pages, of `make docs`")
    with (
        HTTPServer(("127.0.0.1", 0), Handler) as server,
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile,
    ):
        server.timeout, server.found = LIMIT, None
        address = f"http://127.0.0.1:{server.server_port}/look"
        command = [browser, *SWITCHES.split(), f"--user-data-dir={profile}", address]
        running = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        server.handle_timeout = lambda: sys.exit(f"the browser has been silent for {LIMIT} s")
        try:
            while server.found is None:
                server.handle_request()
        finally:
            running.terminate()
            running.wait()
    found = server.found
    print(*found["faults"], sep="\n", end="\n" * bool(found["faults"]))
    print(
        f"{len(PAGES)} pages at {', '.join(map(str, WIDTHS))} px: {found['tables']} tables measured,", end=" "
    )
    print(f"{found['scroll']} scroll on a phone, {len(found['faults'])} faults")
    sys.exit(bool(found["faults"]))


if __name__ == "__main__":
    main()

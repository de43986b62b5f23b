"""Add a built site to a folder that has one folder for each version, ready to be hosted as it is.

    make docs
    python docs/build/versions.py site pages v0.2.0    # pages/0.2.0/, and pages/index.html leads to it
    python docs/build/versions.py site pages dev       # pages/dev/

`versions.json` lists the versions, newest first; the theme shows them beside the title. The front page leads
to the newest release, or to dev while there is none. Any server of files can host the folder.
"""

import json
import re
import shutil
import sys
from pathlib import Path

REDIRECT = """<!doctype html>
<meta http-equiv="refresh" content="0; url={0}/index.html">
<a href="{0}/index.html">{0}</a>
"""


def order(version: str) -> tuple[bool, list[int]]:
    """Releases by number, everything else below."""
    return version[:1].isdigit(), [int(part) for part in re.findall(r"\d+", version)]


def add(site: Path, pages: Path, version: str) -> None:
    """Put the site in the version's folder and list it."""
    version = re.sub(r"^v(?=\d)", "", version)
    if not re.fullmatch(r"[\w.-]*\w", version):
        raise SystemExit(f"{version!r} is no name for a folder; give a tag such as v0.2.0, or dev")
    shutil.rmtree(pages / version, ignore_errors=True)
    shutil.copytree(site, pages / version)
    found = sorted((p.parent.name for p in pages.glob("*/index.html")), key=order, reverse=True)
    listed = [{"version": name, "title": name, "aliases": ["latest"] * (name == found[0])} for name in found]
    (pages / "versions.json").write_text(json.dumps(listed, indent=1) + "\n")
    (pages / "index.html").write_text(REDIRECT.format(found[0]))
    (pages / ".nojekyll").touch()  # folders with an underscore are served, too


if __name__ == "__main__":
    if len(sys.argv) != 4:
        raise SystemExit(__doc__)
    add(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])

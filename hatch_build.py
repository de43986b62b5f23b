"""What depends on where the package is built: the text for the package index, and whether the lab is there.

In a clone, `pip install ".[lab]"` installs the lab and its command `ghor` beside the library. The sdist does
not contain the lab, so what is built from it, and published (`python -m build`), is the library alone.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface


def absolute(text: str, repository: str, ref: str) -> str:
    """Links to files of the repository, [text](path), as links into it; anchors and addresses stay as they
    are."""
    pages, files = f"{repository.rstrip('/')}/blob/{ref}/", f"{repository.rstrip('/')}/raw/{ref}/"
    text = re.sub(r"(!\[[^\]]*\]\()(?!https?:|#)", rf"\g<1>{files}", text)
    return re.sub(r"(?<!!)(\[[^\]]*\]\()(?!https?:|#)", rf"\g<1>{pages}", text)


class BuildHook(MetadataHookInterface):
    """Fills in `readme` and, in a clone, the command."""

    def update(self, metadata: dict[str, Any]) -> None:
        """As hatchling calls it."""
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        repository = metadata.get("urls", {}).get("Repository")
        if repository:
            text = absolute(text, repository, "main")
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
        if (Path(self.root) / "src" / "ghor_lab").is_dir():
            metadata["scripts"] = {"ghor": "ghor_lab:main"}
        else:
            metadata["scripts"] = {}
            del metadata["optional-dependencies"]

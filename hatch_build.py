"""The README as the package index shows it: relative links made absolute, into the repository of
[project.urls]."""

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


class ReadmeHook(MetadataHookInterface):
    """Fills in `readme`."""

    def update(self, metadata: dict[str, Any]) -> None:
        """As hatchling calls it."""
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        repository = metadata.get("urls", {}).get("Repository")
        if repository:
            text = absolute(text, repository, "main")
        metadata["readme"] = {"content-type": "text/markdown", "text": text}

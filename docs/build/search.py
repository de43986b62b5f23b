"""A hook of mkdocs: the search prefers guides to the pages of the API, and those to the insides."""

from typing import Any


def on_page_markdown(text: str, page: Any, **_: Any) -> str:
    """Give a page its weight; that of a guide is 1."""
    path = page.file.src_uri
    if path.startswith("api/") or path in ("changelog.md", "contributing.md"):
        page.meta["search"] = {"boost": 0.1 if "inside" in path else 0.3}
    return text

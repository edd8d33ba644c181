"""A hook of mkdocs: replace links that leave the folder by the paths of the files."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
LINK = re.compile(r"\[([^\]]+)\]\((?!https?://)([^)#\s]+)(#[^)]*)?\)")


def on_page_markdown(markdown: str, page: Any, **_: object) -> str:
    """Return the text of a page in which links to files of the repository are replaced by their paths."""
    folder = (ROOT / "docs" / page.file.src_uri).parent

    def name(match: re.Match[str]) -> str:
        target = (folder / match[2]).resolve()
        if target.is_relative_to(ROOT / "docs") and target.suffix in (".md", ".webp"):
            return match[0]
        path = target.relative_to(ROOT)
        return f"`{path}`" if match[1].strip("`") == str(path) else f"{match[1]} (`{path}`)"

    return LINK.sub(name, markdown)

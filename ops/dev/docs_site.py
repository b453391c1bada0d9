"""Hooks of mkdocs: the README is the site's first page, and links to the source become names of files."""

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[2]
LINK = re.compile(r"\[([^\]]*)\]\(([^)\s:]+)\)")


def without_source(text: str, folder: Path) -> str:
    """Return a page in which links to existing files outside of docs/ are their paths in the checkout."""

    def link(found: re.Match[str]) -> str:
        path = found[2].partition("#")[0]
        target = (folder / path).resolve()
        if not path or target.is_relative_to(ROOT / "docs") or not target.exists():
            return found[0]
        return f"{found[1]} (`{target.relative_to(ROOT)}`)"

    return LINK.sub(link, text)


def on_files(files: Files, config: Any) -> Files:
    """Add the README as the first page."""
    text = without_source((ROOT / "README.md").read_text(), ROOT)
    files.append(File.generated(config, "index.md", content=text.replace("](docs/", "](")))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Name the files of the checkout to which a page links."""
    if page.file.src_uri == "index.md":
        return markdown
    return without_source(markdown, (ROOT / "docs" / page.file.src_uri).parent)

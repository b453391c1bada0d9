"""`make docs` builds a site of all pages, refuses a dead link, and the site loads nothing from a network."""

import html.parser
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LOADED = {"script": "src", "img": "src", "link": "href", "iframe": "src", "source": "src"}


def build(project: Path, site: Path) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(site)]
    return subprocess.run(command, cwd=project, capture_output=True, text=True)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    site = tmp_path_factory.mktemp("site")
    done = build(ROOT, site)
    assert done.returncode == 0, done.stderr
    return site


class Loaded(html.parser.HTMLParser):
    """Collects the addresses of what a page loads by itself."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.addresses: list[str] = []
        self.feed(page.read_text())

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.addresses += [value or "" for name, value in attributes if LOADED.get(tag) == name]


def test_no_page_loads_anything_from_a_network(site):
    pages = list(site.rglob("*.html"))
    assert len(pages) > 30
    for page in pages:
        assert [x for x in Loaded(page).addresses if re.match(r"(\w+:)?//", x)] == [], page
    for style in site.rglob("*.css"):
        assert not re.search(r"url\([\"']?(https?:)?//", style.read_text()), style


def test_the_search_finds_every_page(site):
    index = (site / "search" / "search_index.json").read_text()
    sources = [str(x.relative_to(ROOT / "docs")) for x in (ROOT / "docs").rglob("*.md")]
    pages = {x.replace("README.md", "index.md").replace(".md", ".html") for x in sources}
    assert {x for x in pages if f'"{x}"' not in index} == set()
    assert "fabric local --replicas 3" in (site / "index.html").read_text()


def test_a_dead_link_ends_the_build(tmp_path):
    project = tmp_path / "project"
    shutil.copytree(ROOT / "docs", project / "docs")
    for name in ("mkdocs.yml", "README.md", "ops/dev/docs_site.py"):
        (project / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, project / name)
    page = project / "docs" / "demo.md"
    page.write_text(page.read_text() + "\n[gone](api.md#no-such-heading)\n")
    done = build(project, tmp_path / "site")
    assert done.returncode == 1
    assert "no-such-heading" in done.stderr

"""docs/security.md: every promise names a test, and every test that it names exists."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "security.md").read_text()
SECTIONS = PAGE.split("\n## ")[1:]
NAMED = sorted(set(re.findall(r"`(tests/[\w/]+\.py)::([\w:]+)`", PAGE)))


def rows(section: str) -> list[str]:
    """The rows of a section's table, without its head."""
    return [line for line in section.splitlines() if line.startswith("|")][2:]


def names_of_tests(path: Path) -> set[str]:
    """``name`` or ``Class::name`` of every test in a file."""
    names = set()
    for node in ast.parse(path.read_text(), str(path)).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.ClassDef):
            inner = (n for n in node.body if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef))
            names.update(f"{node.name}::{n.name}" for n in inner)
    return {name for name in names if name.rpartition("::")[2].startswith("test_")}


@pytest.mark.parametrize(("file", "test"), NAMED, ids=lambda text: text)
def test_every_test_that_is_named_exists(file, test):
    assert (ROOT / file).exists(), f"docs/security.md names {file}"
    assert test in names_of_tests(ROOT / file), f"docs/security.md names {file}::{test}"


@pytest.mark.parametrize("section", SECTIONS, ids=lambda text: text.splitlines()[0])
def test_every_section_has_promises_with_a_test_each_and_lists_what_it_does_not_promise(section):
    table = rows(section)
    assert table, "a section has a table of promises"
    for row in table:
        assert re.search(r"`tests/[\w/]+\.py::[\w:]+`", row), f"this promise names no test: {row}"
    assert "\nNot promised: " in section


def test_nothing_named_like_a_test_is_passed_over():
    """A name that the pattern does not match would not be looked for."""
    assert PAGE.count(".py::") == len(re.findall(r"`tests/[\w/]+\.py::[\w:]+`", PAGE))


def test_no_page_puts_a_token_on_a_command_line():
    """Every user of a host can read the command line of a program; ``printf`` is a part of the shell."""
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "fabric").rglob("*.py")]
    for page in pages:
        for line in page.read_text().splitlines():
            assert not re.search(r"\$\(cat \S*token", line) or line.lstrip().startswith(
                "(umask 077; printf "
            ), f"{page}: {line}"

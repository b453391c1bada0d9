"""docs/security.md: every promise names a test, and every test that it names exists."""

import ast
import re
from pathlib import Path

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


def test_every_test_that_is_named_exists():
    there = {file: names_of_tests(ROOT / file) for file, _ in NAMED if (ROOT / file).exists()}
    assert [f"{file}::{test}" for file, test in NAMED if test not in there.get(file, ())] == []


def faults_of_a_section(section: str) -> list[str]:
    title, table = section.splitlines()[0], rows(section)
    without = [row for row in table if not re.search(r"`tests/[\w/]+\.py::[\w:]+`", row)]
    return [
        *[f"{title}: this promise names no test: {row}" for row in without],
        *([] if table else [f"{title}: no table of promises"]),
        *([] if "\nNot promised: " in section else [f"{title}: no list of what is not promised"]),
    ]


def test_every_section_has_promises_with_a_test_each_and_lists_what_it_does_not_promise():
    assert [fault for section in SECTIONS for fault in faults_of_a_section(section)] == []


def test_a_section_without_promises_or_tests_is_noticed():
    assert len(faults_of_a_section("Title\n")) == 2
    assert len(faults_of_a_section("Title\n| a |\n|---|\n| no test |\nNot promised: more\n")) == 1


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

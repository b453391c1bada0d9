"""docs/glossary.md has few rows, no term twice, and names in code that exist."""

import ast
import re
from collections import Counter
from functools import cache
from pathlib import Path

import pytest
from test_ratchets import nodes, sources

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "glossary.md"
MAX_ROWS = 80


def glossary() -> list[tuple[str, str, list[str]]]:
    """Term, meaning and names in code of every row."""
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [
        (term, meaning, re.findall(r"`([^`]+)`", names)) for term, meaning, names in rows if term != "term"
    ]


ROWS = glossary()


def targets(node: ast.AST) -> set[str]:
    """The names that this statement of a class or a method gives to an instance."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return {node.name}
    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        return {node.target.id}
    if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
        return {node.attr}
    return set()


@cache
def definitions() -> dict[str, set[str]]:
    """Class, function or type alias of fabric/ -> its attributes."""
    known: dict[str, set[str]] = {}
    for text in sources().values():
        for node in nodes(text):
            if isinstance(node, ast.ClassDef):
                members = {name for child in ast.walk(node) for name in targets(child)}
                known.setdefault(node.name, set()).update(members)
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                known.setdefault(node.name, set())
            elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                known.setdefault(node.targets[0].id, set())
    return known


def is_in_code(name: str) -> bool:
    if "/" in name:
        return (ROOT / name).exists()
    owner, _, attribute = name.partition(".")
    return owner in definitions() and (not attribute or attribute in definitions()[owner])


def test_the_glossary_stays_short():
    assert 40 <= len(ROWS) <= MAX_ROWS


def test_no_term_has_two_rows():
    counts = Counter(term for term, _, _ in ROWS)
    assert [term for term, count in counts.items() if count > 1] == []


def faults_of_a_row(meaning: str, names: list[str]) -> list[str]:
    one_sentence = meaning.endswith(".") and ". " not in meaning
    return [
        *([] if one_sentence else ["is not one sentence"]),
        *([] if len(meaning.split()) <= 25 else ["has over 25 words"]),
        *([] if names else ["has no name in code"]),
        *[f"names `{name}`, which is gone" for name in names if not is_in_code(name)],
    ]


def test_a_row_is_one_sentence_and_names_code_that_exists():
    assert [f"{term} {fault}" for term, *row in ROWS for fault in faults_of_a_row(*row)] == []


def test_each_fault_of_a_row_is_noticed():
    assert len(faults_of_a_row("word " * 26, [])) == 3
    assert faults_of_a_row("A word.", ["NoSuchClass"]) == ["names `NoSuchClass`, which is gone"]


@pytest.mark.parametrize("name", ["NoSuchClass", "Member.no_such_field", "fabric/no_such_room/"])
def test_the_check_notices_a_name_that_is_gone(name):
    assert not is_in_code(name)

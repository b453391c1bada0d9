"""Properties of the source that keep it livable; a limit is lowered when the code has got under it."""

import ast
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCES = sorted((ROOT / "fabric").rglob("*.py"))
MAX_FILE_LINES = 500
MAX_BODY_LINES = 50
MAX_PARAMETERS = 9  # with self
VAGUE = {"util", "utils", "common", "helpers", "helper", "manager", "misc"}
# Files over the limit, with their present size: such a file may shrink, but never grow.
TOO_LONG: dict[str, int] = {}


def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


def functions(path: Path):
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
class TestSource:
    def test_a_file_has_a_bounded_size(self, path):
        limit = TOO_LONG.get(str(path.relative_to(ROOT)), MAX_FILE_LINES)
        assert len(path.read_text().splitlines()) <= limit

    def test_a_module_says_what_it_is_for(self, path):
        if path.read_text().strip():
            assert ast.get_docstring(tree(path)), "no module docstring"

    def test_a_function_fits_on_a_screen(self, path):
        for node in functions(path):
            body = node.body[1:] if ast.get_docstring(node) and len(node.body) > 1 else node.body
            lines = node.end_lineno - body[0].lineno + 1
            assert lines <= MAX_BODY_LINES, f"{node.name} has {lines} lines"

    def test_a_function_has_few_parameters(self, path):
        for node in functions(path):
            a = node.args
            count = len(a.posonlyargs) + len(a.args) + len(a.kwonlyargs)
            assert count <= MAX_PARAMETERS, f"{node.name} has {count} parameters"

    def test_a_name_says_something(self, path):
        assert not VAGUE & {path.stem, *path.relative_to(ROOT).parent.parts}


def test_one_reader_of_the_environment():
    readers = {
        str(p.relative_to(ROOT))
        for p in SOURCES
        for node in ast.walk(tree(p))
        if isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv")
    }
    # These modules pass their own environment on to the processes that they start.
    assert readers - {"fabric/runtime/process_environment.py", "fabric/cli/demo/supervise.py"} <= {
        "fabric/runtime/config.py"
    }


def test_no_pickle_and_no_eval():
    for path in SOURCES:
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.Import | ast.ImportFrom):
                names = {a.name for a in node.names} | {getattr(node, "module", "") or ""}
                assert not names & {"pickle", "marshal", "shelve", "dill"}, path
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                assert node.func.id not in ("eval", "exec"), path
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                assert (node.value.id, node.attr) != ("torch", "load"), path


def test_no_two_test_files_share_a_name():
    """One run of pytest over several folders takes the second file of a name for the first, and fails."""
    names = Counter(path.name for path in (ROOT / "tests").rglob("test_*.py"))
    assert [name for name, count in names.items() if count > 1] == []

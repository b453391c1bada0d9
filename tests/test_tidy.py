"""Properties of the source that keep it livable; a limit is lowered when the code has got under it."""

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from test_ratchets import nodes
from torch.utils._device import _device_constructors

ROOT = Path(__file__).parent.parent
MAX_FILE_LINES = 900
MAX_BODY_LINES = 50
MAX_PARAMETERS = 9  # with self
VAGUE = {"util", "utils", "common", "helpers", "helper", "manager", "misc"}
# These modules pass their own environment on to the processes that they start.
READERS_OF_THE_ENVIRONMENT = {
    "fabric/runtime/config.py",
    "fabric/runtime/process_environment.py",
}
# All functions whose result torch.set_default_device moves.
MAKERS_OF_TENSORS = {f"torch.{maker.__name__}" for maker in _device_constructors()}

# Each rule takes a file's name and text, and yields what breaks the rule there.


def functions(text: str) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    return (node for node in nodes(text) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def long_files(_: str, text: str) -> Iterator[str]:
    if (lines := len(text.splitlines())) > MAX_FILE_LINES:
        yield f"{lines} lines"


def files_without_a_docstring(_: str, text: str) -> Iterator[str]:
    if text.strip() and not ast.get_docstring(nodes(text)[0]):
        yield "no module docstring"


def long_functions(_: str, text: str) -> Iterator[str]:
    for node in functions(text):
        body = node.body[1:] if ast.get_docstring(node) and len(node.body) > 1 else node.body
        if (lines := node.end_lineno - body[0].lineno + 1) > MAX_BODY_LINES:
            yield f"{node.name} has {lines} lines"


def many_parameters(_: str, text: str) -> Iterator[str]:
    for node in functions(text):
        a = node.args
        if (count := len(a.posonlyargs) + len(a.args) + len(a.kwonlyargs)) > MAX_PARAMETERS:
            yield f"{node.name} has {count} parameters"


def vague_names(name: str, _: str) -> Iterator[str]:
    yield from sorted(VAGUE & {Path(name).stem, *Path(name).parent.parts})


def readers_of_the_environment(name: str, text: str) -> Iterator[str]:
    for node in nodes(text):
        is_read = isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv")
        if is_read and name not in READERS_OF_THE_ENVIRONMENT:
            yield f"line {node.lineno} reads {ast.unparse(node)}"


def pickle_and_eval(_: str, text: str) -> Iterator[str]:
    for node in nodes(text):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = {a.name for a in node.names} | {getattr(node, "module", "") or ""}
            yield from sorted(names & {"pickle", "marshal", "shelve", "dill"})
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id in ("eval", "exec")
        ):
            yield node.func.id
        if isinstance(node, ast.Attribute) and node.attr == "load" and ast.unparse(node) == "torch.load":
            yield "torch.load"


def tensors_on_the_default_device(_: str, text: str) -> Iterator[str]:
    """A script may call ``torch.set_default_device``, so a tensor of fabric's own names its device."""
    for node in nodes(text):
        makes = isinstance(node, ast.Call) and ast.unparse(node.func) in MAKERS_OF_TENSORS
        if makes and not any(keyword.arg == "device" for keyword in node.keywords):
            yield f"line {node.lineno} calls {ast.unparse(node.func)} without a device"


# Each rule with a file that breaks it once.
RULES = {
    long_files: ("fabric/a.py", "x = 1\n" * (MAX_FILE_LINES + 1)),
    files_without_a_docstring: ("fabric/a.py", "import os"),
    long_functions: ("fabric/a.py", "def f():\n" + "    x = 1\n" * (MAX_BODY_LINES + 1)),
    many_parameters: ("fabric/a.py", "def f(self, a, b, c, d, *, e, f, g, h, i): ..."),
    vague_names: ("fabric/utils/a.py", ""),
    readers_of_the_environment: ("fabric/a.py", "import os\nhome = os.environ['HOME']"),
    tensors_on_the_default_device: ("fabric/a.py", "import torch\ntorch.zeros(1)"),
    pickle_and_eval: ("fabric/a.py", "import torch\ntorch.load('a')"),
}


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_a_rule_holds_in_all_files(rule):
    files = {str(p.relative_to(ROOT)): p.read_text() for p in sorted((ROOT / "fabric").rglob("*.py"))}
    assert files
    assert [f"{name}: {fault}" for name, text in files.items() for fault in rule(name, text)] == []


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_a_rule_notices_a_planted_fault(rule):
    assert len(list(rule(*RULES[rule]))) == 1


def test_no_two_test_files_share_a_name():
    """One run of pytest over several folders takes the second file of a name for the first, and fails."""
    names = Counter(path.name for path in (ROOT / "tests").rglob("test_*.py"))
    assert [name for name, count in names.items() if count > 1] == []


def test_a_test_that_make_test_leaves_out_names_the_test_that_protects_the_same_thing():
    left_out = 0
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        if path == Path(__file__):
            continue
        text = path.read_text()
        names = re.findall(r'(?:mark\.long|first_here)\(\s*"([\w/]+\.py)"', text)
        assert len(names) == len(re.findall(r"mark\.long\b|first_here\(", text)), path
        for name in names:
            cheaper = ROOT / "tests" / name
            assert cheaper.is_file(), (path, name)
            assert "pytestmark = pytest.mark.long" not in cheaper.read_text(), (path, name)
        left_out += len(names)
    assert left_out > 20


def test_a_test_that_needs_slurm_is_left_to_make_long():
    """``make test`` brings no Slurm."""
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        text = path.read_text()
        if "from slurm_cluster import" in text and path != Path(__file__):
            marks = [ast.unparse(node) for node in ast.parse(text).body if isinstance(node, ast.Assign)]
            assert any(mark.startswith("pytestmark = pytest.mark.long(") for mark in marks), path

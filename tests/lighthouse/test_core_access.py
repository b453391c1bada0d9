"""The lighthouse uses only ``handle``, ``next_deadline`` and ``view`` of a leader core."""

import ast
from pathlib import Path

import pytest

LIGHTHOUSE = Path(__file__).parents[2] / "fabric" / "lighthouse"
FILES = sorted(LIGHTHOUSE.rglob("*.py"))
ALLOWED = {"handle", "next_deadline", "view"}
PRIVATE = {"_core", "_epoch", "_liveness"}


def is_core(node: ast.AST) -> bool:
    """Return whether the expression is ``core``, or an attribute named ``core``."""
    return (isinstance(node, ast.Name) and node.id == "core") or (
        isinstance(node, ast.Attribute) and node.attr == "core"
    )


def violations(source: str) -> list[str]:
    """Return every expression that uses more of a core, or renames a core so that this test would miss it."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute):
            if node.attr in PRIVATE or (is_core(node.value) and node.attr not in ALLOWED):
                found.append(ast.unparse(node))
        elif isinstance(node, ast.Call):
            callee, values = ast.unparse(node.func), [*node.args, *(k.value for k in node.keywords)]
            found += [ast.unparse(node) for value in values if is_core(value) and callee != "Driver"]
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found += [ast.unparse(node) for target in targets if renames_a_core(target, node.value)]
    return found


def renames_a_core(target: ast.expr, value: ast.expr | None) -> bool:
    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
        return any(renames_a_core(t, v) for t, v in zip(target.elts, value.elts, strict=True))
    made = isinstance(value, ast.Call) and ast.unparse(value.func).endswith("LeaderCore")
    return value is not None and (is_core(value) or made) and not is_core(target)


def test_source_files_read_a_core_through_its_view_only():
    assert FILES
    assert [f"{path}: {fault}" for path in FILES for fault in violations(path.read_text())] == []


def test_only_the_shell_of_a_job_makes_a_core():
    assert [p.name for p in FILES if "LeaderCore" in p.read_text()] == ["job.py"]


@pytest.mark.parametrize(
    "source",
    [
        "self.core.record",
        "job.core.config = policy",
        "core.view.record; core.liveness.peers",
        "leader = self.core",
        "a, b = 1, self.core",
        "leader = LeaderCore(name)",
        "observe(self.core, now)",
        "getattr(job.core, 'record')",
        "view._core.record",
    ],
)
def test_every_way_around_the_view_is_noticed(source):
    assert violations(source)


@pytest.mark.parametrize(
    "source",
    ["self.core = LeaderCore(name)", "core, view = self.core, self.view", "Driver(self.core, perform)"],
)
def test_the_uses_that_a_shell_needs_are_allowed(source):
    assert violations(source) == []

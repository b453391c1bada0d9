"""docs/benchmarks.md lists every GPU test with the date of its last pass, or says that it has never run."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def listed() -> dict[str, str]:
    """Return each GPU test of the page with its last pass."""
    page = (ROOT / "docs/benchmarks.md").read_text()
    return dict(re.findall(r"^\| `(tests/gpu/[\w.]+::\w+)` \| (.*) \|$", page, flags=re.MULTILINE))


def collected() -> set[str]:
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-m", "gpu", "tests/gpu"]
    shown = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return {line.partition("[")[0] for line in shown.splitlines() if line.startswith("tests/")}


def test_the_page_lists_every_gpu_test_and_no_other():
    assert set(listed()) == collected()


def test_every_gpu_test_is_listed_with_the_date_of_its_last_pass_or_never_run():
    assert listed()
    for test, last in listed().items():
        assert re.fullmatch(r"never run|20\d\d-\d\d-\d\d.*", last), test


def test_all_gpu_tests_are_in_this_folder():
    for path in (ROOT / "tests").rglob("test_*.py"):
        if path.parent != Path(__file__).parent:
            assert not re.search(r"mark\.gpu\b", path.read_text()), path

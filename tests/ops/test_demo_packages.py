"""What `make demo` installs: only what fabric needs to run, each file with a hash."""

import re
import subprocess
from importlib.metadata import requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]
# Only torch's build for CUDA needs these, and an index that the user names may bring others.
OF_CUDA = re.compile(r"torch|triton|nvidia-|cuda-")


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def locked() -> dict[str, tuple[str, int]]:
    """Return the version of each package in demo-requirements.txt, and the number of its hashes."""
    text = re.sub(r"^#.*\n", "", (ROOT / "demo-requirements.txt").read_text(), flags=re.MULTILINE)
    found = {}
    for entry in re.split(r"\n(?=\S)", text.strip()):
        name, version = re.match(r"([\w.-]+)==(\S+)", entry).groups()
        found[normal(name)] = version, len(re.findall(r"--hash=sha256:[0-9a-f]{64}\b", entry))
    return found


def needed(package: str) -> set[str]:
    """Return the packages that ``package`` needs here to run, and what those need, without those of CUDA."""
    todo, seen = [package], set()
    while todo:
        for text in requires(todo.pop()) or ():
            requirement = Requirement(text)
            name, marker = normal(requirement.name), requirement.marker
            is_for_here = marker is None or marker.evaluate({"extra": ""})
            if is_for_here and name not in seen and (name == "torch" or not OF_CUDA.match(name)):
                seen.add(name)
                todo.append(name)
    return seen


def test_every_package_of_the_demo_has_hashes():
    assert locked() and all(count for _, count in locked().values())


def test_the_demo_installs_what_fabric_needs_and_no_more():
    """It installed some 100 packages of the tests too."""
    of_fabric = {name for name in locked() if name == "torch" or not OF_CUDA.match(name)}
    there = needed("ckpt-fabric")
    assert there <= of_fabric
    assert of_fabric - there <= {"setuptools", "typing-extensions"}, "those depend on the release of Python"


def test_the_demo_has_the_versions_with_which_the_tests_run():
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = {normal(name): version for name, _, version in (x.partition("==") for x in lines) if version}
    unpinned = {name for name, (version, _) in locked().items() if pinned.get(name) != version}
    assert all(name not in pinned and OF_CUDA.match(name) for name in unpinned), unpinned


@pytest.mark.parametrize("index", ["", "https://an.index/cpu"])
def test_make_demo_installs_only_files_with_hashes(index):
    """An index that the user names brings torch alone."""
    command = ["make", "-n", "-W", "demo-requirements.txt", "demo", f"TORCH_INDEX={index}"]
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True).stdout
    installs = [line for line in said.splitlines() if "pip install" in line and "--index-url" not in line]
    assert len(installs) == 2 and "--require-hashes --no-deps" in installs[0]
    assert installs[1].endswith("--no-deps --no-build-isolation -e .")
    assert ("--index-url https://an.index/cpu" in said) == bool(index)

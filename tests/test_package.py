"""The wheel is whole: built, unpacked into an empty folder, it runs without the source tree."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    # Built from a copy of what git would ship, so that nothing is written into the tree.
    files = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    for name in files:
        if name.startswith("fabric/") or name in ("pyproject.toml", "README.md", "LICENSE"):
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(source)]
    subprocess.run(build, check=True, capture_output=True)
    (wheel,) = folder.glob("ckpt_fabric-*.whl")
    site = folder / "site"
    install = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-index", "--target", str(site)]
    subprocess.run([*install, str(wheel)], check=True, capture_output=True)
    return site


def run(site: Path, cwd: Path, *arguments: str) -> subprocess.CompletedProcess:
    environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(site), "HOME": str(cwd)}
    command = [sys.executable, "-m", "fabric.cli.main", *arguments]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True)


def test_the_wheel_runs_the_demo_in_an_empty_folder(unpacked, tmp_path):
    where = "import fabric; print(fabric.__file__)"
    environment = {"PYTHONPATH": str(unpacked)}
    found = subprocess.run(
        [sys.executable, "-c", where], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert found.stdout.startswith(str(unpacked)), found
    done = run(unpacked, tmp_path, "demo", "--replicas", "1", "--steps", "3", "--no-failure")
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "demo-out" / "report.html").exists()
    assert run(unpacked, tmp_path, "demo", "verify", "demo-out").returncode == 0


def test_a_clash_with_the_ssh_tool_is_said_at_import(tmp_path):
    """PyPI's SSH tool is imported as ``fabric`` too; both in one folder must not fail somewhere later."""
    site = tmp_path / "site"
    package = site / "fabric"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text((ROOT / "fabric" / "__init__.py").read_text())
    information = site / "fabric-3.2.2.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: fabric\nVersion: 3.2.2\n")
    done = subprocess.run(
        [sys.executable, "-c", "import fabric"],
        cwd=tmp_path,
        env={"PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert "pip uninstall fabric ckpt-fabric" in done.stderr

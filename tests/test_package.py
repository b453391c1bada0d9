"""The wheel is whole: built from the source archive, it runs in an empty folder without the checkout."""

import re
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

import fabric

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    source = tmp_path_factory.mktemp("source")
    # Build from a copy of the files that git would ship, so that the build writes nothing into the tree.
    files = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    for name in files:
        if name.startswith("fabric/") or name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    return source


@pytest.fixture(scope="module")
def unpacked(source, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(source)]
    subprocess.run(build, check=True, capture_output=True)
    (wheel,) = folder.glob("ckpt_fabric-*.whl")
    site = folder / "site"
    install = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-index", "--target", str(site)]
    subprocess.run([*install, str(wheel)], check=True, capture_output=True)
    return site


@pytest.mark.parametrize(
    "how", [["--target", "site"], ["--target", "site", "--editable"]], ids=["wheel", "editable"]
)
def test_without_a_compiler_the_installation_says_what_to_install_and_builds_nothing(source, tmp_path, how):
    command = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "--no-build-isolation"]
    environment = {"PATH": str(tmp_path), "HOME": str(tmp_path)}
    done = subprocess.run(
        [*command, *how, str(source)], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.returncode != 0
    assert "fabric needs a C compiler, and there is no " in done.stdout + done.stderr
    assert "apt install build-essential" in done.stdout + done.stderr
    assert not list(source.rglob("*.so")) and not (source / "build").exists()


def test_a_checkout_that_was_never_compiled_says_what_to_run(source, tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", "import fabric.ftar.host"],
        cwd=tmp_path,
        env={"PYTHONPATH": str(source)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert "run `pip install -e .` in it again" in done.stderr


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
    done = run(unpacked, tmp_path, "demo", "--replicas", "1", "--steps", "3", "--kill-at", "never")
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "demo-out" / "report.html").exists()
    assert run(unpacked, tmp_path, "demo", "verify", "demo-out").returncode == 0


SCRIPT = """
import torch
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for (x,) in torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.ones(40, 4)), batch_size=4):
    optimizer.zero_grad()
    model(x).sum().backward()
    optimizer.step()
open(f"{__import__('os').environ['FABRIC_REPLICA']}.trained", "w").close()
"""


def test_the_wheel_runs_a_local_job_and_serves_the_page(unpacked, tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(unpacked), "HOME": str(tmp_path)}
    command = [sys.executable, "-m", "fabric", "local", "--replicas", "1", "--adopt", "auto", "train.py"]
    process = subprocess.Popen(
        command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    with process:
        address = re.match(r"lighthouse: (\S+) in a browser", process.stdout.readline())[1]
        with urllib.request.urlopen(address) as page:
            assert b"<title>" in page.read()
        rest = process.stdout.read()
        assert process.wait() == 0, rest
    assert (tmp_path / "r0.trained").exists()


LIGHTNINGS = "#!/usr/bin/python3\nimport sys\nfrom lightning.fabric.cli import _main\nsys.exit(_main())\n"
OURS = "#!/usr/bin/python3\nimport sys\nfrom fabric.cli.main import main\nsys.exit(main())\n"


def test_the_command_has_a_second_name_and_a_module(unpacked, tmp_path):
    assert {"fabric", "ckpt-fabric"} <= {path.name for path in (unpacked / "bin").iterdir()}
    environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(unpacked), "HOME": str(tmp_path)}
    command = [sys.executable, "-m", "fabric", "--version"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.stdout.startswith("fabric, version "), done.stderr


def test_the_command_of_lightning_is_named(tmp_path):
    assert fabric.command_of_another(tmp_path) == ""
    command = tmp_path / "fabric"
    command.write_text(OURS)
    assert fabric.command_of_another(tmp_path) == ""
    command.write_text(LIGHTNINGS)
    why = f"the command {command} is Lightning's: use ckpt-fabric or python -m fabric instead of it"
    assert fabric.command_of_another(tmp_path) == why


def test_an_overwritten_fabric_command_is_named_by_the_doctor_and_not_by_every_process(tmp_path):
    (tmp_path / "fabric").write_text(LIGHTNINGS)
    start = f"import sys; sys.path.insert(0, {str(ROOT)!r}); sys.executable = {str(tmp_path / 'python')!r}; "
    look = (
        "from fabric.cli.doctor import _versions; print([x.what for x in _versions() if x.level == 'warn'])"
    )
    done = subprocess.run([sys.executable, "-c", start + look], capture_output=True, text=True, check=True)
    assert done.stderr == ""
    assert "is Lightning's: use ckpt-fabric" in done.stdout


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

"""``fabric run``: it imports torch at low priority, then the script runs at its usual priority."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from forked_processes import run_with_torch

from fabric.runtime.priority import LOW_PRIORITY
from fabric.runtime.process_environment import LAUNCH_MARK

# This program prints the niceness of the thread that imports torch.
WATCH = """
import os, sys, threading
class Watch:
    def find_spec(self, name, path=None, target=None):
        if name in ("torch", "torch._dynamo"):
            print(name, os.getpriority(os.PRIO_PROCESS, threading.get_native_id()), flush=True)
sys.meta_path.insert(0, Watch())
"""
SCRIPT = """
import gc, json, os, sys, threading, time
living = len(gc.get_objects())
import neighbour
import torch
torch.optim.SGD([torch.zeros(1)], lr=0.1)
def niceness():
    found = []
    for thread in os.listdir("/proc/self/task"):
        try:
            found.append(os.getpriority(os.PRIO_PROCESS, int(thread)))
        except ProcessLookupError:
            pass  # it has ended meanwhile
    return found
# The kernel may still have the thread that imported, which Python has seen the end of.
until = time.monotonic() + 30
while len(set(threads := niceness())) > 1 and time.monotonic() < until:
    time.sleep(0.01)
said = {"name": __name__, "argv": sys.argv, "file": __file__, "path": sys.path[0], "niceness": threads}
said["living"] = living
print(json.dumps(said))
"""


def fabric_run(folder: Path, *words: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "fabric.cli.main", "run", *words]
    environment = {**os.environ, "PYTHONPATH": str(folder / "watch"), "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment, check=False)


@pytest.fixture
def folder(tmp_path) -> Path:
    (tmp_path / "watch").mkdir()
    (tmp_path / "neighbour.py").write_text("")
    return tmp_path


def test_torch_is_imported_at_low_priority_and_the_script_runs_at_its_usual_one(folder):
    (folder / "watch" / "sitecustomize.py").write_text(WATCH)
    script = folder / "train.py"
    script.write_text(SCRIPT)
    ended = fabric_run(folder, str(script), "--steps", "5", "--help", "x")
    assert ended.returncode == 0, ended.stderr
    *imported, said = ended.stdout.splitlines()
    before = os.getpriority(os.PRIO_PROCESS, 0)
    low = str(max(before, LOW_PRIORITY))
    by_name = dict(line.split() for line in imported)
    # On a crowded host only the first import has the low priority.
    assert by_name.pop("torch") == low and by_name.pop("torch._dynamo") in (low, str(before)) and not by_name
    found = json.loads(said)
    assert set(found.pop("niceness")) == {before}, "a thread that is needed later has kept the low priority"
    assert found.pop("living") < 100_000, "searches of all living objects see what fabric run has imported"
    argv = [str(script), "--steps", "5", "--help", "x"]
    assert found == {"name": "__main__", "argv": argv, "file": str(script), "path": str(folder)}


@pytest.mark.parametrize(
    ("source", "code", "says"),
    [
        ("raise SystemExit(75)", 75, ""),
        # The script and its hooks handle their own errors, which our commands show as one line.
        ("from fabric.errors import FabricError\nraise FabricError('x')", 1, "Traceback"),
        ('import torch\nraise torch.AcceleratorError("CUDA error")', 76, "CUDA error"),
        ("raise KeyboardInterrupt", -2, "KeyboardInterrupt"),
    ],
)
def test_a_scripts_exit_code_and_output_are_its_own(folder, source, code, says, monkeypatch):
    script = folder / "train.py"
    script.write_text(source)
    # The script imports nothing, because imports take seconds; another test checks imports.
    words = f"import sys; sys.argv = ['fabric', 'run', {str(script)!r}]\n"
    words += "import fabric.cli.main, fabric.cli.run\nfabric.cli.run._import = lambda: None\n"
    words += "fabric.cli.main.main()"
    ended = subprocess.run(
        [sys.executable, "-c", words], capture_output=True, text=True, timeout=300, check=False
    )
    assert ended.returncode == code, ended.stderr
    assert says in ended.stderr


def test_a_module_runs_as_python_would_run_it(folder):
    (folder / "train.py").write_text("import sys; print(__name__, sys.argv, sys.path[0])")
    words = "import sys; sys.argv = ['fabric', 'run', '-m', 'train', '--steps', '5', '-m']\n"
    words += "import fabric.cli.main, fabric.cli.run\nfabric.cli.run._import = lambda: None\n"
    words += "fabric.cli.main.main()"
    ended = subprocess.run(
        [sys.executable, "-c", words], cwd=folder, capture_output=True, text=True, timeout=300, check=False
    )
    argv = [str(folder / "train.py"), "--steps", "5", "-m"]
    assert ended.stdout == f"__main__ {argv} {folder}\n", ended.stderr


@pytest.mark.parametrize("words", [[], ["nowhere.py"], ["-m"]])
def test_a_missing_script_is_named_in_the_error(folder, words):
    ended = fabric_run(folder, *words)
    assert ended.returncode == 2
    assert "SCRIPT" in ended.stderr


def test_an_adopted_script_without_settings_ends_with_one_sentence(folder, monkeypatch):
    for name in [x for x in os.environ if x.startswith("FABRIC_")]:
        monkeypatch.delenv(name)
    (folder / "train.py").write_text("print('begun')")
    ended = run_with_torch("-m", "fabric.cli.main", "run", "--adopt", str(folder / "train.py"))
    assert (ended.returncode, ended.stdout) == (1, "")
    assert ended.stderr == (
        "fabric: no lighthouse is named: set FABRIC_LIGHTHOUSE=http://host:port (or FABRIC_DISABLE=1)\n"
    )


STRANGER = """
import sys, torch
if "attached" in sys.argv:
    sys.modules["fabric.client.attach"].has_begun = True
weight = torch.nn.Parameter(torch.zeros(1))
optimizer = torch.optim.SGD([weight], lr=0.1)
weight.grad = torch.ones(1)
optimizer.step()
print("updated")
"""
BY_HAND = """
import sys, torch
layer, unused = torch.nn.Linear(2, 1), torch.nn.Linear(2, 1)
losses = [layer(torch.ones(2)).sum() for _ in range(3)]
losses[0].backward()  # accumulates, as a script does before it has a session
losses[1].backward()
if "attached" in sys.argv:
    sys.modules["fabric.client.attach"].has_begun = True
for parameter in layer.parameters():
    parameter.data.add_(parameter.grad, alpha=-0.1)
torch.autograd.backward([layer(torch.ones(2)).sum(), unused(torch.ones(2)).sum()])
print("updated")
"""


@pytest.mark.parametrize("source", [STRANGER, BY_HAND])
@pytest.mark.parametrize(
    ("words", "environment", "runs"),
    [
        ([], {LAUNCH_MARK: "x"}, False),
        (["attached"], {LAUNCH_MARK: "x"}, True),
        ([], {LAUNCH_MARK: "x", "FABRIC_DISABLE": "1"}, True),
        ([], {}, True),
    ],
)
def test_a_launched_script_that_trains_without_a_session_is_refused(folder, source, words, environment, runs):
    (folder / "train.py").write_text(source)
    program = ("-m", "fabric.cli.main", "run", str(folder / "train.py"))
    ended = run_with_torch(*program, *words, **environment)
    if runs:
        assert (ended.returncode, ended.stdout) == (0, "updated\n"), ended.stderr
    else:
        assert (ended.returncode, ended.stdout) == (1, "")
        assert ended.stderr.startswith("fabric: the script updates its model and has not called")
        assert ended.stderr.count("\n") == 1 and "--adopt auto" in ended.stderr


def test_ctrl_c_while_torch_is_imported_shows_no_traceback(folder):
    (folder / "train.py").write_text("print('begun')")
    words = f"import sys; sys.argv = ['fabric', 'run', {str(folder / 'train.py')!r}]\n"
    words += "import fabric.cli.main, fabric.cli.run\ndef interrupted(): raise KeyboardInterrupt\n"
    words += "fabric.cli.run._import = interrupted\nfabric.cli.main.main()"
    ended = subprocess.run([sys.executable, "-c", words], capture_output=True, text=True, timeout=300)
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", "")

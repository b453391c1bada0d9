"""``fabric local`` as a person runs it: an unchanged script, a killed trainer, an interruption."""

import json
import os
import re
import signal
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from forked_processes import ForkedProcess, start_supervisor
from job import DEADLINE_S

from fabric.runtime.guarded_processes import MARK

SCRIPT = """
import pathlib, time, torch
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.AdamW(model.parameters())
data = torch.utils.data.TensorDataset(torch.randn(4000, 4), torch.randn(4000, 1))
for x, y in torch.utils.data.DataLoader(data, batch_size=4):
    loss = torch.nn.functional.mse_loss(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if not pathlib.Path("enough").exists():
        time.sleep(0.1)  # the job must not end before the killed replica is back
print(f"weight {model.weight.sum().item()}", flush=True)
"""
# At its end, before the last checkpoint, a replica takes storage away.
AWAY = """
import os, pathlib
if os.environ["FABRIC_REPLICA"] == "r0":
    os.rename("storage", "kept")
    os.symlink("storage", "storage")
while not pathlib.Path("storage").is_symlink():
    time.sleep(0.01)
"""
WAITING = "import signal; print('up', flush=True); signal.pause()"
FAILING = "import os, sys; sys.exit(1 if os.environ['FABRIC_REPLICA'] == 'r1' else 0)"


class Terminal:
    """The output of ``fabric local``, line by line."""

    def __init__(self, process: ForkedProcess, output: int) -> None:
        self.process = process
        self._output = output
        self.lines: list[str] = []
        self._changed = threading.Condition()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        with os.fdopen(self._output) as lines:
            for line in lines:
                with self._changed:
                    self.lines.append(line.rstrip("\n"))
                    self._changed.notify_all()

    def wait_for(self, pattern: str, count: int = 1) -> str:
        """Wait for ``count`` lines that match; return the last one's first group."""
        with self._changed:
            seen = self._changed.wait_for(lambda: len(self._found(pattern)) >= count, DEADLINE_S)
            assert seen, "\n".join(self.lines)
            return self._found(pattern)[count - 1]

    def _found(self, pattern: str) -> list[str]:
        return [
            found.group(found.re.groups and 1) for line in self.lines if (found := re.search(pattern, line))
        ]

    def end(self) -> int:
        code = self.process.wait(timeout=DEADLINE_S)
        self._reader.join()
        return code


@contextmanager
def local(folder: Path, *words: str, **environment: str) -> Iterator[Terminal]:
    output, writer = os.pipe()
    with os.fdopen(writer, "wb") as log:
        process = start_supervisor(
            "local",
            "--replicas",
            "2",
            *words,
            log=log,
            cwd=str(folder),
            environment={**os.environ, **environment},
        )
    terminal = Terminal(process, output)
    try:
        yield terminal
    finally:
        process.terminate()
        terminal.end()


def living(folder: Path) -> list[str]:
    """Return the command lines of processes that ``fabric local`` started and that name this folder."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            environment = (path / "environ").read_bytes()
            if MARK.encode() in environment and str(folder).encode() in environment:
                found.append((path / "cmdline").read_text())
        except OSError:
            continue
    return found


def commits(folder: Path, replica: str) -> int:
    journal = folder / "local-out" / "journal" / f"{replica}.jsonl"
    lines = journal.read_text().splitlines()[:-1] if journal.exists() else []
    return sum(json.loads(line)["event"] == "commit" for line in lines)


def test_an_unchanged_script_survives_a_kill(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    with local(tmp_path, "--adopt", "auto", "train.py") as terminal:
        pid = terminal.wait_for(r"^r1 \| .* rank 0 is process (\d+) ")
        terminal.wait_for(r"^r1 \| fabric: r1: begins job local at step 0")
        subprocess.run(["kill", "-9", pid], check=True)
        terminal.wait_for(r"^r1 \| fabric: r1: goes on with job local at step")
        terminal.wait_for(r"^lighthouse: http://127.0.0.1:\d+/ in a browser")
        (tmp_path / "enough").touch()
        assert terminal.end() == 0, terminal.lines
    assert terminal.wait_for(r"^r0 \| (weight .*)") == terminal.wait_for(r"^r1 \| (weight .*)")
    assert commits(tmp_path, "r0") > 1


def test_the_end_waits_for_the_last_durable_checkpoint_where_storage_is_away(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT.replace("4000", "160") + AWAY)
    (tmp_path / "storage").mkdir()
    (tmp_path / "enough").touch()
    durable = str(tmp_path / "storage" / "durable")
    words = "--adopt", "auto", "train.py"
    with local(tmp_path, *words, FABRIC_DURABLE=durable, FABRIC_DURABLE_EVERY="1h") as terminal:
        terminal.wait_for(r"^r\d \| fabric: r\d: waits for its last durable checkpoint: step \d+: ")
        (tmp_path / "storage").unlink()
        (tmp_path / "kept").rename(tmp_path / "storage")
        assert terminal.end() == 0, terminal.lines
    [saved] = (tmp_path / "storage" / "durable" / "local").glob("step-*/COMPLETE")
    assert saved.parent.name.startswith(f"step-{commits(tmp_path, 'r0'):010d}-")


def test_an_interruption_ends_every_process(tmp_path):
    (tmp_path / "wait.py").write_text(WAITING)
    with local(tmp_path, "wait.py") as terminal:
        terminal.wait_for(r"^r\d \| up", count=2)
        assert living(tmp_path)
        terminal.process.send_signal(signal.SIGTERM)  # as Ctrl-C, which a shell's background jobs ignore
        assert terminal.end() == 130
        assert terminal.lines[-1] == "Interrupted; every process of the job has been ended."
    assert living(tmp_path) == []


def test_a_replica_that_cannot_go_on_makes_exit_code_1(tmp_path):
    (tmp_path / "train.py").write_text(FAILING)
    with local(tmp_path, "train.py") as terminal:
        assert terminal.end() == 1
    assert "r0 ended with exit code 0" in terminal.lines
    assert any(re.fullmatch(r"r1 ended with exit code [1-9]\d*", line) for line in terminal.lines)

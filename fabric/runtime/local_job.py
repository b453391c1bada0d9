"""A job on this host: its folder, its lighthouses, and one launcher per replica.

`fabric local`, `fabric demo` and `fabric drill` start their jobs here.
"""

import contextlib
import fcntl
import json
import os
import secrets
import shutil
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import NoReturn

from fabric.errors import ConfigError, FabricError
from fabric.runtime.guarded_processes import Processes
from fabric.runtime.http.lighthouse_client import Lighthouses
from fabric.runtime.private_folder import open_private

# The files and folders that a job makes in its folder.
_NAMES = ("journal", "run", "log", "lighthouse", "token", "auth")
MAX_REPLICAS = 64
READY_S = 120.0
POLL_S = 0.02
SUPERVISOR_FILE = "supervisor.jsonl"
_LAST_BYTES, _MOST_WORDS = 1 << 16, 300


class LocalJob:
    """The processes of one job. Use it in a ``with`` block, which ends every process that it has started."""

    def __init__(
        self, folder: Path, name: str, replicas: Sequence[str], environment: Mapping[str, str]
    ) -> None:
        """``environment`` is that of every process; the job adds what its replicas need to meet."""
        self.folder = folder
        self.name = name
        self.replicas = tuple(replicas)
        self.processes = Processes(environment)
        self.urls: dict[str, str] = {}  # by lighthouse
        self.store = f"sqlite:///{folder / 'lighthouse' / 'store.db'}"
        self.lighthouse_options: tuple[str, ...] = ()
        self._token = secrets.token_hex(32)

    def __enter__(self) -> "LocalJob":
        try:
            for name in ("journal", "run", "log", "lighthouse"):
                (self.folder / name).mkdir(mode=0o700)
            # curl reads its header from a file: every user of the host can read a command line.
            lines = {"token": self._token, "auth": f"Authorization: Bearer {self._token}"}
            for name, line in lines.items():
                descriptor = open_private(self.folder / name, os.O_CREAT | os.O_EXCL | os.O_WRONLY)
                with os.fdopen(descriptor, "w") as file:
                    file.write(line + "\n")
        except OSError as error:
            raise ConfigError(f"{error.filename} cannot be replaced: {error.strerror}.") from error
        return self

    def __exit__(self, *_: object) -> None:
        self.processes.end()

    @property
    def token_file(self) -> Path:
        return self.folder / "token"

    @property
    def client(self) -> Lighthouses:
        return Lighthouses(tuple(self.urls.values()), self.name, self._token)

    def ways_in(self) -> list[str]:
        """Return how a person looks at the running job, a sentence each."""
        url = next(iter(self.urls.values()))
        status = f"fabric status --job {self.name} --lighthouse {url} --token-file {self.token_file}"
        return [
            f"lighthouse: {url}/ in a browser, with the token of {self.token_file}",
            f"status: {status}",
            f"HTTP: curl -s -H @{self.folder / 'auth'} {url}/v1/jobs/{self.name}/events",
        ]

    def run_dir(self, replica: str) -> Path:
        return self.folder / "run" / replica

    def journal(self, replica: str) -> Path:
        return self.folder / "journal" / f"{replica}.jsonl"

    def log(self, name: str) -> Path:
        return self.folder / "log" / f"{name}.log"

    def start_lighthouse(self, name: str = "lighthouse") -> None:
        """Start a lighthouse, at its earlier address if it had one, and wait until it answers.

        Raises FabricError where the lighthouse ends.
        """
        ready = self.folder / "lighthouse" / f"{name}.json"
        ready.unlink(missing_ok=True)
        port = self.urls[name].rpartition(":")[2] if name in self.urls else "0"
        command = ["fabric.cli.main", "lighthouse", "--store", self.store, "--bind", f"127.0.0.1:{port}"]
        command += ["--token-file", str(self.token_file), "--ready-file", str(ready)]
        self.processes.start(name, [*command, *self.lighthouse_options], self.log(name))
        wait_for(ready.exists, lambda: self._not_ready(name))
        self.urls[name] = str(json.loads(ready.read_bytes())["url"])

    def start_replica(self, name: str, launch: Iterable[str], settings: Mapping[str, str]) -> None:
        """Start `fabric launch` with the words ``launch``; ``settings`` win over those of the job."""
        self.run_dir(name).mkdir(mode=0o700, exist_ok=True)
        own = {
            "FABRIC_JOB": self.name,
            "FABRIC_REPLICA": name,
            "FABRIC_REPLICAS": str(len(self.replicas)),
            "FABRIC_LIGHTHOUSE": ",".join(self.urls.values()),
            "FABRIC_TOKEN_FILE": str(self.token_file),
            "FABRIC_JOURNAL": str(self.journal(name)),
            "FABRIC_RUN_DIR": str(self.run_dir(name)),
            "FABRIC_BIND": "127.0.0.1",
        }
        self.processes.start(
            name, ["fabric.cli.main", "launch", *launch], self.log(name), **{**own, **settings}
        )

    def note(self, event: str, t: float | None = None, **fields: object) -> None:
        """Write what the command does or sees into the job's log, for the audit of the journals."""
        entry = {"event": event, "t": time.time() if t is None else t, **fields}
        with (self.folder / SUPERVISOR_FILE).open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")

    def check(self, name: str) -> int | None:
        """Return 0 for a process that has ended well, None for one that runs. Raises FabricError else."""
        code = self.processes.exit_code(name)
        if code:
            raise FabricError(f"{name} ended with exit code {code}{self.last_words(name)}")
        return code

    def is_over(self) -> bool:
        """Whether every launcher has ended with exit code 0. Raises FabricError if one ended otherwise."""
        return {self.check(name) for name in self.replicas} == {0}

    def last_words(self, name: str) -> str:
        """Return the error of a failed process for the end of a sentence: its own sentence, and its log."""
        log, text = self.log(name), ""
        with contextlib.suppress(OSError), log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - _LAST_BYTES))
            lines = [line.strip() for line in file.read().decode(errors="replace").splitlines()]
            own = [line for line in lines if line and " fabric.cli.launch." not in line]
            sentences = [line[line.index("fabric: ") :] for line in own if "fabric: " in line]
            text = (sentences or own or [""])[-1][:_MOST_WORDS]
        return f"{f' ({text})' if text else ''}: see its log {log}"

    def _not_ready(self, name: str) -> str:
        if self.check(name) is not None:
            raise FabricError(f"{name} ended before it was ready{self.last_words(name)}")
        return f"{name} is not ready{self.last_words(name)}"


@contextlib.contextmanager
def claimed(directory: Path, command: str, names: Sequence[str] = ()) -> Iterator[Path]:
    """Make ``directory`` ready for a new run of a ``command`` and lock it; yields its absolute path.

    The job of an earlier run in it and the command's own ``names`` are removed, anything else stays. Raises
    ConfigError where the folder holds files and is not one of ``command``, cannot be written, or belongs to a
    running command. The run writes a token there, so the folder of another user is refused too, and one in
    which all users may write.
    """
    directory = directory.absolute()
    marker = directory / f".fabric-{command}"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        _check_owner(directory)
        if not marker.exists() and any(directory.iterdir()):
            raise ConfigError(
                f"{directory} holds files and is not the folder of an earlier fabric {command}; name "
                "another with --out, or empty it."
            )
        descriptor = open_private(marker, os.O_CREAT | os.O_RDWR)
    except OSError as error:
        raise ConfigError(
            f"{directory} cannot be used ({error.strerror}); name a folder that can be written with --out."
        ) from error
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ConfigError(
                f"Another fabric {command} is running in {directory}; wait for it or name another folder "
                "with --out."
            ) from None
        _clear(directory, (*_NAMES, *names))
        yield directory
    finally:
        os.close(descriptor)


def _check_owner(directory: Path) -> None:
    there = directory.stat()
    if there.st_uid != os.geteuid():
        raise ConfigError(
            f"{directory} belongs to user {there.st_uid}, who could replace the token that this run writes "
            "there; name a folder of your own with --out."
        )
    if there.st_mode & 0o002:
        raise ConfigError(
            f"every user can write to {directory} and could replace the token that this run writes there; "
            "chmod o-w it, or name another folder with --out."
        )


def _clear(directory: Path, names: Sequence[str]) -> None:
    try:
        for path in (directory / name for name in names):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError(f"{error.filename} cannot be replaced: {error.strerror}.") from error


def interrupt_at_sigterm() -> None:
    """Handle SIGTERM as Ctrl-C, so that a command ends all started processes first."""

    def interrupt(number: int, frame: FrameType | None) -> NoReturn:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupt)


def wait_for(condition: Callable[[], object], problem: Callable[[], str], within_s: float = READY_S) -> None:
    """Poll until ``condition``. Raises FabricError with the sentence of ``problem`` after ``within_s``."""
    deadline = time.monotonic() + within_s
    while not condition():
        sentence = problem()
        if time.monotonic() > deadline:
            raise FabricError(sentence)
        time.sleep(POLL_S)

"""The injector of one trainer: a process that plays the faults which the lighthouse orders.

It exists only beside a trainer that was started for drills, and ends with that trainer. It asks the
lighthouse for the faults in force. It obeys a lighthouse that proves itself: by its certificate, or, where
FABRIC_DRILL names a file, by the key in it. So a process that takes the port of a lighthouse orders nothing.
The injector undoes a fault that the answer no longer names, and all faults when no lighthouse answers for
LEASE_S. If the injector dies, its guard continues the trainer, and the trainer drops the injector's orders.
"""

import contextlib
import json
import logging
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec.structs import asdict

from fabric.drill.injection.drilled_processes import DrilledProcesses, ProcessTarget
from fabric.drill.injection.played_faults import PLAYERS, Evidence, PlayedFault, Script
from fabric.drill.injection.undo_guard import UndoGuard
from fabric.drill.schedule.drill_schedule import ScheduledFault
from fabric.errors import FabricError, ProtocolError, Refused
from fabric.model import Value
from fabric.runtime.config import Settings, settings
from fabric.runtime.drill_orders import MOST_SECONDS, proof_of
from fabric.runtime.http.lighthouse_client import Lighthouses
from fabric.runtime.http.token_file import TokenFile, is_same, read_tokens
from fabric.runtime.process_environment import (
    LAUNCH_MARK,
    LAUNCH_RESTARTS,
    outliving_environment,
    process_environment,
    start_helper,
)
from fabric.runtime.system_calls import boot_id

log = logging.getLogger(__name__)

# Without an answer of a lighthouse for so long, all faults are undone.
LEASE_S = 10.0
# The lighthouse keeps a request of an idle injector for so long.
WAIT_S = 3.0
_PAUSE_S = 0.5
_PLAY_S = 0.1


class TrainerAddress(Value):
    """The trainer of an injector, as the trainer names itself."""

    pid: int
    job: str
    replica: str
    run_dir: Path
    restarts: bool  # whether a launcher starts it again
    key_file: str = ""  # holds the key of a lighthouse's orders; empty: the certificate proves the lighthouse

    def words(self) -> dict[str, Any]:
        return {**asdict(self), "run_dir": str(self.run_dir)}

    @classmethod
    def of_words(cls, words: Mapping[str, Any]) -> "TrainerAddress":
        return cls(**{**words, "run_dir": Path(words["run_dir"])})


class OrderedFault(msgspec.Struct, frozen=True):
    """One fault in an answer of the lighthouse."""

    number: int
    fault: str
    seconds: Annotated[float, msgspec.Meta(ge=0, le=MOST_SECONDS)]
    point: str = ""


class InjectorAnswer(msgspec.Struct, frozen=True):
    """An answer of the lighthouse."""

    drill: str
    faults: list[OrderedFault] = []


class OwnProcesses(DrilledProcesses):
    """The processes of one trainer, whatever others of its replica live on this host."""

    def __init__(self, job: str, own: ProcessTarget) -> None:
        super().__init__(job)
        self._own = own

    def trainer(self, replica: str) -> ProcessTarget:
        """As in the base class."""
        return self._own


class Injector:
    """Plays the faults of one trainer, which are all that it may touch."""

    def __init__(self, trainer: TrainerAddress, client: Lighthouses, guard: UndoGuard) -> None:
        self._trainer, self._client, self.guard = trainer, client, guard
        self._target = ProcessTarget(trainer.pid)
        self.processes = OwnProcesses(trainer.job, self._target)
        self._key = TokenFile(Path(trainer.key_file)) if trainer.key_file else None
        self._logged = ""
        self._id = os.urandom(8).hex()
        self._host = boot_id()
        self.drill = ""
        self._faults: dict[int, PlayedFault] = {}
        self._until: dict[int, float] = {}  # by fault: monotonic seconds
        self._answered = time.monotonic()

    def run(self) -> None:
        try:
            while not self._target.is_gone:
                self._turn()
            self._look()
            self._end_all()
            self._look()
            with contextlib.suppress(FabricError):
                self._ask(is_gone=True)
        finally:
            self._end_all()

    def _turn(self) -> None:
        self._look()
        if self._faults:
            select.select([self._target.descriptor], [], [], _PLAY_S)
        try:
            answer = self._ask()
        except FabricError as error:
            if isinstance(error, ProtocolError) and str(error) != self._logged:
                self._logged = str(error)
                log.warning("%s", error)
            if time.monotonic() - self._answered > LEASE_S:
                self._end_all()
            select.select([self._target.descriptor], [], [], _PAUSE_S)
            return
        self._answered = time.monotonic()
        self._obey(answer)

    def _obey(self, answer: InjectorAnswer) -> None:
        if answer.drill != self.drill:
            self._end_all()
            self._faults, self.drill = {}, answer.drill
        wanted = {x.number: x for x in answer.faults}
        for number, fault in self._faults.items():
            if number not in wanted:
                self._try(fault, fault.end)
        for number, order in wanted.items():
            if number not in self._faults:
                self._until[number] = time.monotonic() + order.seconds if order.seconds else float("inf")
                fault = self._faults[number] = PlayedFault(order.fault)
                fault.script = self._script(fault, order)
                self._try(fault, fault.look)

    def run_dir(self, replica: str) -> Path:
        return self._trainer.run_dir

    def restarted(self, names: Sequence[str]) -> Evidence:
        """Return nothing: the lighthouse sees the next process."""
        return lambda: ""

    def _script(self, fault: PlayedFault, order: OrderedFault) -> Script:
        """Play the fault that the lighthouse orders. Raises Refused for a fault of another version."""
        if order.fault not in PLAYERS:
            raise Refused(f"this injector plays no {order.fault[:40]}: use a drill of its version")
        replica, seconds = self._trainer.replica, order.seconds
        wanted = ScheduledFault(order.fault, replica, lasts_s=seconds, point=order.point)
        yield from PLAYERS[order.fault](self, fault, wanted)

    @staticmethod
    def _try(fault: PlayedFault, action: Callable[[], None]) -> None:
        """Look at a fault, or end it; a fault that cannot be played is over."""
        try:
            action()
        except (FabricError, OSError) as error:
            fault.problem, fault.is_ended = str(error), True

    def _look(self) -> None:
        for number, fault in self._faults.items():
            if not fault.is_over:
                self._try(fault, fault.look)
            if time.monotonic() >= self._until[number]:
                self._try(fault, fault.end)

    def _end_all(self) -> None:
        for fault in self._faults.values():
            self._try(fault, fault.end)

    def _ask(self, *, is_gone: bool = False) -> InjectorAnswer:
        is_busy = is_gone or any(not x.is_over for x in self._faults.values())
        body: dict[str, Any] = {
            "replica": self._trainer.replica,
            "id": self._id,
            "pid": self._target.pid,
            "host": self._host,
            "restarts": self._trainer.restarts,
            "gone": is_gone,
            "wait_s": 0.0 if is_busy else WAIT_S,
            "drill": self.drill,
            "nonce": os.urandom(16).hex(),
            "reports": {},
        }
        for number, x in self._faults.items():
            texts = {"observed": x.observed, "undone": x.undone, "problem": x.problem}
            if any(texts.values()):
                body["reports"][str(number)] = {name: text for name, text in texts.items() if text}
        keys = None if self._key is None else self._key.accepted()
        return read_answer(self._client.ask(self._client.path("injector"), body), body["nonce"], keys)


def read_answer(answer: object, nonce: str = "", keys: Sequence[str] | None = None) -> InjectorAnswer:
    """Return the lighthouse's orders. Raises ProtocolError for anything else.

    ``keys``: the answer proves one of them, with ``nonce``; None: the connection has proved the lighthouse.
    """
    try:
        if keys is not None:
            body = dict(answer) if isinstance(answer, dict) else {}
            given = body.pop("proofs", [])
            proofs = [proof for proof in given if isinstance(proof, str)] if isinstance(given, list) else []
            if not any(is_same(proof, proof_of(key, nonce, body)) for proof in proofs for key in keys):
                raise ProtocolError(
                    "an answer at the lighthouse's address does not prove the key of FABRIC_DRILL: print the "
                    "key again with `fabric drill --print-key`, and look at which process has that port"
                )
        return msgspec.convert(answer, InjectorAnswer)
    except (msgspec.ValidationError, UnicodeError) as error:
        raise ProtocolError(f"the lighthouse's order cannot be read ({str(error)[:300]})") from error


def start_injector(chosen: Settings) -> None:
    """Start the injector of this trainer; it outlives the trainer for a moment, to report its end.

    Start none where no lighthouse can prove itself: by a certificate, or by the key that FABRIC_DRILL names.
    """
    key_file = chosen.drill if chosen.drill.startswith("/") else ""
    if not key_file and not all(url.startswith("https://") for url in chosen.lighthouse):
        return
    if key_file:
        read_tokens(Path(key_file))
    environment = process_environment()
    restarts = is_started_again(environment)
    trainer = TrainerAddress(os.getpid(), chosen.job, chosen.replica, chosen.home, restarts, key_file)
    variables = {
        "FABRIC_JOB": chosen.job,
        "FABRIC_REPLICA": chosen.replica,
        "FABRIC_LIGHTHOUSE": ",".join(chosen.lighthouse),
        "FABRIC_TOKEN_FILE": str(chosen.token_file or ""),
        "FABRIC_TLS": str(chosen.tls.folder or ""),
    }
    start_helper(
        "fabric.drill.injection.injector",
        json.dumps(trainer.words()),
        stdin=subprocess.DEVNULL,
        env=outliving_environment() | variables,
    )


def is_started_again(environment: Mapping[str, str]) -> bool:
    """Whether a launcher starts a process with this environment again when it dies."""
    if LAUNCH_MARK in environment:
        return environment.get(LAUNCH_RESTARTS) != "0"
    return environment.get("TORCHELASTIC_MAX_RESTARTS", "0") not in ("", "0")


def main(trainer: TrainerAddress) -> None:
    chosen = settings()
    client = Lighthouses(tuple(chosen.lighthouse), chosen.job, TokenFile(chosen.token_file), chosen.tls)
    with contextlib.closing(UndoGuard()) as guard, contextlib.suppress(KeyboardInterrupt):
        Injector(trainer, client, guard).run()


if __name__ == "__main__":
    main(TrainerAddress.of_words(json.loads(sys.argv[1])))

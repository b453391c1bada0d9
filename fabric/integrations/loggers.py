"""A job's goodput and recoveries in the run that people watch: TensorBoard, Weights & Biases, MLflow.

Every replica makes a ``JobLog``, and the one that writes files writes the log too. So each figure is there
once per job. A thread asks the lighthouse every few seconds, and training does not wait for it.
"""

import importlib
import logging
import threading
from collections.abc import Callable, Mapping
from typing import Any

import fabric.client
from fabric.errors import FabricError
from fabric.model import Value
from fabric.runtime.http.lighthouse_client import Lighthouses

_log = logging.getLogger("fabric")


class LogEntry(Value):
    """The figures of one step by name, and a sentence where a failure is over."""

    step: int
    figures: Mapping[str, float]
    sentence: str = ""


Sink = Callable[[LogEntry], None]


def tensorboard(writer: Any) -> Sink:
    """Return a sink for a ``SummaryWriter`` of torch.utils.tensorboard (or tensorboardX)."""

    def write(entry: LogEntry) -> None:
        for name, value in entry.figures.items():
            writer.add_scalar(name, value, entry.step)
        if entry.sentence:
            writer.add_text("fabric/recovery", entry.sentence, entry.step)
        writer.flush()

    return write


def wandb(run: Any) -> Sink:
    """Return a sink for a run of wandb. The figures have an axis of their own, ``fabric/step``."""
    run.define_metric("fabric/step", hidden=True)
    run.define_metric("fabric/*", step_metric="fabric/step")

    def write(entry: LogEntry) -> None:
        # Without commit=False the run's own step would go on, and refuse the loop's next figures.
        run.log({**entry.figures, "fabric/step": entry.step}, commit=False)
        if entry.sentence:
            run.summary[f"fabric/recovery at step {entry.step}"] = entry.sentence

    return write


def mlflow(run_id: str, client: Any = None) -> Sink:
    """Return a sink for the run ``run_id`` of MLflow; ``client`` is an MlflowClient, by default a new one."""
    if client is None:
        client = importlib.import_module("mlflow").MlflowClient()

    def write(entry: LogEntry) -> None:
        for name, value in entry.figures.items():
            client.log_metric(run_id, name, value, step=entry.step)
        if entry.sentence:
            client.set_tag(run_id, f"fabric.recovery.{entry.step}", entry.sentence)

    return write


class JobLog:
    """Writes a job's goodput and each failure that is over to ``sink``, until ``close``.

    ``session``: of ``fabric.client.attach``. ``every_s``: how often it asks the lighthouse. With
    FABRIC_DISABLE=1 it writes nothing.
    """

    def __init__(
        self, session: "fabric.client.Session | fabric.client.SoloSession", sink: Sink, every_s: float = 10.0
    ) -> None:
        self._sink = sink
        self._every_s = every_s
        self._written: set[str] = set()  # incident ids of failures that this or another replica has written
        self._ends = threading.Event()
        self._thread: threading.Thread | None = None
        if isinstance(session, fabric.client.Session):
            self._session = session
            self._thread = threading.Thread(target=self._follow, name="fabric-job-log", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Ask and write for the last time; call it before ``session.close()``."""
        self._ends.set()
        if self._thread is not None:
            self._thread.join()

    def _follow(self) -> None:
        while not self._ends.wait(self._every_s):
            self._look()
        self._look()

    def _look(self) -> None:
        settings = self._session.settings
        token = settings.token.decode()
        try:
            job = Lighthouses(settings.lighthouse, settings.job, token, settings.tls)
            recoveries = job.ask_lines(job.path("recoveries"))
            ledger = job.ask(job.path())["ledger"]
        except (FabricError, KeyError) as error:
            _log.debug("fabric: %s: no figures for the job's log now: %s", settings.replica, error)
            return
        try:
            self.write(recoveries, ledger)
        except Exception as error:  # noqa: BLE001  (a logger's failure must not end a training)
            _log.warning("fabric: %s: the job's log cannot be written: %s", settings.replica, error)

    def write(self, recoveries: list[dict[str, Any]], ledger: Mapping[str, Any]) -> None:
        """Write what is new, if this replica writes; else note that another replica writes it."""
        new = [x for x in recoveries if x.get("step_committed") and x["incident_id"] not in self._written]
        if not self._session.is_writer:
            if self._session.members:
                self._written.update(x["incident_id"] for x in new)
            return
        for x in new:
            figures = {
                "fabric/recovery_s": float(x["step_committed"] - x["detected"]),
                "fabric/steps_lost": float(x.get("steps_lost", 0)),
                "fabric/replicas_lost": float(len(x.get("lost", {}))),
            }
            self._sink(LogEntry(int(x["step"]), figures, f"{x['incident_id']} ({x['kind']}): {x['why']}"))
            self._written.add(x["incident_id"])
        if ledger.get("goodput") is not None:
            figures = {
                f"fabric/{name}_s": float(ledger[name]) for name in ("degraded", "recovering", "stalled")
            }
            figures["fabric/goodput"] = float(ledger["goodput"])
            self._sink(LogEntry(self._session.committed_step, figures))

"""A job's log, with the real packages where they are installed."""

from types import SimpleNamespace

import pytest

import fabric.client
from fabric.integrations.loggers import JobLog, LogEntry, mlflow, tensorboard, wandb

DEATH = {
    "incident_id": "e2",
    "kind": "death",
    "why": "r1: its process is gone",
    "step": 12,
    "detected": 100.0,
    "step_committed": 100.5,
    "steps_lost": 1,
    "lost": {"r1": {}},
}
OPEN = {**DEATH, "incident_id": "e3", "step_committed": 0.0, "step": 20}
LEDGER = {"goodput": 0.75, "degraded": 1.0, "recovering": 0.5, "stalled": 0.0}


class QuietLog(JobLog):
    """A log that asks no lighthouse."""

    def __init__(self, sink, writes=True, members=("r0",)):
        super().__init__(SimpleNamespace(), sink)
        self._session = SimpleNamespace(is_writer=writes, members=members, committed_step=30)


def test_each_failure_is_written_once_when_it_is_over_and_goodput_every_time():
    entries: list[LogEntry] = []
    log = QuietLog(entries.append)
    log.write([DEATH, OPEN], LEDGER)
    log.write([DEATH, {**OPEN, "step_committed": 102.0}], {"goodput": None})
    assert [(e.step, e.sentence) for e in entries] == [
        (12, "e2 (death): r1: its process is gone"),
        (30, ""),
        (20, "e3 (death): r1: its process is gone"),
    ]
    assert entries[0].figures == {
        "fabric/recovery_s": 0.5,
        "fabric/steps_lost": 1.0,
        "fabric/replicas_lost": 1.0,
    }
    assert entries[1].figures["fabric/goodput"] == 0.75


def test_a_replica_that_becomes_the_writer_writes_only_what_is_new():
    entries: list[LogEntry] = []
    log = QuietLog(entries.append, writes=False)
    log.write([DEATH], LEDGER)
    assert entries == []
    log._session.is_writer = True
    log.write([DEATH, {**OPEN, "step_committed": 102.0}], {"goodput": None})
    assert [e.step for e in entries] == [20]


def test_before_a_job_has_members_nothing_counts_as_written():
    entries: list[LogEntry] = []
    log = QuietLog(entries.append, writes=False, members=())
    log.write([DEATH], LEDGER)
    log._session = SimpleNamespace(is_writer=True, members=("r0",), committed_step=30)
    log.write([DEATH], {"goodput": None})
    assert [e.step for e in entries] == [12]


def test_disabled_nothing_is_written(monkeypatch):
    monkeypatch.setenv("FABRIC_DISABLE", "1")
    import torch

    model = torch.nn.Linear(1, 1)
    session = fabric.client.attach(model, torch.optim.SGD(model.parameters(), lr=0.1))
    log = JobLog(session, pytest.fail, every_s=0.01)
    log.close()


def write(sink):
    log = QuietLog(sink)
    log.write([DEATH], LEDGER)


def test_tensorboard_gets_scalars_and_text(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(tmp_path) as writer:
        write(tensorboard(writer))
    events = EventAccumulator(str(tmp_path)).Reload()
    assert [(e.step, e.value) for e in events.Scalars("fabric/recovery_s")] == [(12, 0.5)]
    assert [(e.step, e.value) for e in events.Scalars("fabric/goodput")] == [(30, 0.75)]
    [text] = events.Tensors("fabric/recovery/text_summary")
    assert text.tensor_proto.string_val == [b"e2 (death): r1: its process is gone"]


def test_mlflow_gets_metrics_and_a_tag(tmp_path):
    client_of = pytest.importorskip("mlflow").MlflowClient
    client = client_of(f"sqlite:///{tmp_path}/mlflow.db")
    run_id = client.create_run(client.create_experiment("job")).info.run_id
    write(mlflow(run_id, client))
    [point] = client.get_metric_history(run_id, "fabric/recovery_s")
    assert (point.step, point.value) == (12, 0.5)
    assert client.get_run(run_id).data.tags["fabric.recovery.12"] == "e2 (death): r1: its process is gone"


def test_wandb_gets_figures_with_an_axis_of_their_own(tmp_path):
    package = pytest.importorskip("wandb")
    run = package.init(mode="offline", dir=str(tmp_path), project="job")
    write(wandb(run))
    run.log({"loss": 1.0}, step=5)  # the loop's own step is still free
    assert run.summary["fabric/recovery at step 12"] == "e2 (death): r1: its process is gone"
    assert run.summary["fabric/goodput"] == 0.75 and run.summary["fabric/step"] == 30
    run.finish()

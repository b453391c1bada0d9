"""The folders and logs of a job under FabricStrategy, as the replicas write them one after the other."""

import csv
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("pytorch_lightning")
from pytorch_lightning.callbacks import ModelCheckpoint
from pytorch_lightning.cli import SaveConfigCallback
from pytorch_lightning.loggers import CSVLogger, TensorBoardLogger
from pytorch_lightning.utilities import rank_zero_only

from fabric.integrations.lightning.run_files import LogWriter, RunFiles, write_nothing


@pytest.fixture(autouse=True)
def rank():
    """The rank of Lightning's process, as another test may have left it."""
    before = rank_zero_only.rank
    write_nothing(SimpleNamespace(callbacks=[]))
    yield
    rank_zero_only.rank = before


def replica(folder, kind=CSVLogger, callbacks=()):
    logger = kind(folder)
    return SimpleNamespace(
        loggers=[logger],
        callbacks=list(callbacks),
        enable_autolog_hparams=False,
        lightning_module=None,
        log_dir=logger.log_dir,
        is_global_zero=True,
        strategy=SimpleNamespace(broadcast=lambda x: x),
    )


def rows(trainer):
    with Path(trainer.loggers[0].log_dir, "metrics.csv").open(newline="") as file:
        return [(int(row["step"]), row["loss"]) for row in csv.DictReader(file)]


def log(trainer, step):
    trainer.loggers[0].log_metrics(metrics={"loss": float(step), "epoch": 0}, step=step)
    trainer.loggers[0].save()


@pytest.mark.parametrize("kind", [CSVLogger, TensorBoardLogger])
def test_a_replica_that_joins_goes_on_in_the_jobs_folder(tmp_path, kind):
    first = replica(tmp_path, kind)
    callback = ModelCheckpoint()
    state = RunFiles(first).state_dict()
    (tmp_path / "lightning_logs" / "version_0").mkdir(parents=True)
    late = replica(tmp_path, kind, [callback])
    callback.dirpath = f"{late.loggers[0].log_dir}/checkpoints"
    assert late.loggers[0].version == 1
    RunFiles(late).load_state_dict(state)
    assert late.loggers[0].log_dir == first.loggers[0].log_dir
    assert callback.dirpath == f"{first.loggers[0].log_dir}/checkpoints"


def test_the_next_writer_goes_on_in_the_log_with_each_step_once(tmp_path):
    first, second = replica(tmp_path), replica(tmp_path)
    one, two = LogWriter(first), LogWriter(second)
    RunFiles(second).load_state_dict(RunFiles(first).state_dict())
    one.turn(is_writer=True)
    log(first, 0)
    log(first, 1)
    with Path(first.loggers[0].log_dir, "metrics.csv").open("a") as file:
        file.write("0,torn")  # the writer ends within a line
    two.turn(is_writer=False)
    for step in (0, 1, 2):
        log(second, step)
        if step == 0:
            two.turn(is_writer=False, committed=True)
    two.turn(is_writer=True, committed=True)
    log(second, 3)
    assert rows(second) == [(step, str(float(step))) for step in range(4)]


class Settings:
    """Stands in for the parser of LightningCLI, which needs jsonargparse."""

    def save(self, config, path, **_):
        Path(path).write_text(config)


def test_the_writer_alone_saves_the_settings_of_a_cli_and_the_next_one_again(tmp_path):
    savers = [SaveConfigCallback(Settings(), "settings") for _ in range(2)]
    first, second = (replica(tmp_path, callbacks=[x]) for x in savers)
    for trainer in (first, second):
        write_nothing(trainer)
        trainer.callbacks[0].setup(trainer, None, "fit")
    assert list(tmp_path.iterdir()) == []
    one, two = LogWriter(first), LogWriter(second)
    for is_writer in (False, True):
        one.turn(is_writer=not is_writer)
        two.turn(is_writer=is_writer)
    assert [x.read_text() for x in tmp_path.rglob("config.yaml")] == ["settings"]


def test_a_replica_that_does_not_write_makes_no_folder(tmp_path):
    trainer = replica(tmp_path)
    LogWriter(trainer).turn(is_writer=False)
    log(trainer, 0)
    assert list(tmp_path.iterdir()) == []


def test_all_replicas_give_a_checkpoint_the_same_name(tmp_path):
    (tmp_path / "old.ckpt").touch()
    callback = ModelCheckpoint(tmp_path)
    files = RunFiles(replica(tmp_path, callbacks=[callback]))
    new = tmp_path / "new.ckpt"
    new.touch()  # by the writer, which is ahead
    assert callback.file_exists(tmp_path / "old.ckpt", None) and not callback.file_exists(new, None)
    files.note_saved(new)
    assert callback.file_exists(new, None)
    other = ModelCheckpoint(tmp_path / "elsewhere")
    late = RunFiles(replica(tmp_path, callbacks=[other]))
    late.load_state_dict(files.state_dict())
    assert other.file_exists(tmp_path / "elsewhere" / "new.ckpt", None)
    files.note_removed(new)
    assert not callback.file_exists(new, None)


def test_a_checkpoint_by_the_clock_is_each_replicas_own(tmp_path):
    callback = ModelCheckpoint(tmp_path, train_time_interval=timedelta(minutes=1))
    files = RunFiles(replica(tmp_path, callbacks=[callback]))
    files.note_saved(tmp_path / "new.ckpt")
    assert files.state_dict()["saved"] == []

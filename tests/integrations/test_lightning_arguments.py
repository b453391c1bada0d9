"""The tables of Lightning's arguments, callbacks and hooks, against the installed release and the docs."""

import dataclasses

import pytest

pytest.importorskip("pytorch_lightning")
import pytorch_lightning
from pytorch_lightning import callbacks
from pytorch_lightning.utilities.types import LRSchedulerConfig
from refusal_pages import check_page

from fabric.integrations.lightning import arguments


def test_each_argument_of_the_trainer_has_a_row():
    assert arguments.TRAINER.unknown(pytorch_lightning.Trainer.__init__) == []


def test_each_shipped_callback_has_a_row():
    shipped = {name for name in dir(callbacks) if isinstance(getattr(callbacks, name), type)}
    assert shipped | {"SaveConfigCallback"} == set(arguments.CALLBACKS), "LightningCLI brings that one"


@pytest.mark.parametrize(
    ("base", "table"),
    [
        (pytorch_lightning.LightningModule, arguments.MODULE),
        (pytorch_lightning.LightningDataModule, arguments.DATA_MODULE),
        (pytorch_lightning.Callback, arguments.CALLBACK),
    ],
)
def test_each_hook_has_a_row(base, table):
    assert set(arguments.hooks_of(base)) == set(table.methods)


def test_each_key_of_a_scheduler_has_a_row():
    keys = {field.name for field in dataclasses.fields(LRSchedulerConfig)}
    assert keys == set(arguments.SCHEDULER)


def test_the_page_has_the_table():
    tables = {
        "Trainer": arguments.TRAINER.rows,
        "callbacks": arguments.CALLBACKS,
        "LightningModule": arguments.MODULE.methods,
        "LightningDataModule": arguments.DATA_MODULE.methods,
        "your own Callback": arguments.CALLBACK.methods,
        "scheduler": arguments.SCHEDULER,
    }
    check_page("lightning", tables)

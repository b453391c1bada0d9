"""The tables of FabricTrainer have a row for every argument and method of the installed transformers."""

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from alone_in_job import Net, adopted, attach_alone, samples, train
from transformers import Trainer, TrainerCallback, TrainerControl, TrainingArguments
from transformers.trainer_pt_utils import AcceleratorConfig

from fabric.errors import ConfigError
from fabric.integrations.arguments import Kept, overridable
from fabric.integrations.huggingface.arguments import ACCELERATOR, ARGUMENTS, CALLBACK, TRAINER, tables
from fabric.integrations.transformers import FabricTrainer


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    attach_alone(monkeypatch, 3)


def test_every_argument_has_a_row():
    for table, api in ((ARGUMENTS, TrainingArguments), (ACCELERATOR, AcceleratorConfig), (TRAINER, Trainer)):
        assert table.unknown(api) == [], table.subject
        names = {x.name for x in dataclasses.fields(api)} if dataclasses.is_dataclass(api) else None
        assert names is None or set(table.rows) <= names, "a row that no argument has"


def test_every_method_and_event_has_a_row():
    assert TRAINER.unknown_methods(FabricTrainer) == []
    own = {"shared_state", "_busy", "_end_epoch", "_settings"}
    assert set(TRAINER.methods) - own <= set(overridable(Trainer))
    events = overridable(TrainerCallback)
    flags = [x.name for x in dataclasses.fields(TrainerControl)]
    assert set(CALLBACK.rows) == {*events, *flags}


class DealsItself(Trainer):
    def get_batch_samples(self, epoch_iterator, num_batches, device):
        return super().get_batch_samples(epoch_iterator, num_batches, device)


class Writes(Trainer):
    def is_world_process_zero(self):
        return True


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (DealsItself, "FabricTrainer refuses DealsItself.get_batch_samples, because FabricTrainer deals out"),
        (Writes, "FabricTrainer refuses Writes.is_world_process_zero, because one replica writes"),
    ],
)
def test_a_method_that_would_change_the_training_is_refused_by_name(tmp_path, kind, words):
    with pytest.raises(ConfigError, match=words):
        train(adopted(kind), tmp_path, Net(), samples(12), replicas=3, max_steps=1)


@dataclass
class TrainingArgumentsOfTomorrow(TrainingArguments):
    half_of_the_data: bool = field(default=False)


TrainingArgumentsOfTomorrow.__name__ = "TrainingArguments"
TrainingArgumentsOfTomorrow.__module__ = "transformers.training_args"


@pytest.mark.parametrize("given", [True, False])
def test_an_argument_that_no_row_knows_is_refused_unless_it_has_its_default(tmp_path, given):
    chosen = TrainingArgumentsOfTomorrow(
        str(tmp_path),
        report_to="none",
        use_cpu=True,
        max_steps=1,
        save_strategy="no",
        half_of_the_data=given,
    )
    trainer = FabricTrainer(Net(), chosen, train_dataset=samples(24))
    if not given:
        trainer.train()
        return
    with pytest.raises(ConfigError, match=r"does not know TrainingArguments\(half_of_the_data=True\)"):
        trainer.train()


TABLES = (ARGUMENTS.rows, ACCELERATOR.rows, TRAINER.rows, TRAINER.methods, CALLBACK.rows)
SHOWN = {row.shown_by for rows in TABLES for row in rows.values() if isinstance(row, Kept)}


@pytest.mark.parametrize("shown_by", sorted(SHOWN))
def test_a_test_or_a_recipe_shows_what_is_kept(shown_by):
    tests = Path(__file__).parent.parent
    assert list(tests.glob(f"**/{shown_by.removeprefix('recipe ')}.py")), f"there is no {shown_by}"


def test_the_page_has_the_tables():
    page = Path(__file__).parent.parent.parent / "docs" / "transformers.md"
    assert page.read_text().endswith(tables()), "write the page again: python " + __file__


if __name__ == "__main__":
    page = Path(__file__).parent.parent.parent / "docs" / "transformers.md"
    page.write_text(page.read_text().partition("## TrainingArguments")[0] + tables())

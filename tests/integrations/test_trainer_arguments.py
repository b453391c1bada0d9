"""The tables of FabricTrainer have a row for every argument and method of the installed transformers."""

import dataclasses
import functools
import inspect
from dataclasses import dataclass, field

import pytest
from alone_in_job import Net, adopted, assert_same, attach_alone, samples, train
from refusal_pages import check_page
from transformers import Trainer, TrainerCallback, TrainerControl, TrainingArguments
from transformers.trainer_pt_utils import AcceleratorConfig

from fabric.errors import ConfigError
from fabric.integrations.arguments import Row, overridable
from fabric.integrations.huggingface import trl
from fabric.integrations.huggingface.arguments import ACCELERATOR, ARGUMENTS, CALLBACK, TRAINER
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
    assert set(overridable(FabricTrainer)) <= set(TRAINER.methods)
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


def every_override(calls):
    """Return a Trainer whose every kept method notes its call, and does what the Trainer's does."""

    def override(name):
        def method(self, *arguments, **named):
            calls.add(name)
            return getattr(super(Overrides, self), name)(*arguments, **named)

        return method

    kept = [
        name
        for name, row in TRAINER.methods.items()
        if row == Row("kept", test_an_override_is_called.__name__)
    ]
    names = [name for name in kept if inspect.isfunction(inspect.getattr_static(Trainer, name, None))]
    Overrides = type("Overrides", (Trainer,), {name: override(name) for name in names})  # noqa: N806
    return Overrides


class Events(TrainerCallback):
    """Notes the events of a training, and the step of each."""

    def __init__(self):
        self.seen = []
        for name in overridable(TrainerCallback):
            setattr(self, name, functools.partial(self._note, name))

    def _note(self, name, _args, state, _control, **_):
        if name != "on_substep_end":  # the replicas share the micro-batches of a step
            self.seen.append((name, state.global_step))


def evaluated(kind, folder, replicas=1, **more):
    given = {"eval_strategy": "steps", "eval_steps": 4, "save_strategy": "steps", "save_steps": 4}
    more |= {"eval_dataset": samples(9)}
    return train(kind, folder, Net(), samples(50), replicas=replicas, num_train_epochs=2, more=more, **given)


def test_an_override_is_called(tmp_path):
    calls = set(), set()
    plain = evaluated(every_override(calls[0]), tmp_path / "a")
    ours = evaluated(adopted(every_override(calls[1])), tmp_path / "b", 3)
    assert_same(plain, ours)
    assert calls[1] - {"remove_callback"} == calls[0] and len(calls[0]) > 30  # the job has a callback


def test_callbacks_see_the_events_of_the_trainer(tmp_path):
    plain, ours = Events(), Events()
    evaluated(Trainer, tmp_path / "a", callbacks=[plain])
    evaluated(FabricTrainer, tmp_path / "b", 3, callbacks=[ours])
    assert ours.seen == plain.seen and len({name for name, _ in plain.seen}) > 10


def test_the_page_has_the_table():
    tables = {
        "TrainingArguments": ARGUMENTS.rows,
        "accelerator_config": ACCELERATOR.rows,
        "Trainer": TRAINER.rows,
        "methods of Trainer": TRAINER.methods,
        "TrainerControl": CALLBACK.rows,
        **{x.subject: x.rows for x in (*trl.CONFIGS.values(), *trl.TRAINERS.values())},
        **{f"methods of {x.subject}": x.methods for x in trl.TRAINERS.values()},
    }
    check_page("transformers", tables)

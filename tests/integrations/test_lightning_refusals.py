"""FabricStrategy without services: what it refuses, each in one sentence, before anything has run."""

import importlib
import sys
from datetime import timedelta
from types import ModuleType, SimpleNamespace

import pytest
import torch

pytest.importorskip("pytorch_lightning")
from pytorch_lightning import Callback, LightningModule, Trainer
from pytorch_lightning import callbacks as lightning_callbacks
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from fabric.errors import ConfigError
from fabric.integrations.adopt import adoption
from fabric.integrations.adopt.adoption import run_adopted
from fabric.integrations.lightning import FabricStrategy, arguments
from fabric.integrations.lightning.job import EpochShape, ManualSteps, check_closure, set_counters, set_place

DATA = TensorDataset(torch.ones(24, 2))


class Stream(IterableDataset):
    def __iter__(self):
        return iter([torch.ones(2)])


class Net(LightningModule):
    def __init__(self, optimizers=1, manual=False):
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)
        self.automatic_optimization = not manual
        self._count = optimizers

    def training_step(self, batch, batch_idx):
        return self.layer(batch[0]).mean()

    def configure_optimizers(self):
        optimizers = [torch.optim.SGD(self.parameters(), lr=0.1) for _ in range(self._count)]
        return optimizers if self._count > 1 else optimizers[0]


@pytest.fixture(autouse=True)
def replica(monkeypatch):
    monkeypatch.setenv("FABRIC_REPLICA", "r0")
    monkeypatch.setenv("FABRIC_REPLICAS", "3")
    monkeypatch.setenv("FABRIC_LIGHTHOUSE", "http://127.0.0.1:1")


def trainer(**named):
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    return Trainer(
        strategy=FabricStrategy(), accelerator="cpu", enable_checkpointing=False, **{**quiet, **named}
    )


@pytest.mark.parametrize(
    ("module", "options", "data", "error"),
    [
        (
            {"optimizers": 2, "manual": True},
            {},
            DATA,
            "takes one optimizer, and configure_optimizers gives 2",
        ),
        ({}, {"max_epochs": -1}, DATA, "the Trainer has no end: give it max_epochs or max_steps"),
        ({}, {"max_epochs": 1}, Stream(), "the IterableDataset Stream, whose epochs have no known length"),
        ({}, {"max_epochs": 1, "limit_train_batches": 0.1}, DATA, "a batch of the job has 6 samples, and a"),
        (
            {},
            {"max_time": timedelta(hours=1)},
            DATA,
            "the callback Timer, because each replica has",
        ),
        ({}, {"reload_dataloaders_every_n_epochs": 1}, DATA, "reload_dataloaders_every_n_epochs=1"),
        (
            {},
            {"val_check_interval": timedelta(hours=1)},
            DATA,
            "give a number of batches, or a part of an",
        ),
    ],
)
def test_a_trainer_that_cannot_be_kept_equal_is_refused(module, options, data, error):
    with pytest.raises(ConfigError, match=error):
        trainer(**options).fit(Net(**module), DataLoader(data, batch_size=2))


def test_a_loop_of_ones_own_in_the_trainer_is_refused():
    one = trainer(max_epochs=1)

    class Own(type(one.fit_loop)):
        pass

    own = Own(one, max_epochs=1)
    own.epoch_loop = one.fit_loop.epoch_loop
    one.fit_loop = own
    with pytest.raises(ConfigError, match="follows the Trainer's own loops, and this one has a Own"):
        one.fit(Net(), DataLoader(DATA, batch_size=2))


class Batches:
    def __iter__(self):
        return iter([[torch.ones(2, 2)]])


def test_data_that_are_no_dataloader_are_refused():
    with pytest.raises(ConfigError, match="got a Batches"):
        trainer(max_epochs=1).fit(Net(), Batches())


def test_several_dataloaders_are_refused():
    loaders = {"a": DataLoader(DATA, batch_size=2), "b": DataLoader(DATA, batch_size=2)}
    with pytest.raises(ConfigError, match="the Trainer reads several training DataLoaders"):
        trainer(max_epochs=1).fit(Net(), loaders)


CALLBACKS = [
    lightning_callbacks.StochasticWeightAveraging(swa_lrs=0.1),
    lightning_callbacks.BackboneFinetuning(),
    lightning_callbacks.GradientAccumulationScheduler({0: 1, 2: 2}),
    lightning_callbacks.LearningRateFinder(),
    lightning_callbacks.BatchSizeFinder(),
    lightning_callbacks.Timer("00:01:00:00"),
    lightning_callbacks.ModelPruning("l1_unstructured"),
]


@pytest.mark.parametrize("callback", CALLBACKS, ids=lambda x: type(x).__name__)
def test_a_callback_that_changes_the_training_apart_is_refused_by_name(callback):
    own = trainer(max_epochs=1, callbacks=[callback])
    net = Net()
    net.backbone, net.batch_size = torch.nn.Linear(2, 2), 2
    net.train_dataloader = lambda: DataLoader(DATA, batch_size=2)
    with pytest.raises(ConfigError, match=f"refuses the callback {type(callback).__name__}, because"):
        own.fit(net)


class Hidden(Callback):
    def on_load_checkpoint(self, trainer, module, checkpoint):
        self.seen = checkpoint["seen"]


def test_a_callback_whose_state_only_its_hooks_know_is_refused():
    with pytest.raises(ConfigError, match=r"refuses Hidden\.on_load_checkpoint, because"):
        trainer(max_epochs=1, callbacks=[Hidden()]).fit(Net(), DataLoader(DATA, batch_size=2))


class ReadsItself(Net):
    def training_step(self, dataloader_iter):
        raise AssertionError("it never runs")


def test_a_training_step_that_reads_itself_is_refused():
    with pytest.raises(ConfigError, match="training_step takes dataloader_iter"):
        trainer(max_epochs=1).fit(ReadsItself(), DataLoader(DATA, batch_size=2))


# --- names of a newer release ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rows", "name", "error"),
    [
        (arguments.CALLBACKS, "LambdaCallback", "does not know the callback LambdaCallback"),
        (
            arguments.MODULE.methods,
            "configure_callbacks",
            r"does not know what Own\.configure_callbacks changes",
        ),
        (arguments.TRAINER.rows, "max_epochs", r"does not know Trainer\(max_epochs=1\)"),
    ],
)
def test_a_name_without_a_row_is_refused_as_unknown(monkeypatch, rows, name, error):
    monkeypatch.delitem(rows, name)

    class Own(Net):
        def configure_callbacks(self):
            return []

    own = trainer(max_epochs=1, callbacks=[lightning_callbacks.LambdaCallback()])
    with pytest.raises(ConfigError, match=error):
        own.fit(Own(), DataLoader(DATA, batch_size=2))


def test_half_precision_with_a_scaler_is_refused():
    own = trainer(max_epochs=1)
    own.fit_loop.trainer = SimpleNamespace()
    own._accelerator_connector._precision_flag = "16-mixed"
    own.strategy.precision_plugin.precision = "16-mixed"
    with pytest.raises(ConfigError, match='say "bf16-mixed"'):
        arguments.check_trainer(own, {})


@pytest.mark.parametrize(("step", "epoch", "within"), [(7, 1, 3), (8, 2, 0), (3, 0, 3)])
def test_the_loops_go_on_at_the_jobs_step(step, epoch, within):
    own = trainer(max_epochs=9, accumulate_grad_batches=2)
    own.fit_loop._data_fetcher = SimpleNamespace(fetched=0)
    epochs = EpochShape(positions=14, batch_size=2, replicas=1, accumulation=2)  # 7 batches, 4 steps
    set_counters(own, step, epochs)
    loop = own.fit_loop
    assert (own.global_step, loop.epoch_progress.current.processed) == (step, epoch)
    assert loop.epoch_loop.total_batch_idx == 7 * epoch + 2 * within - 1
    assert not loop.restarting
    set_place(own, step, epochs)
    assert loop.epoch_loop.batch_progress.current.ready == loop._data_fetcher.fetched == 2 * within


class ManualJob:
    """A step of two micro-batches here; the average is 3."""

    def __init__(self, parameter, following):
        self.parameter, self.following, self.kept, self.has_batch = parameter, iter(following), None, True
        self.gradients = self

    def next_micro_batch(self):
        following = next(self.following, None)
        if following is None:
            self.summed, self.parameter.grad = self.parameter.grad, torch.tensor(3.0)
        return following

    def prepared(self, batch):
        return batch

    def scale(self):
        return 2.0

    def set_aside(self):
        self.kept, self.parameter.grad = self.parameter.grad, None

    def bring_back(self):
        if self.kept is not None:
            self.kept, self.parameter.grad = None, self.kept


def test_a_manual_step_computes_what_is_left_and_updates_once():
    parameter, counts, updates = torch.nn.Parameter(torch.tensor(1.0)), SimpleNamespace(global_step=0), []
    job = ManualJob(parameter, [5.0])
    steps = ManualSteps(counts, job)

    def script(batch):
        parameter.grad = None  # as zero_grad does
        loss = parameter * batch
        steps.backward(lambda factor: (loss * factor).backward(), loss)
        updates.append(parameter.grad.item())
        counts.global_step += 1

    steps.training_step(script, 4.0)
    assert updates == [3.0] and job.summed == 2.0 * (4.0 + 5.0)


@pytest.mark.parametrize(("backwards", "updates"), [(0, 0), (2, 1), (1, 0), (1, 2)])
def test_a_manual_step_of_another_form_is_refused(backwards, updates):
    parameter, counts = torch.nn.Parameter(torch.tensor(1.0)), SimpleNamespace(global_step=0)
    steps = ManualSteps(counts, ManualJob(parameter, []))

    def script(batch):
        loss = parameter * batch
        for _ in range(backwards):
            steps.backward(lambda factor: (loss * factor).backward(), loss)
        counts.global_step += updates

    words = f"manual_backward {backwards} times and made {updates} updates, and FabricStrategy needs one"
    with pytest.raises(ConfigError, match=words):
        steps.training_step(script, 4.0)


def test_a_closure_in_manual_optimization_is_refused():
    with pytest.raises(ConfigError, match="gives its optimizer a closure"):
        check_closure(lambda: None)


# --- fabric run --adopt -----------------------------------------------------------------------------------


def test_a_script_that_makes_a_trainer_is_left_to_the_strategy(capsys):
    made, backward, begin = [], torch.autograd.backward, Trainer.__init__

    def script():
        assert torch.autograd.backward is not backward
        made.append(Trainer(logger=False, accelerator="cpu"))
        assert torch.autograd.backward is backward

    with pytest.raises(ConfigError, match="ended without a training by its FabricStrategy"):
        run_adopted(script)
    assert isinstance(made[0].strategy, FabricStrategy) and Trainer.__init__ is begin
    assert "adopted the script's pytorch_lightning.Trainer as FabricStrategy;" in capsys.readouterr().err


def test_a_trainer_with_a_strategy_of_its_own_is_refused():
    with pytest.raises(ConfigError, match="the Trainer has the strategy 'ddp', and --adopt replaces none"):
        run_adopted(lambda: Trainer(strategy="ddp"))


def test_a_framework_is_noticed_when_it_is_imported(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    odd = adoption.Adapter("Trainer", "odd_adapter", "Odd")
    monkeypatch.setitem(adoption.ADAPTERS, "odd_framework", odd)
    (tmp_path / "odd_framework.py").write_text("class Trainer:\n    pass\n")
    adapter = ModuleType("odd_adapter")
    adapter.Odd = type("Odd", (), {})
    adapter.adopt_trainer = lambda trainer, hand_over: (
        seen.append((trainer.__name__, hand_over)) or seen.clear
    )
    monkeypatch.setitem(sys.modules, "odd_adapter", adapter)
    seen, handed = [], []
    with adoption.adopted_frameworks(lambda *names: handed.append(names)):
        importlib.import_module("odd_framework")
        [(name, hand_over)] = seen
        hand_over()
        assert (name, handed) == ("Trainer", [("odd_framework.Trainer", "Odd")])
    assert seen == [], "undone with the context"
    del sys.modules["odd_framework"]

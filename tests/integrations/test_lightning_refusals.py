"""FabricStrategy without services: what it refuses, and the counters of Lightning's loops."""

import importlib
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

pytest.importorskip("pytorch_lightning")
from pytorch_lightning import LightningModule, Trainer
from pytorch_lightning.callbacks import EarlyStopping
from torch.utils.data import DataLoader, TensorDataset

from fabric.errors import ConfigError
from fabric.integrations.adopt import frameworks
from fabric.integrations.adopt.adoption import run_adopted
from fabric.integrations.lightning import FabricStrategy, _refuse
from fabric.integrations.lightning_counters import EarlyStops, set_counters
from fabric.integrations.lightning_manual import ManualSteps, check_closure

DATA = TensorDataset(torch.ones(24, 2))


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
        ({}, {"max_epochs": 1}, TensorDataset(torch.ones(5, 2)), "a step of the job has 6 samples, and the"),
    ],
)
def test_a_trainer_that_cannot_be_kept_equal_is_refused(module, options, data, error):
    with pytest.raises(ConfigError, match=error):
        trainer(**options).fit(Net(**module), DataLoader(data, batch_size=2))


class Stream:
    def __iter__(self):
        return iter([[torch.ones(2, 2)]])


def test_data_that_are_no_dataloader_are_refused():
    with pytest.raises(ConfigError, match=r"the Trainer has a Stream: give Trainer\.fit a DataLoader"):
        trainer(max_epochs=1).fit(Net(), Stream())


@pytest.mark.parametrize(
    ("optimizers", "precision", "error"),
    [(1, "16-mixed", 'say precision="bf16-mixed"'), (2, "32-true", "takes one optimizer, and configure_op")],
)
def test_what_only_a_device_allows_is_refused_too(optimizers, precision, error):
    strategy = SimpleNamespace(optimizers=[None] * optimizers)
    module = SimpleNamespace(automatic_optimization=True)
    with pytest.raises(ConfigError, match=error):
        _refuse(SimpleNamespace(lightning_module=module, strategy=strategy, precision=precision))


@pytest.mark.parametrize(("step", "epoch", "within"), [(7, 1, 3), (8, 2, 0), (3, 0, 3)])
def test_the_loops_go_on_at_the_jobs_step(step, epoch, within):
    own = trainer(max_epochs=9, accumulate_grad_batches=2)
    set_counters(own, step, steps_per_epoch=4)
    loop = own.fit_loop
    assert (own.global_step, loop.epoch_progress.current.processed) == (step, epoch)
    assert loop.epoch_loop.batch_progress.current.ready == 2 * within
    assert loop.epoch_loop.total_batch_idx == 2 * step - 1
    assert loop.restarting is (within > 0)


def test_early_stopping_is_shared_state():
    first, second = (EarlyStopping("loss", patience=3) for _ in range(2))
    first.wait_count, first.best_score = 2, torch.tensor(0.5)
    EarlyStops(SimpleNamespace(callbacks=[second])).load_state_dict(
        EarlyStops(SimpleNamespace(callbacks=[first])).state_dict()
    )
    assert second.wait_count == 2 and second.best_score == 0.5
    assert EarlyStops(SimpleNamespace(callbacks=[])).state_dict() == {}


class ManualJob:
    """A step of two micro-batches here; the average is 3."""

    def __init__(self, parameter, following):
        self.parameter, self.following, self.kept, self.has_batch = parameter, iter(following), None, True

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
    odd = frameworks.Adapter("Trainer", "odd_adapter", "Odd")
    monkeypatch.setitem(frameworks.ADAPTERS, "odd_framework", odd)
    (tmp_path / "odd_framework.py").write_text("class Trainer:\n    pass\n")
    adapter = ModuleType("odd_adapter")
    adapter.Odd = type("Odd", (), {})
    adapter.adopt_trainer = lambda trainer, hand_over: (
        seen.append((trainer.__name__, hand_over)) or seen.clear
    )
    monkeypatch.setitem(sys.modules, "odd_adapter", adapter)
    seen, handed = [], []
    with frameworks.adopted_frameworks(lambda *names: handed.append(names)):
        importlib.import_module("odd_framework")
        [(name, hand_over)] = seen
        hand_over()
        assert (name, handed) == ("Trainer", [("odd_framework.Trainer", "Odd")])
    assert seen == [], "undone with the context"
    del sys.modules["odd_framework"]

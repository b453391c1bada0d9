"""What the integrations refuse, in one sentence and before anything is changed."""

import logging

import pytest
import torch
from accelerate.local_sgd import LocalSGD
from transformers import TrainingArguments

from fabric.errors import ConfigError, FabricError
from fabric.integrations import arguments
from fabric.integrations.accelerate import FabricAccelerator
from fabric.integrations.transformers import FabricTrainer


class Tiny(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1))

    def forward(self, x, labels):
        return {"loss": ((self.weight * x - labels) ** 2).mean()}


DATA = [{"x": torch.ones(1), "labels": torch.zeros(1)} for _ in range(8)]


@pytest.fixture
def replica(monkeypatch, tmp_path):
    """The environment of a replica whose lighthouse does not exist: nothing may dial it."""
    monkeypatch.setenv("FABRIC_LIGHTHOUSE", "http://127.0.0.1:9")
    monkeypatch.setenv("FABRIC_REPLICA", "r0")
    monkeypatch.setenv("FABRIC_REPLICAS", "3")
    monkeypatch.setenv("FABRIC_RUN_DIR", str(tmp_path / "run"))
    return tmp_path


def trainer(folder, more=None, **arguments):
    chosen = TrainingArguments(str(folder / "out"), report_to="none", use_cpu=True, max_steps=2, **arguments)
    return FabricTrainer(Tiny(), chosen, train_dataset=DATA, **(more or {}))


class Adam8bit(torch.optim.Adam):
    """Named as the optimizers of bitsandbytes."""


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"optim": "adamw_8bit"}, r"TrainingArguments\(optim=.*adamw_8bit.*choose one such as optim="),
        ({"optim": "galore_adamw"}, r"TrainingArguments\(optim=.*galore_adamw"),
        ({"optim": "schedule_free_adamw"}, r"TrainingArguments\(optim=.*schedule_free_adamw"),
        ({"more": {"optimizer_cls_and_kwargs": (Adam8bit, {})}}, r"the optimizer .*\.Adam8bit: choose"),
        ({"auto_find_batch_size": True}, r"TrainingArguments\(auto_find_batch_size=True\)"),
        ({"train_sampling_strategy": "batch_rebalance"}, 'train_sampling_strategy="batch_rebalance"'),
        ({"average_tokens_across_devices": False}, r"\(average_tokens_across_devices=False\)"),
        ({"accelerator_config": {"split_batches": True}}, r"accelerator_config\(split_batches=True\)"),
        ({"enable_jit_checkpoint": True}, r"TrainingArguments\(enable_jit_checkpoint=True\)"),
        ({"save_on_each_node": True}, r"TrainingArguments\(save_on_each_node=True\)"),
    ],
)
def test_a_trainer_that_cannot_stay_equal_is_refused_before_anything_begins(replica, arguments, words):
    refused = trainer(replica, **arguments)
    with pytest.raises(
        ConfigError, match=f"^FabricTrainer (refuses|cannot keep replicas equal with) .*{words}"
    ):
        refused.train()
    assert refused.optimizer is None and not refused.is_in_train and not (replica / "run").exists()


@pytest.mark.parametrize("plugin", ["deepspeed", "fsdp"])
def test_a_plugin_that_spreads_a_replica_is_refused_by_name(replica, plugin):
    refused = trainer(replica)
    setattr(refused, f"is_{plugin}_enabled", True)
    with pytest.raises(ConfigError, match=f"{plugin} spreads a replica over several processes"):
        refused.train()


def test_a_search_for_hyperparameters_is_refused(replica):
    with pytest.raises(ConfigError, match="a hyperparameter search"):
        trainer(replica).train(trial=object())


def test_without_a_lighthouse_the_sentence_is_that_of_attach(monkeypatch, tmp_path):
    monkeypatch.delenv("FABRIC_LIGHTHOUSE", raising=False)
    with pytest.raises(ConfigError, match="no lighthouse is named: set FABRIC_LIGHTHOUSE"):
        trainer(tmp_path).train()


def test_disabled_nothing_is_refused(monkeypatch, tmp_path):
    monkeypatch.setenv("FABRIC_DISABLE", "1")
    done = trainer(tmp_path, save_strategy="no", train_sampling_strategy="sequential").train()
    assert done.global_step == 2


def test_a_release_that_is_too_old_is_refused_with_the_versions(replica, monkeypatch):
    monkeypatch.setattr(arguments.metadata, "version", lambda name: "4.57.6")
    with pytest.raises(
        ConfigError,
        match=r"transformers 4\.57\.6 is installed, and fabric\.integrations\.transformers needs 5\.10\.1 "
        r"or newer \(tested with 5\.23\.0\): run pip install -U transformers",
    ):
        trainer(replica).train()


@pytest.mark.parametrize(
    ("version", "warned"), [("5.23.9", False), ("5.24.0.dev0", True), ("6.0", True), ("5.10.4", True)]
)
def test_a_release_that_nobody_has_tested_is_named_in_the_log(monkeypatch, caplog, version, warned):
    monkeypatch.setattr(arguments.metadata, "version", lambda name: version)
    with caplog.at_level(logging.WARNING, "fabric"):
        arguments.check_version("transformers", "5.10", "5.23.0")
    assert [f"transformers {version} is not 5.23.0" in x.message for x in caplog.records] == [True] * warned


# --- accelerate ----------------------------------------------------------------------


def parts(shuffle=True):
    model = torch.nn.Linear(1, 1)
    data = torch.utils.data.TensorDataset(torch.ones(8, 1))
    return (
        model,
        torch.optim.SGD(model.parameters(), 0.1),
        torch.utils.data.DataLoader(data, 2, shuffle=shuffle),
    )


def test_two_models_are_refused_before_one_is_prepared(replica):
    accelerator, (model, optimizer, loader) = FabricAccelerator(), parts()
    with pytest.raises(ConfigError, match="prepares two models, and FabricAccelerator exchanges"):
        accelerator.prepare(model, torch.nn.Linear(2, 2), optimizer, loader)
    assert not accelerator._models and not accelerator._optimizers
    accelerator.prepare(model, optimizer)
    with pytest.raises(ConfigError, match="prepares two models"):
        accelerator.prepare(torch.nn.Linear(2, 2))


def test_an_optimizer_of_8_bits_is_refused_by_name(replica):
    model = torch.nn.Linear(1, 1)
    with pytest.raises(
        ConfigError, match=r"cannot keep replicas equal with the optimizer .*\.Adam8bit: choose"
    ):
        FabricAccelerator().prepare(model, Adam8bit(model.parameters()))


def test_local_sgd_of_accelerate_is_refused(replica):
    accelerator, (model, optimizer, loader) = FabricAccelerator(), parts()
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    with (
        LocalSGD(accelerator=accelerator, model=model, local_sgd_steps=2),
        pytest.raises(
            ConfigError,
            match="refuses LocalSGD, because it averages gradients in each step: leave it out",
        ),
    ):
        next(iter(loader))


def test_a_loss_of_unprepared_batches_is_refused_with_what_to_prepare(replica):
    accelerator, (model, optimizer, loader) = FabricAccelerator(), parts()
    model, optimizer, batches = accelerator.prepare(model, optimizer, (x for x in loader))
    with pytest.raises(
        FabricError, match=r"prepare one DataLoader for the training, and make a cycle\(...\)"
    ):
        accelerator.backward(model(next(batches)[0]).sum())


def test_a_closure_and_a_batch_that_is_not_the_jobs_are_refused(replica):
    accelerator, (model, optimizer, loader) = FabricAccelerator(), parts()
    model, optimizer, loader, held_out = accelerator.prepare(model, optimizer, loader, parts(False)[2])
    with pytest.raises(FabricError, match=r"optimizer.step got a closure"):
        optimizer.step(lambda: None)
    [(x,), *_] = held_out
    with pytest.raises(FabricError, match="a batch that is not of the job: prepare one DataLoader"):
        accelerator.backward(model(x).sum())
    assert model.weight.grad is None and not (replica / "run").exists()


def test_an_accelerate_that_is_too_old_is_refused_with_the_versions(replica, monkeypatch):
    monkeypatch.setattr(arguments.metadata, "version", lambda name: "0.34.2")
    with pytest.raises(
        ConfigError, match=r"accelerate 0\.34\.2 is installed, and .* needs 1\.10\.0 or newer"
    ):
        FabricAccelerator()


def test_what_accelerate_reports_is_that_of_the_job(replica):
    accelerator, (model, optimizer, loader) = FabricAccelerator(gradient_accumulation_steps=2), parts()
    held_out = parts(shuffle=False)[2]
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    model, optimizer, loader, held_out, scheduler = accelerator.prepare(
        model, optimizer, loader, held_out, scheduler
    )
    assert accelerator.num_processes == 3 and accelerator.is_main_process
    assert len(loader) == 2 and len(held_out) == 4, "12 samples a step, and an evaluation of all samples"
    optimizer.step()
    scheduler.step()
    assert scheduler.get_last_lr() == [0.1 * 0.5**3], "as accelerate does on three processes"
    accelerator.gradient_state._set_sync_gradients(False)
    before = scheduler.state_dict()
    scheduler.step()
    assert scheduler.state_dict() == before, "a micro-batch left a trace"
    accelerator.gradient_state._set_sync_gradients(True)

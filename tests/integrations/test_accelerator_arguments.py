"""Each argument and method of the installed Accelerator has a row, and what is refused is refused."""

from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import (
    DataLoaderConfiguration,
    DistributedDataParallelKwargs,
    GradientAccumulationPlugin,
)
from accelerate.utils.dataclasses import AORecipeKwargs, DDPCommunicationHookType
from refusal_pages import check_page

from fabric.errors import ConfigError
from fabric.integrations.accelerate import FabricAccelerator
from fabric.integrations.accelerate.arguments import (
    ACCELERATOR,
    CONFIGURATIONS,
    HANDLERS,
    METHODS,
    check_arguments,
)


@pytest.fixture(autouse=True)
def replica(monkeypatch, tmp_path):
    monkeypatch.setenv("FABRIC_LIGHTHOUSE", "http://127.0.0.1:9")
    monkeypatch.setenv("FABRIC_REPLICA", "r1")
    monkeypatch.setenv("FABRIC_REPLICAS", "3")
    monkeypatch.setenv("FABRIC_RUN_DIR", str(tmp_path / "run"))


def test_every_argument_of_the_installed_release_has_a_row():
    assert not ACCELERATOR.unknown(Accelerator)
    for kind, table in CONFIGURATIONS.items():
        assert not table.unknown(kind), kind.__name__


def test_every_method_of_the_installed_release_has_a_row():
    assert not {x for x in dir(Accelerator) if not x.startswith("_")} - set(METHODS)


@pytest.mark.parametrize(
    "given", [{"split_batches": False}, {"dynamo_backend": "no"}, {"mixed_precision": "no"}]
)
def test_a_default_that_the_user_spells_out_is_accepted(given):
    check_arguments((), given)


def test_a_method_of_a_newer_release_is_refused(monkeypatch):
    monkeypatch.delitem(METHODS, "gather_for_metrics")
    from fabric.integrations.accelerate.arguments import refused_methods

    assert "newer release" in refused_methods()["gather_for_metrics"].words


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (
            {"dataloader_config": DataLoaderConfiguration(split_batches=True)},
            "split_batches=True.* batch size",
        ),
        ({"split_batches": True}, r"Accelerator\(split_batches=True\)"),
        ({"dynamo_backend": "eager"}, r"dynamo_backend='eager'"),
        ({"mixed_precision": "fp8"}, 'choose "bf16"'),
        ({"gradient_accumulation_plugin": GradientAccumulationPlugin(2, sync_with_dataloader=False)}, "pass"),
        ({"kwargs_handlers": [AORecipeKwargs.__new__(AORecipeKwargs)]}, "AORecipeKwargs in kwargs_handlers"),
        (
            {"kwargs_handlers": [DistributedDataParallelKwargs(comm_hook=DDPCommunicationHookType.FP16)]},
            "a comm_hook, because fabric averages",
        ),
        ({"fsdp_plugin": object()}, "spreads a replica over several processes"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_an_argument_that_cannot_be_kept_is_one_sentence(given, words):
    with pytest.raises(ConfigError, match=f"^FabricAccelerator refuses .*{words}") as error:
        FabricAccelerator(**given)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["lomo_backward", "trigger_sync_in_backward", "join_uneven_inputs", "clear"])
def test_a_method_that_cannot_be_kept_is_one_sentence(name):
    with pytest.raises(ConfigError, match=f"^FabricAccelerator refuses accelerator.{name}, because "):
        getattr(FabricAccelerator(cpu=True), name)()


def test_disabled_every_method_is_the_accelerators_own(monkeypatch):
    monkeypatch.setenv("FABRIC_DISABLE", "1")
    accelerator = FabricAccelerator(cpu=True)
    model = torch.nn.Linear(1, 1)
    accelerator.prepare(model)
    with accelerator.join_uneven_inputs([model]):
        pass
    accelerator.set_trigger()
    assert accelerator.check_trigger() and accelerator.process_index == 0
    assert accelerator.reduce(torch.ones(1)).item() == 1
    assert accelerator.on_main_process(lambda: "ran")() == "ran"


def test_functions_of_one_process_run_on_one_replica():
    accelerator = FabricAccelerator(cpu=True)
    assert (accelerator.process_index, accelerator.is_main_process) == (1, False)
    assert accelerator.on_main_process(lambda: "ran")() is None
    assert accelerator.on_last_process(lambda: "ran")() is None
    assert accelerator.on_process(lambda: "ran", process_index=1)() == "ran"
    assert accelerator.on_process(process_index=0)(lambda: "ran")() is None


@pytest.mark.parametrize(("name", "printed"), [("r0", "hello\n"), ("r1", "")])
def test_print_acts_on_the_replica_of_is_main_process(monkeypatch, capsys, name, printed):
    monkeypatch.setenv("FABRIC_REPLICA", name)
    accelerator = FabricAccelerator(cpu=True)
    accelerator.print("hello")
    assert capsys.readouterr().out == printed and accelerator.is_main_process == bool(printed)


def test_figures_of_the_training_and_sums_are_refused():
    accelerator = FabricAccelerator(cpu=True)
    assert accelerator.reduce(torch.ones(2), "mean").sum() == 2
    with pytest.raises(ConfigError, match=r'reduce with reduction="sum" would add'):
        accelerator.reduce(torch.ones(2))
    accelerator._replica.trains = True
    for name in ("gather", "gather_for_metrics", "reduce"):
        with pytest.raises(ConfigError, match=rf"accelerator\.{name} in the training loop cannot reach"):
            getattr(accelerator, name)(torch.ones(2))
    accelerator._replica.evaluates = True  # within the pass, after an update
    assert accelerator.gather(torch.ones(2)).sum() == 2


def test_a_scheduler_of_epochs_makes_one_step():
    accelerator = FabricAccelerator(cpu=True, step_scheduler_with_optimizer=False)
    optimizer = torch.optim.SGD(torch.nn.Linear(1, 1).parameters(), 1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    optimizer, scheduler = accelerator.prepare(optimizer, scheduler)
    scheduler.step()
    assert scheduler.get_last_lr() == [0.5]
    accelerator._replica.goes_over = True
    scheduler.step()
    optimizer.step()
    assert scheduler.get_last_lr() == [0.5]


def test_gradients_are_clipped_by_value_once_a_step():
    accelerator = FabricAccelerator(cpu=True)
    weight = torch.nn.Parameter(torch.zeros(2))
    weight.grad = torch.tensor([3.0, -3.0])
    accelerator._replica.goes_over = True
    accelerator.clip_grad_value_([weight], 1.0)
    assert weight.grad.tolist() == [3, -3], "not yet the gradient of the step"
    accelerator._replica.goes_over = False
    accelerator.clip_grad_value_([weight], 1.0)
    assert weight.grad.tolist() == [1, -1]


def test_the_page_has_the_table():
    arguments = {x.subject: x.rows for x in (ACCELERATOR, *CONFIGURATIONS.values())}
    check_page("accelerate", {**arguments, "kwargs_handlers": HANDLERS, "methods": METHODS})


def test_another_accumulation_in_mid_training_is_refused(monkeypatch):
    accelerator = FabricAccelerator(cpu=True, gradient_accumulation_steps=2)
    accelerator.gradient_accumulation_steps = 3
    assert accelerator.gradient_accumulation_steps == 3
    monkeypatch.setattr(type(accelerator._replica), "has_begun", True)
    accelerator.gradient_accumulation_steps = 3
    with pytest.raises(ConfigError, match="gradient_accumulation_steps after its first batch"):
        accelerator.gradient_accumulation_steps = 4


def test_a_script_that_fails_between_two_passes_waits_for_no_replica(monkeypatch):
    replica, closed = FabricAccelerator(cpu=True)._replica, []
    replica._session, replica._loop = SimpleNamespace(committed_step=4), SimpleNamespace()
    replica._loop_ended = True
    monkeypatch.setattr(replica, "close", lambda: closed.append(replica._closed))
    replica._note_failure(ValueError("an evaluation"))
    replica._close_at_exit()
    assert closed == [True]


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(torch.arange(8.0).reshape(8, 1))


def test_a_stream_that_the_loop_reads_to_its_end_is_refused():
    accelerator, model = FabricAccelerator(cpu=True), torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = torch.utils.data.DataLoader(Stream(), batch_size=2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    with pytest.raises(ConfigError, match=r"^the script reads its Stream to the end, and a job reads"):
        for _epoch in range(2):
            for x in loader:
                accelerator.backward(model(x).mean())


def test_a_stream_that_a_generator_repeats_is_taken(monkeypatch):
    accelerator, model = FabricAccelerator(cpu=True), torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = torch.utils.data.DataLoader(Stream(), batch_size=2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    def attach(*_, **__):
        raise InterruptedError

    def repeated():
        while True:
            for x in loader:
                yield 2 * x

    monkeypatch.setattr("fabric.client.attach", attach)
    with pytest.raises(InterruptedError):
        next(repeated())

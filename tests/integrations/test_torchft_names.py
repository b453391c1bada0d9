"""torchft's names over fabric in one process: what each method means, and what is refused."""

import socket
from datetime import timedelta

import pytest
import torch
from torch.distributed import ReduceOp

from fabric.errors import ConfigError, FabricError
from fabric.integrations import torchft as ft


class Replica:
    """A model, an optimizer and a scheduler under a Manager."""

    def __init__(self, **named) -> None:
        given = {"pg": ft.ProcessGroupGloo(), "min_replica_size": 1, **named}
        self.manager = ft.Manager(load_state_dict=lambda _: None, state_dict=self.states, **given)
        torch.manual_seed(0)
        self.model = ft.DistributedDataParallel(self.manager, torch.nn.Linear(3, 2))
        self.optimizer = ft.Optimizer(self.manager, torch.optim.SGD(self.model.parameters(), lr=0.5))
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2)

    def states(self) -> dict:
        held = {"model": self.model, "optim": self.optimizer, "scheduler": self.scheduler}
        return {**{name: x.state_dict() for name, x in held.items()}, "note": "mine"}

    def backward(self) -> None:
        self.model(torch.ones(4, 3)).sum().backward()

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.backward()
        self.optimizer.step()
        self.scheduler.step()


def test_every_process_group_of_torchft_has_its_name():
    for device in ("Gloo", "NCCL", "XCCL", "BabyGloo", "BabyNCCL", "BabyXCCL"):
        assert hasattr(ft, f"ProcessGroup{device}"), device


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    monkeypatch.setenv("FABRIC_DISABLE", "1")
    for name in ("FABRIC_REPLICAS", "FABRIC_REPLICA", "FABRIC_LIGHTHOUSE", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def replica():
    made = Replica()
    yield made
    made.manager.shutdown()


def test_a_step_is_counted_when_it_is_committed(replica):
    manager, before = replica.manager, replica.model.module.weight.detach().clone()
    assert (manager.current_step(), manager.batches_committed()) == (0, 0)
    replica.optimizer.zero_grad()
    assert (manager.num_participants(), manager.participating_rank(), manager.is_participating()) == (
        1,
        0,
        True,
    )
    replica.backward()
    assert (manager.current_step(), manager.batches_committed()) == (0, 0), "the update is still to come"
    assert torch.equal(replica.model.module.weight, before)
    replica.optimizer.step()
    assert manager.state_dict() == {"step": 1, "batches_committed": 1}
    assert torch.equal(replica.model.module.weight, before - 0.5 * 4 * torch.ones(2, 3))
    assert manager.num_participants() == 1, "the figure of the last step"


def test_a_checkpoints_step_is_where_the_count_begins(replica):
    replica.manager.load_state_dict({"step": 7, "batches_committed": 20})
    replica.step()
    assert replica.manager.state_dict() == {"step": 8, "batches_committed": 21}
    with pytest.raises(ConfigError, match="called after the first step"):
        replica.manager.load_state_dict({"step": 7, "batches_committed": 20})


def test_no_sync_adds_gradients_and_a_second_average_is_refused(replica):
    replica.optimizer.zero_grad()
    with replica.model.no_sync():
        replica.backward()
    replica.backward()
    assert torch.equal(replica.model.module.bias.grad, torch.full((2,), 8.0))
    with pytest.raises(FabricError, match="no_sync"):
        replica.backward()


def test_the_state_of_model_and_optimizer_is_carried_once(replica):
    replica.step()
    registered = replica.manager.registered
    assert set(registered.state_dict()["own"]["default"]) == {"scheduler", "note"}
    loaded: list[dict] = []
    replica.manager.registered.functions["default"] = loaded.append, replica.states
    registered.load_state_dict({"batches_committed": 9, "own": {"default": {"note": "theirs"}}})
    assert set(loaded[0]) == {"model", "optim", "scheduler", "note"} and loaded[0]["note"] == "theirs"
    assert replica.manager.batches_committed() == 9


def test_allreduce_averages_the_gradients_when_its_work_is_awaited(replica):
    manager, module = replica.manager, replica.model.module
    manager.start_quorum()
    with replica.model.no_sync():
        replica.backward()
    works = [manager.allreduce(parameter.grad) for parameter in module.parameters()]
    assert all(work.wait() for work in works)
    assert works[0].get_future().value() is module.weight.grad
    assert manager.should_commit() and manager.current_step() == 1


def test_a_wait_within_backward_is_refused(replica):
    def hook(parameter):
        replica.manager.allreduce(parameter.grad).wait()

    replica.model.module.weight.register_post_accumulate_grad_hook(hook)
    replica.manager.start_quorum()
    with pytest.raises(FabricError, match="wait after backward"), replica.model.no_sync():
        replica.backward()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"should_quantize": True}, "set FABRIC_EXCHANGE=int8"),
        ({"reduce_op": ReduceOp.SUM}, r"use ReduceOp\.AVG"),
        ({"tensor": torch.ones(5)}, r"shape \(5,\) that is the .grad of none"),
    ],
)
def test_an_allreduce_that_cannot_be_kept_is_refused(replica, arguments, words):
    replica.optimizer.zero_grad()
    with replica.model.no_sync():
        replica.backward()
    tensor = arguments.pop("tensor", replica.model.module.weight.grad)
    with pytest.raises(ConfigError, match=words):
        replica.manager.allreduce(tensor, **arguments)


def test_a_future_that_fails_gives_its_default_and_is_reported(replica):
    replica.optimizer.zero_grad()
    fut: torch.futures.Future = torch.futures.Future()
    wrapped = replica.manager.wrap_future(fut, "default")
    fut.set_exception(ValueError("broken"))
    assert wrapped.wait() == "default"
    assert str(replica.manager.errored().original_exception) == "broken"
    replica.optimizer.zero_grad()
    assert replica.manager.errored() is None, "another step"


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda r: r.backward(), "backward came before start_quorum"),
        (lambda r: r.manager.num_participants(), "before the first step"),
        (lambda r: r.manager.start_quorum(allow_heal=False), "allow_heal=False"),
        (lambda r: r.manager.start_quorum(shrink_only=True), "shrink_only=True"),
        (lambda r: r.optimizer.step(lambda: None), "closure"),
        (lambda r: r.manager.wrap_future(torch.futures.Future(), 1, timedelta(1)), "timeout"),
        (lambda r: ft.DistributedDataParallel(r.manager, torch.nn.Linear(1, 1)), "two models"),
        (lambda r: ft.DistributedDataParallel(r.manager, r.model, process_group=1), "process_group="),
        (lambda r: ft.ProcessGroupNCCL().allreduce([]), "ProcessGroupNCCL.allreduce is not there"),
    ],
)
def test_a_call_that_cannot_be_kept_is_one_sentence(replica, call, words):
    with pytest.raises(FabricError, match=words) as error:
        call(replica)
    assert "\n" not in str(error.value)


class OwnTransport(ft.CheckpointTransport):
    def metadata(self): ...
    def send_checkpoint(self, dst_ranks, step, state_dict, timeout): ...
    def recv_checkpoint(self, src_rank, metadata, step, timeout): ...


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"pg": object()}, "the process group object"),
        ({"min_replica_size": 0}, "min_replica_size=0"),
        ({"world_size": 4, "rank": 1}, "rank 1 of 4"),
        ({"world_size_mode": ft.WorldSizeMode.FIXED_WITH_SPARES}, "FABRIC_SPARE=1"),
        ({"checkpoint_transport": OwnTransport()}, "checkpoint_transport OwnTransport"),
        ({"quorum_size": 3}, "quorum_size="),
    ],
)
def test_an_argument_that_cannot_be_kept_ends_the_process_with_a_sentence(arguments, words, capsys):
    with pytest.raises(SystemExit) as left:
        Replica(**arguments)
    said = capsys.readouterr().err
    assert left.value.code == 1 and said.startswith("fabric: ") and said.count("\n") == 1
    assert words in said


def test_arguments_become_settings(monkeypatch):
    monkeypatch.setenv("FABRIC_REPLICAS", "2:8")
    named = {"timeout": timedelta(seconds=5), "max_retries": 3}
    names = {"replica_id": "ddp_0", "lighthouse_addr": "http://host:29510", "hostname": socket.gethostname()}
    made = Replica(min_replica_size=3, port=29600, **named, **names)
    assert made.manager.settings == {
        "replicas": "3:8",
        "exchange_s": 5.0,
        "replica": "ddp_0",
        "lighthouse": ("http://host:29510",),
        "bind": "[127.0.0.1]:29600",
        "on_abort": "retry 3",
    }
    monkeypatch.setenv("FABRIC_REPLICA", "r0")
    monkeypatch.setenv("FABRIC_LIGHTHOUSE", "http://other:8600")
    assert not {"replica", "lighthouse"} & set(Replica(**names).manager.settings), "the launcher's names win"


def test_arguments_without_effect_are_named_in_the_log(caplog):
    other = timedelta(seconds=5)
    Replica(quorum_timeout=other, connect_timeout=other, hostname="elsewhere")
    said = [record.getMessage() for record in caplog.records]
    for name, sentence in zip(("hostname", "quorum_timeout", "connect_timeout"), said, strict=True):
        assert sentence.startswith(f"Manager's {name} has no effect: ")


def test_the_sampler_cuts_the_data_as_torchfts_does():
    parts = [
        list(ft.DistributedSampler(range(12), replica, 3, group_rank=rank, num_replicas=2, shuffle=False))
        for replica in range(3)
        for rank in range(2)
    ]
    assert parts == [[first, first + 6] for first in range(6)]

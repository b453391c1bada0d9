"""torchft's LocalSGD and DiLoCo over fabric in one process: what is exchanged when, and what is refused."""

import pytest
import torch

import fabric.client
from fabric.errors import ConfigError
from fabric.integrations import torchft as ft


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    monkeypatch.setenv("FABRIC_DISABLE", "1")
    for name in ("FABRIC_REPLICAS", "FABRIC_REPLICA", "FABRIC_LIGHTHOUSE", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


def make_manager() -> ft.Manager:
    return ft.Manager(ft.ProcessGroupGloo(), None, None, 1, use_async_quorum=False)


def make_model() -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 90))


def make_outer(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)


def inner_steps(model: torch.nn.Module, inner: torch.optim.Optimizer, number: int, seed: int = 3) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(number):
        inner.zero_grad()
        model(torch.randn(5, 3, generator=generator)).square().sum().backward()
        inner.step()


def parameters_of(model: torch.nn.Module) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def test_each_fragment_is_exchanged_in_its_turn():
    """The second fragment has most of the parameters, so a cut by size would lie elsewhere."""
    model, manager = make_model(), make_manager()
    inner, outer = torch.optim.SGD(model.parameters(), lr=0.01), make_outer(model)
    with ft.DiLoCo(manager, [model[0], model[2]], inner, outer, sync_every=4, backup_device=None):
        shapes = []
        for turn in range(1, 3):
            inner_steps(model, inner, 2)
            assert manager.current_step() == turn
            shapes.append(sorted(tuple(x.shape) for x in outer.state))
        assert shapes == [[(4,), (4, 3)], [(4,), (4, 3), (90,), (90, 4)]]
        assert manager.state_dict() == {"step": 2}
        assert (manager.num_participants(), manager.participating_rank()) == (1, 0)


@pytest.mark.parametrize("kind", ["local", "diloco"])
def test_it_computes_what_fabrics_own_call_computes(kind):
    ours, theirs = make_model(), make_model()
    inner = torch.optim.AdamW(ours.parameters(), lr=0.01)
    if kind == "local":
        context = ft.LocalSGD(make_manager(), ours, inner, 3)
    else:
        context = ft.DiLoCo(
            make_manager(),
            [ours],
            inner,
            make_outer(ours),
            3,
            fragment_sync_delay=1,
            fragment_update_alpha=0.5,
        )
    with context:
        inner_steps(ours, inner, 11)
    inner = torch.optim.AdamW(theirs.parameters(), lr=0.01)
    if kind == "local":
        loop = fabric.client.local_sgd(theirs, inner, every=3)
    else:
        loop = fabric.client.diloco(theirs, inner, make_outer(theirs), every=3, delay=1, alpha=0.5)
    inner_steps(theirs, inner, 11)
    loop.close()
    assert all(map(torch.equal, parameters_of(ours), parameters_of(theirs)))


def test_the_methods_of_single_steps_are_refused_within_the_context():
    model, manager = make_model(), make_manager()
    inner = torch.optim.SGD(model.parameters(), lr=0.01)
    with ft.LocalSGD(manager, model, inner, 2):
        with pytest.raises(ConfigError, match="start_quorum was called with LocalSGD"):
            manager.start_quorum()
        with pytest.raises(ConfigError, match="batches_committed is not counted"):
            manager.batches_committed()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"should_quantize": True}, "should_quantize=True: leave it out, and set FABRIC_EXCHANGE=int8"),
        ({"bucket_size": 3}, "bucket_size="),
        ({"outers": 2}, "2 outer optimizers"),
        ({"fragments": 0}, "no model_fragments"),
        ({"every": 3, "fragments": 2}, "multiple of fragments"),
        ({"fragment_sync_delay": 4}, "delay is 4"),
        ({"fragment_update_alpha": 2.0}, "alpha is 2.0"),
        ({"wrapped": True}, "give the optimizer itself"),
        ({"fragments": 3}, "fragment 1 has no trainable parameter"),
    ],
)
def test_an_argument_that_cannot_be_kept_ends_the_process_with_a_sentence(arguments, words, capsys):
    model, manager = make_model(), make_manager()
    inner: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    if arguments.pop("wrapped", False):
        inner = ft.Optimizer(manager, inner)
    outers = [make_outer(model)] * arguments.pop("outers", 1)
    fragments = {0: [], 1: [model], 2: [model[0], model[2]], 3: list(model)}[arguments.pop("fragments", 1)]
    every = arguments.pop("every", 3)
    with pytest.raises(SystemExit) as left:
        ft.DiLoCo(manager, fragments, inner, outers, every, **arguments).__enter__()
    said = capsys.readouterr().err
    assert left.value.code == 1 and said.startswith("fabric: ") and said.count("\n") == 1
    assert words in said

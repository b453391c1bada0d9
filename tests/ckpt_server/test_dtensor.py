"""Each rank saves and loads its shards of FSDP2 models and their optimizers, bit for bit."""

import pytest
import torch
import torch.distributed as dist
from ckpt_server.test_training_state import to_bytes
from ftar.gathering import gather
from safetensors.torch import load
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from fabric.ckpt_server.state.training_state import capture, restore, verify
from fabric.errors import StateError
from fabric.ftar.buckets import FlatGradients


@pytest.fixture
def mesh(tmp_path):
    """A mesh of one rank: its tensors are real DTensors, without other processes."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
    dist.destroy_process_group()


def make(mesh, seed: int) -> dict:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.ReLU(), torch.nn.Linear(7, 3))
    fully_shard(model, mesh=mesh)
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=1e-2)}


def train(objects: dict, steps: int) -> None:
    for step in range(steps):
        objects["model"](torch.full((2, 5), float(step))).sum().backward()
        objects["optimizer"].step()
        objects["optimizer"].zero_grad()


def test_a_fresh_replica_takes_over_model_and_optimizer_bit_for_bit(mesh):
    one, other = make(mesh, 1), make(mesh, 2)
    train(one, 3)
    view = capture(one, 3)
    assert restore(memoryview(to_bytes(view)), other) == 3
    verify(other, 3, view.digest())
    assert isinstance(other["optimizer"].state[next(other["model"].parameters())]["exp_avg"], DTensor)
    train(one, 2), train(other, 2)
    assert capture(one, 5).digest() == capture(other, 5).digest()


def test_the_file_says_where_each_shard_lies_in_the_whole(mesh):
    objects = make(mesh, 1)
    view = capture(objects, 0)
    file = bytes(to_bytes(view))
    tensors = load(file)
    assert torch.equal(tensors["model/0.weight"], objects["model"][0].weight.to_local())
    text = bytes(view.header).decode(errors="replace").replace("\\", "")
    assert '"shape":[7,5]' in text and '"offset":[0,0]' in text and '"placements":["S(0)"]' in text


def test_a_job_of_one_replica_divides_the_gradients_of_each_sharded_layer(mesh):
    layers = [fully_shard(torch.nn.Linear(3, 3), mesh=mesh) for _ in range(2)]
    model = torch.nn.Sequential(*layers)
    model(torch.ones(2, 3)).sum().backward()
    before = [p.grad.to_local().clone() for p in model.parameters()]
    FlatGradients(model.named_parameters()).divide(4.0)
    for parameter, gradient in zip(model.parameters(), before, strict=True):
        assert parameter.grad.to_local().equal(gradient / 4)


def test_the_state_of_a_whole_model_does_not_fit_a_sharded_one(mesh):
    torch.manual_seed(1)
    whole = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.ReLU(), torch.nn.Linear(7, 3))
    objects = {"model": whole, "optimizer": torch.optim.AdamW(whole.parameters(), lr=1e-2)}
    sharded = make(mesh, 1)
    before = capture(sharded, 0).digest()
    with pytest.raises(StateError, match="placement whole in the snapshot"):
        restore(memoryview(to_bytes(capture(objects, 0))), sharded)
    assert capture(sharded, 0).digest() == before
    with pytest.raises(StateError, match="nothing is sharded so here"):
        restore(memoryview(to_bytes(capture(sharded, 0))), objects)


class Holder:
    """Shared state that is one tensor."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def state_dict(self) -> dict:
        return {"tensor": self.tensor}

    def load_state_dict(self, state: dict) -> None:
        self.tensor = state["tensor"]


def test_another_placement_is_refused_by_name(mesh):
    one = {"a": Holder(distribute_tensor(torch.ones(4, 2), mesh, [Shard(0)]))}
    other = {"a": Holder(distribute_tensor(torch.ones(4, 2), mesh, [Replicate()]))}
    with pytest.raises(StateError, match=r"sharded as S\(0\) on a mesh of dp=1"):
        restore(memoryview(to_bytes(capture(one, 0))), other)


def test_gradients_of_shards_go_into_the_flat_buffer_and_back(mesh):
    objects = make(mesh, 1)
    parameters = list(objects["model"].named_parameters())
    gradients = FlatGradients(parameters)
    buffer = torch.empty(gradients.nbytes, dtype=torch.uint8)
    objects["model"](torch.ones(2, 5)).sum().backward()
    gather(gradients, buffer)
    expected = [p.grad.full_tensor().clone() for _, p in parameters]
    for _, p in parameters[1:]:
        p.grad = None
    gradients.scatter(buffer, 2.0)
    for (name, p), grad in zip(parameters, expected, strict=True):
        assert isinstance(p.grad, DTensor), name
        assert torch.equal(p.grad.full_tensor(), grad / 2), name


def test_the_layout_tells_a_sharded_model_from_a_whole_one(mesh):
    whole = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.ReLU(), torch.nn.Linear(7, 3))
    sharded = make(mesh, 1)["model"]
    layouts = {FlatGradients(m.named_parameters()).layout for m in (whole, sharded)}
    assert len(layouts) == 2

"""Sharded tensors (DTensor) in training state: every rank's file holds its own shard, described in full.

A description has the shape of the full tensor, the shard's offset in it, its mesh and its placement. So a
reader with another layout can find the slice that it needs. Restoring takes the mesh from the live objects,
so a shard can be restored only where a live tensor has the same placement.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from fabric.errors import StateError
from fabric.protocol.rules.lanes import TensorRegion


class MeshPlacement(NamedTuple):
    """The layout of a DTensor, as files describe it."""

    names: tuple[str, ...]  # names of the mesh's dimensions; empty where the dimensions have no names
    sizes: tuple[int, ...]  # sizes of the mesh's dimensions
    placements: tuple[str, ...]

    def __str__(self) -> str:
        names = self.names or ("?",) * len(self.sizes)
        dims = ", ".join(f"{name}={size}" for name, size in zip(names, self.sizes, strict=True))
        return f"{', '.join(self.placements)} on a mesh of {dims}"


def is_sharded(tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` is a DTensor, without an import of its class."""
    return hasattr(tensor, "device_mesh")


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements in this process: a whole ordinary tensor, or this rank's shard of a DTensor."""
    if not is_sharded(tensor):
        return tensor
    with torch.no_grad():
        local: torch.Tensor = tensor.to_local()  # type: ignore[attr-defined]
    return local


def placement_key(tensor: Any) -> MeshPlacement:
    mesh = tensor.device_mesh
    names = tuple(mesh.mesh_dim_names or ())
    return MeshPlacement(names, tuple(mesh.shape), tuple(str(p) for p in tensor.placements))


def describe_shard(tensor: Any) -> dict[str, Any]:
    """Return the description of a DTensor's shard, for readers: shape, offset, mesh and placements."""
    names, sizes, placements = placement_key(tensor)
    return {
        "shape": list(tensor.shape),
        "offset": list(region_of(tensor).begin),
        "mesh": [list(names), list(sizes)],
        "placements": list(placements),
    }


@dataclass(slots=True)
class Shardings:
    """The placements of this process's live tensors, each with a tensor that has it."""

    examples: dict[MeshPlacement, Any] = field(default_factory=dict)

    def add(self, tensor: Any) -> None:
        """Add a DTensor's placement. Raises StateError where two meshes look the same."""
        example = self.examples.setdefault(placement_key(tensor), tensor)
        if not torch.equal(example.device_mesh.mesh, tensor.device_mesh.mesh):
            raise StateError(
                f"two device meshes are both described as {placement_key(tensor)}: give their "
                "dimensions different names (mesh_dim_names)"
            )

    def build(self, local: torch.Tensor, description: Mapping[str, Any]) -> torch.Tensor:
        """Return the DTensor whose shard here is ``local``. Raises StateError for an unknown placement."""
        from torch.distributed.tensor import DTensor

        names, sizes = description["mesh"]
        key = MeshPlacement(tuple(names), tuple(sizes), tuple(description["placements"]))
        example = self.examples.get(key)
        if example is None:
            raise StateError(
                f"the state has a tensor that is sharded as {key}, and nothing is sharded so here: "
                "run every replica with the same layout of ranks"
            )
        shape = torch.Size(description["shape"])
        built: torch.Tensor = DTensor.from_local(
            local.to(example.device),
            example.device_mesh,
            example.placements,
            run_check=False,
            shape=shape,
            stride=torch.empty(shape, device="meta").stride(),
        )
        expected = region_of(built)
        if expected != TensorRegion(tuple(description["offset"]), tuple(local.shape)):
            raise StateError(
                f"the shard at {description['offset']} of a tensor of {list(shape)} belongs to another rank: "
                f"this one's is at {list(expected.begin)}"
            )
        return built


@dataclass(slots=True)
class LocalParts(Shardings):
    """Placements of a reader without live tensors: a sharded tensor is its local part.

    ``parts``: the local parts by their ``id``, each with its description."""

    parts: dict[int, tuple[torch.Tensor, Mapping[str, Any]]] = field(default_factory=dict)

    def build(self, local: torch.Tensor, description: Mapping[str, Any]) -> torch.Tensor:
        self.parts[id(local)] = local, description
        return local


def region_of(tensor: Any) -> TensorRegion:
    """Return the part of a DTensor that this process holds."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    sizes, begin = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return TensorRegion(tuple(map(int, begin)), tuple(sizes))

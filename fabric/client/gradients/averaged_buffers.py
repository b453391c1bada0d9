"""Buffers that forward changes (BatchNorm's running statistics), averaged by weight at the commit.

All members begin a step with equal buffers; forward passes then change each member's copy. The buffers travel
with the gradients. Every such buffer has a stand-in parameter whose "gradient" is the buffer times the
member's weight. The sum of these gradients, divided by the total weight, is the weighted average; it is
published, replayed and digested like any gradient. An integer buffer (``num_batches_tracked``) becomes the
value before the step plus the increments of all members, as in a single process. When a gradient is dropped,
the buffers go back to their values before its forward passes.

Each rank of a replica has such buffers. Where replicas may have unequal layouts, the ranks of a replica first
take the mean of their contributions. So all ranks of all replicas get the same average, in any layout.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from fabric.client.process.rank_group import RankGroup
from fabric.errors import ConfigError
from fabric.protocol.rules.lanes import ReplicaLayout

_PREFIX = "buffer:"
_CHANGING = ("running_mean", "running_var", "num_batches_tracked")


def changing_buffers(model: torch.nn.Module) -> list[str]:
    """Return the names of buffers that forward changes: running statistics of normalisation layers."""
    return [name for name, _ in model.named_buffers() if name.rsplit(".", 1)[-1] in _CHANGING]


@dataclass(frozen=True, slots=True)
class RankMeans:
    """Means of the stand-ins' gradients over the ranks of this replica that hold the buffer."""

    group: RankGroup
    sizes: Mapping[str, int]  # elements of each stand-in that any rank has, in one order at all ranks
    holders: Mapping[str, int]  # the number of ranks that have it

    @classmethod
    def of(cls, group: RankGroup, layout: ReplicaLayout) -> "RankMeans | None":
        """Return the means for the stand-ins in ``layout``, None where no rank has one."""
        stand_ins = [x for row in layout.ranks for x in row if x.name.startswith(_PREFIX)]
        sizes = {x.name: x.region.elements for x in stand_ins}
        return cls(group, sizes, Counter(x.name for x in stand_ins)) if stand_ins else None

    def take(self, stand_ins: Iterable[tuple[str, torch.nn.Parameter]]) -> None:
        """Replace each ``.grad`` by its mean. All ranks of the replica must call it."""
        gradients = {name: stand_in.grad for name, stand_in in stand_ins if stand_in.grad is not None}
        where = next((gradient.device for gradient in gradients.values()), torch.device("cpu"))
        flat = torch.zeros(sum(self.sizes.values()), dtype=torch.float64, device=where)
        parts = dict(zip(self.sizes, torch.split(flat, list(self.sizes.values())), strict=True))
        for name, gradient in gradients.items():
            parts[name].copy_(gradient.view(-1))
        self.group.add(flat)
        for name, gradient in gradients.items():
            gradient.copy_((parts[name] / self.holders[name]).view(gradient.shape))


class AveragedBuffers:
    """The buffers of ``model`` in ``names``."""

    def __init__(self, model: torch.nn.Module, names: list[str]) -> None:
        buffers = dict(model.named_buffers())
        self._buffers = {name: buffers[name] for name in names}
        self.stand_ins: list[tuple[str, torch.nn.Parameter]] = []
        self._before: dict[str, torch.Tensor] = {}
        self._places = {buffer.data_ptr(): name for name, buffer in self._buffers.items() if buffer.numel()}
        self._weight = 0.0
        self.rank_means: RankMeans | None = None  # set where the ranks of a replica take means
        for name, buffer in self._buffers.items():
            if buffer.dtype in (torch.float16, torch.bfloat16):
                raise ConfigError(
                    f"the buffer {name!r} is {buffer.dtype}: averaging needs float32 or float64 statistics"
                )
            dtype = buffer.dtype if buffer.is_floating_point() else torch.float64
            stand_in = torch.nn.Parameter(torch.zeros(buffer.shape, dtype=dtype, device=buffer.device))
            self.stand_ins.append((_PREFIX + name, stand_in))

    def begin(self) -> None:
        """Remember the buffers at a step boundary, before the forward passes of the next step change them."""
        self._before = {name: buffer.detach().clone() for name, buffer in self._buffers.items()}
        self._weight = 0.0

    def standing(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the value that ``tensor`` had when the step began, if it is one of these buffers.

        Any other tensor is returned as it is. So the boundary's state can be read while the step runs.
        """
        name = self._places.get(tensor.data_ptr(), "")
        return self._before.get(name, tensor)

    @torch.no_grad()
    def contribute(self, weight: float, scale: float = 1.0) -> None:
        """Put the buffers into the exchange, times the weight of this replica's gradient so far.

        ``scale``: the factor by which the exchange multiplies gradients; increments must not change by it.
        All ranks of a replica must call it at the same point.
        """
        if weight == 0 and self.rank_means is None:
            return
        self._weight += weight
        for (name, buffer), (_, stand_in) in self._pairs():
            if buffer.is_floating_point():
                stand_in.grad = buffer * self._weight
            else:
                stand_in.grad = (buffer - self._before[name]).to(stand_in.dtype) / scale
        if self.rank_means is not None:
            self.rank_means.take(self.stand_ins)

    @torch.no_grad()
    def commit(self, total_weight: float) -> None:
        """Write the committed averages, which the stand-ins hold, into the buffers."""
        for (name, buffer), (_, stand_in) in self._pairs():
            assert stand_in.grad is not None
            if buffer.is_floating_point():
                buffer.copy_(stand_in.grad)
            else:
                increments = torch.round(stand_in.grad * total_weight).to(buffer.dtype)
                buffer.copy_(self._before[name] + increments)
            stand_in.grad = None
        self.begin()

    @torch.no_grad()
    def drop(self) -> None:
        """Restore the buffers to the step boundary: the kept gradient of these forward passes is dropped."""
        for name, before in self._before.items():
            self._buffers[name].copy_(before)
        for _, stand_in in self.stand_ins:
            stand_in.grad = None
        self._weight = 0.0

    def _pairs(self) -> "zip[tuple[tuple[str, torch.Tensor], tuple[str, torch.nn.Parameter]]]":
        return zip(self._buffers.items(), self.stand_ins, strict=True)

"""A small model in three layouts of ranks, and its gradients."""

import torch

from fabric.model import Member, RankAddress
from fabric.protocol.rules.lanes import HeldParameter, ReplicaLayout, TensorRegion
from fabric.protocol.rules.layout_text import layout_text

MODEL = {"in.weight": (6, 4), "in.bias": (6,), "half": (5, 3), "norm": (4,), "scalar": ()}
DTYPES = {"half": "bfloat16"}


def row(cuts: dict[str, tuple[int, int, int]]) -> tuple[HeldParameter, ...]:
    """A rank's parts: (dimension, begin, size) of those that are cut, the others whole."""
    parts = []
    for name, shape in MODEL.items():
        region = TensorRegion.whole(shape)
        if name in cuts:
            dimension, at, size = cuts[name]
            begin = tuple(at if d == dimension else 0 for d in range(len(shape)))
            region = TensorRegion(begin, tuple(size if d == dimension else n for d, n in enumerate(shape)))
        parts.append(HeldParameter(name, DTYPES.get(name, "float32"), shape, region))
    return tuple(parts)


def over(*cuts: dict[str, tuple[int, int, int]]) -> ReplicaLayout:
    return ReplicaLayout(tuple(row(x) for x in cuts))


SINGLE = over({})
ROWS = over(
    {"in.weight": (0, 0, 4), "in.bias": (0, 0, 3), "half": (0, 0, 5), "norm": (0, 0, 1)},
    {"in.weight": (0, 4, 2), "in.bias": (0, 3, 3), "half": (0, 5, 0), "norm": (0, 1, 3)},
)
COLUMNS = over(
    {"in.weight": (1, 0, 1), "half": (1, 0, 1)},
    {"in.weight": (1, 1, 2), "half": (1, 1, 1)},
    {"in.weight": (1, 3, 1), "half": (1, 2, 1)},
)


def gradient_of(seed: int) -> dict[str, torch.Tensor]:
    """A gradient of small whole numbers, so that sums have the same bits in any order."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randint(-9, 10, shape, generator=generator).to(
            getattr(torch, DTYPES.get(name, "float32"))
        )
        for name, shape in MODEL.items()
    }


def member(name: str, layout: ReplicaLayout) -> Member:
    addresses = [RankAddress(f"{name}:{k}", f"http://{name}:{k}#{k}") for k in range(len(layout.ranks))]
    first, *others = addresses
    return Member(name, 1, first.link, first.ckpt, cuts=layout_text(layout), ranks=tuple(others))

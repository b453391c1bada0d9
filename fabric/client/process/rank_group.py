"""The ranks of this replica, from its own torch.distributed world.

The start uses this world, before fabric's links exist: every rank sends all others a few values, as JSON in
byte tensors. Later only averaged buffers use it. Each replica has its own world, so this module reaches no
other replica.
"""

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from fabric.errors import ConfigError, FabricError, ProtocolError
from fabric.exit_codes import FAILED, LAYOUT_REFUSED, RESTART
from fabric.runtime.config import asked_layout, launched_ranks
from fabric.runtime.rank_layout import RankLayout

_MAX_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class RankGroup:
    """Rank ``rank`` of ``size``."""

    rank: int
    size: int

    @classmethod
    def find(cls) -> "RankGroup | None":
        """Return this replica's world, None for one process. Raises ConfigError before torch's init."""
        if dist.is_available() and dist.is_initialized():
            size = dist.get_world_size()
            return cls(dist.get_rank(), size) if size > 1 else None
        launched = launched_ranks()
        if launched > 1:
            raise ConfigError(
                f"WORLD_SIZE is {launched} and torch.distributed is not initialized: call "
                "torch.distributed.init_process_group before fabric.client.attach"
            )
        return None

    def gather(self, value: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return the values of all ranks, in rank order. All ranks must call it.

        The loss of a rank ends this process with code 75, so that all ranks start again.
        """
        data = json.dumps(value).encode()
        if len(data) > _MAX_BYTES:
            raise ProtocolError(f"{len(data)} bytes are more than ranks tell each other at the start")
        try:
            device = _device()
            length = torch.tensor([len(data)], dtype=torch.int64, device=device)
            lengths = [torch.zeros_like(length) for _ in range(self.size)]
            dist.all_gather(lengths, length)
            most = max(int(n) for n in lengths)
            padded = torch.zeros(most, dtype=torch.uint8, device="cpu")
            padded[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
            rows = [torch.zeros(most, dtype=torch.uint8, device=device) for _ in range(self.size)]
            dist.all_gather(rows, padded.to(device))
        except RuntimeError as error:
            reason = " ".join(str(error).split())[:200]
            sys.stderr.write(f"fabric: a rank of this replica was lost at the start ({reason})\n")
            raise SystemExit(RESTART) from None
        return [json.loads(bytes(row[: int(n)].cpu().numpy())) for row, n in zip(rows, lengths, strict=True)]

    def add(self, values: torch.Tensor) -> None:
        """Replace ``values``, of one shape at all ranks, by the sum over the ranks; all ranks must call it.

        Raises RuntimeError, as any collective of the loop, where a rank is lost.
        """
        moved = values.to(_device())
        dist.all_reduce(moved)
        values.copy_(moved)


def _device() -> torch.device:
    """Return where the world's tensors lie: NCCL moves only device memory."""
    return torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")


def layout() -> RankLayout:
    """Return the layout in which to build the model: ranks, tensor parallel size, layers of each stage.

    If these ranks cannot have the layout, the process ends with one sentence and exit code 1.
    """
    try:
        return asked_layout()
    except FabricError as error:
        sys.stderr.write(f"fabric: {error}\n")
        raise SystemExit(FAILED) from None


def refuse_layout(why: str) -> NoReturn:
    """End this process, whose script cannot build the layout: ``fabric launch`` must choose another."""
    try:
        asked = str(asked_layout())
    except FabricError:
        asked = "that is asked for"
    sys.stderr.write(f"fabric: this script cannot build the layout {asked}: {why}\n")
    sys.stderr.flush()
    raise SystemExit(LAYOUT_REFUSED)

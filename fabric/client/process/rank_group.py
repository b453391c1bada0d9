"""The ranks of this replica, from its own torch.distributed world.

The start uses this world, before fabric's links exist: every rank sends rank 0 a few values, as JSON in byte
tensors, and rank 0 answers. Only values that all ranks need whole go to all. Later only averaged buffers use
it. Each replica has its own world, so this module reaches no other replica.
"""

import contextlib
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from fabric.errors import ConfigError, FabricError, ProtocolError
from fabric.exit_codes import FAILED, LAYOUT_REFUSED, RESTART
from fabric.runtime.config import asked_layout, launched_ranks
from fabric.runtime.rank_layout import RankLayout

_MAX_BYTES = 1 << 20
# Rank 0's answers to the values of all ranks, both in rank order.
Answer = Callable[[list[dict[str, Any]]], list[Mapping[str, Any]]]


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
        with _lost_at_start():
            own, rows = self._padded(value)
            dist.all_gather(rows, own)
        return [_read(row) for row in rows]

    def ask(self, value: Mapping[str, Any], answer: Answer) -> dict[str, Any]:
        """Send ``value`` to rank 0; return what its ``answer`` to the values of all ranks says to this rank.

        All ranks must call it. Where ``answer`` raises ConfigError, all ranks raise it. The loss of a rank
        ends this process with code 75, so that all ranks start again.
        """
        with _lost_at_start():
            own, rows = self._padded(value)
            dist.gather(own, rows if self.rank == 0 else None, dst=0)
        answers: list[Mapping[str, Any]] = [{}]
        if self.rank == 0:
            try:
                answers = answer([_read(row) for row in rows])
            except ConfigError as error:
                answers = [{"refused": str(error)}] * self.size
        longest = max(answers, key=lambda x: len(json.dumps(x)))
        with _lost_at_start():
            own, rows = self._padded(longest)
            if self.rank == 0:
                for row, reply in zip(rows, answers, strict=True):
                    row.zero_()
                    _write(row, reply)
            dist.scatter(own, rows if self.rank == 0 else None, src=0)
        answered = _read(own)
        if "refused" in answered:
            raise ConfigError(answered["refused"])
        return answered

    def _padded(self, value: Mapping[str, Any]) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Return ``value`` in as many bytes as the longest value of a rank has, and room for all of them."""
        length = torch.tensor([len(json.dumps(value))], dtype=torch.int64, device=_device())
        dist.all_reduce(length, op=dist.ReduceOp.MAX)
        if int(length) > _MAX_BYTES:
            raise ProtocolError(f"{int(length)} bytes are more than ranks tell each other at the start")
        own = torch.zeros(int(length), dtype=torch.uint8, device=_device())
        _write(own, value)
        return own, [torch.zeros_like(own) for _ in range(self.size)]

    def add(self, values: torch.Tensor) -> None:
        """Replace ``values``, of one shape at all ranks, by the sum over the ranks; all ranks must call it.

        Raises RuntimeError, as any collective of the loop, where a rank is lost.
        """
        moved = values.to(_device())
        dist.all_reduce(moved)
        values.copy_(moved)


def _write(row: torch.Tensor, value: Mapping[str, Any]) -> None:
    data = json.dumps(value).encode()
    row[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(row.device)


def _read(row: torch.Tensor) -> dict[str, Any]:
    value: dict[str, Any] = json.loads(bytes(row.cpu().numpy()).rstrip(b"\0"))
    return value


@contextlib.contextmanager
def _lost_at_start() -> Iterator[None]:
    """End this process with code 75 where a collective fails."""
    try:
        yield
    except RuntimeError as error:
        reason = " ".join(str(error).split())[:200]
        sys.stderr.write(f"fabric: a rank of this replica was lost at the start ({reason})\n")
        raise SystemExit(RESTART) from None


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

"""The ranks of this replica, from its own torch.distributed world.

The start uses this world, before fabric's links exist: every rank sends rank 0 a few values, as JSON in byte
tensors, and rank 0 answers. Only values that all ranks need whole go to all. Later only averaged buffers and
the first looks of ``RankGradients`` use it. Each replica has its own world, so this module reaches no other
replica.
"""

import contextlib
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import torch
import torch.distributed as dist
import xxhash

from fabric.errors import ConfigError, FabricError, ProtocolError
from fabric.exit_codes import FAILED, LAYOUT_REFUSED, RESTART
from fabric.ftar.buckets import local_part
from fabric.runtime.config import asked_layout, launched_ranks
from fabric.runtime.rank_layout import RankLayout

_MAX_BYTES = 1 << 20
_LOOKS = 4  # in so many of a process's first contributions the ranks compare their parameters
_SAMPLED = 64  # elements of each that they compare
# While one of these attributes is false, a backward pass of DDP or FSDP1 leaves the gradient at its rank.
_SWITCHES = ("require_backward_grad_sync", "_sync_gradients")
# Rank 0's answers to the values of all ranks, both in rank order.
Answer = Callable[[list[dict[str, Any]]], list[Mapping[str, Any]]]


@dataclass(frozen=True, slots=True)
class RankGroup:
    """Rank ``rank`` of ``size``.

    ``draws``: the first rank to which the script has given this rank's seed of torch. Ranks with the same
    number draw the same random numbers, and others draw others.
    """

    rank: int
    size: int
    draws: int = 0

    @classmethod
    def find(cls) -> "RankGroup | None":
        """Return this replica's world, None for one process. Raises ConfigError before torch's init."""
        if dist.is_available() and dist.is_initialized():
            if (size := dist.get_world_size()) == 1:
                return None
            group = cls(dist.get_rank(), size)
            seeds = [row["seed"] for row in group.gather({"seed": torch.initial_seed()})]
            return replace(group, draws=seeds.index(seeds[group.rank]))
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


class RankGradients:
    """Refuses gradients that the ranks of this replica have not averaged among themselves.

    DDP and FSDP average in backward, unless the loop says that a later micro-batch of the step does. But a
    loop does not know its last micro-batch: those of a dead replica follow its own. Without such a wrapper,
    ranks with different samples would each train a model of their own.
    """

    def __init__(self, model: torch.nn.Module, group: RankGroup | None, wanted: bool = True) -> None:
        """``wanted``: false where the user has said that what is not shared is meant to be so."""
        self.parts = 1  # so many different slices of the samples the ranks have
        self._part = 0  # this rank's
        self._is_dealt = False  # whether the loader deals out the samples
        self._group = group
        self._looks = _LOOKS if wanted else 0
        self._waits = False
        modules: list[Any] = list(model.modules()) if group is not None else []
        self._switches = [
            (x, name)
            for x in modules
            for name in _SWITCHES
            if name in vars(x) and dist.get_world_size(x.process_group) > 1
        ]
        states = [x._get_fsdp_state() for x in modules if hasattr(x, "_get_fsdp_state")]  # noqa: SLF001
        # torch 2.11 has one group per state, later releases have several.
        groups = [getattr(x, "_fsdp_param_groups", None) or [x._fsdp_param_group] for x in states]  # noqa: SLF001
        self._sharded = [x for of_state in groups for x in of_state if x is not None]
        self._parameters = [x for x in model.named_parameters() if x[1].requires_grad]
        self._first = self._digests() if group is not None and wanted else {}  # as they were at attach

    def begin(self, part: int, parts: int) -> None:
        """Take this rank's slice of the samples."""
        self._part, self.parts, self._is_dealt = part, parts, True

    def look(self) -> None:
        """Note, before a backward pass, whether it leaves its gradient at this rank."""
        self._waits = any(not getattr(module, name) for module, name in self._switches)

    def check(self) -> None:
        """Raise ConfigError, after a micro-batch or before an exchange, for a gradient of this rank alone."""
        held = any(_holds_own(group) for group in self._sharded)
        if held or self._waits or any(not getattr(module, name) for module, name in self._switches):
            raise ConfigError(
                "a backward pass has left its gradient at one rank of this replica, by no_sync, "
                "set_requires_gradient_sync(False) or set_requires_all_reduce(False), and the micro-batches "
                "of a dead replica may follow those of this loop: let every backward pass average over the "
                "ranks"
            )

    def compare(self) -> None:
        """Refuse, at the first contributions, ranks that each train a model of their own.

        All ranks of the replica must call it. Raises ConfigError where no rank with other samples has any
        parameter, of those that were moved, as it is here. Parts of sharded models are not compared. A loop
        that deals out its samples itself is taken to give each rank others, if the ranks' models were equal.
        """
        if self._group is None or not self._looks or (self._is_dealt and self.parts == 1):
            return
        self._looks -= 1
        moved = [
            digest for name, digest in self._digests().items() if digest != self._first.get(name, digest)
        ]
        first = "" if self._is_dealt else xxhash.xxh3_64_hexdigest("".join(self._first.values()).encode())
        part = self._part if self._is_dealt else self._group.rank
        rows = self._group.gather({"part": part, "values": moved, "first": first})
        others = [rank for rank, row in enumerate(rows) if row["part"] != part and row["values"]]
        own, were_equal = set(moved), all(row["first"] == first for row in rows)
        if own and others and were_equal and not any(own & set(rows[rank]["values"]) for rank in others):
            samples = "other samples and " if self._is_dealt else ""
            mesh = "give session.loader no mesh=, " if self._is_dealt else ""
            raise ConfigError(
                f"rank {self._group.rank} trains a model of its own: rank {others[0]} has {samples}other "
                "values of every parameter. Wrap the model in DistributedDataParallel or fully_shard before "
                f'you give it to fabric, {mesh}or say unshared="ignore"'
            )

    def _digests(self) -> dict[str, str]:
        """Return a digest for each parameter that is trained; none of a model that is sharded."""
        is_flat = any(name == "_sync_gradients" for _, name in self._switches)
        if is_flat or any(p.shape != local_part(p).shape for _, p in self._parameters):
            return {}
        return {n: xxhash.xxh3_64_hexdigest(n.encode() + _sample(p).tobytes()) for n, p in self._parameters}


def _holds_own(group: Any) -> bool:
    """Whether a group of FSDP2 has gradients of this rank that no backward pass has averaged yet."""
    if getattr(group, "_partial_reduce_output", None) is not None:
        return True
    for part in group.fsdp_params:
        unsharded = getattr(part, "_unsharded_param", None)
        gradient = None if unsharded is None else unsharded.grad
        if gradient is not None or part.unsharded_accumulated_grad is not None:
            return True
    return False


def _sample(tensor: torch.Tensor) -> Any:
    """Return some elements of this rank's part as an array of numpy."""
    flat = local_part(tensor.detach()).reshape(-1)
    return flat[:: max(1, flat.numel() // _SAMPLED)].to(device="cpu", dtype=torch.float64).numpy()


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

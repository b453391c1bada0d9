"""Puts together this rank's gradient from the published gradients of ranks of another layout.

Every rank publishes its flat gradient. This rank reads, from one member, the gradients of the ranks that hold
parts of its parameters. It copies those parts to their places in its own flat gradient.
"""

import time
from collections.abc import Callable
from dataclasses import replace

import torch

from fabric.ckpt_server.fetch.fetcher import GradientMeta, StateFetcher
from fabric.ckpt_server.format.manifest import bytes_digest
from fabric.errors import FabricError, Gone, StateError
from fabric.ftar.lanes import FlatPlaces, LaneDirectory
from fabric.model import Member, Record
from fabric.protocol.messages import member_events as io
from fabric.protocol.rules.lanes import HeldParameter, TensorRegion
from fabric.protocol.rules.layout_text import read_layout

# Seconds of waiting for one member's gradient before asking the next member.
_TURN_S = 1.0
# The pause before asking all members again: a server that has ended refuses without delay.
_PAUSE_S = 0.05


class PieceFetcher:
    """Reads gradients for the rank of ``lanes``."""

    # Returns the newest record; the engine sets this function.
    newest: Callable[[], Record | None] = staticmethod(lambda: None)

    def __init__(self, lanes: LaneDirectory) -> None:
        self._lanes = lanes
        self._row = lanes.layout.ranks[lanes.rank]
        self._places = FlatPlaces(self._row)
        self._memory = torch.zeros(0, dtype=torch.uint8, device="cpu")

    def fetch(
        self,
        fetcher: StateFetcher,
        order: io.FetchGradient,
        flat: torch.Tensor,
        wait_s: float,
        digest: Callable[[memoryview], str] = bytes_digest,
    ) -> GradientMeta:
        """Fill ``flat`` from the first member that has the gradient. Raises Gone where all members have
        dropped it, else StateError. ``digest``: the digest by which the members of this job name gradients.
        """
        record, deadline = self.newest(), time.monotonic() + wait_s
        roster = order.members or (record.roster if record is not None else ())
        members = [x for x in roster if x.ckpt in order.urls and x.replica != self._lanes.replica and x.cuts]
        reasons: dict[str, FabricError] = {}
        while members:
            for member in members:
                try:
                    return self._from(member, fetcher, order, flat, digest)
                except FabricError as error:
                    reasons[member.replica] = error
                if fetcher.is_cancelled:
                    raise StateError("the fetch was cancelled; nothing was loaded")
            if all(isinstance(error, Gone) for error in reasons.values()) or time.monotonic() > deadline:
                break
            time.sleep(_PAUSE_S)
        text = "; ".join(f"{name}: {error}" for name, error in reasons.items()) or "no member publishes it"
        if reasons and all(isinstance(error, Gone) for error in reasons.values()):
            raise Gone(text)
        raise StateError(text)

    def _from(
        self,
        member: Member,
        fetcher: StateFetcher,
        order: io.FetchGradient,
        flat: torch.Tensor,
        digest: Callable[[memoryview], str],
    ) -> GradientMeta:
        first: GradientMeta | None = None
        for rank, parts in self._parts(member).items():
            row = read_layout(member.cuts).ranks[rank]
            theirs = FlatPlaces(row)
            if len(self._memory) < theirs.nbytes:
                self._memory = torch.zeros(theirs.nbytes, dtype=torch.uint8, device="cpu")
            source = self._memory[: theirs.nbytes]
            meta = fetcher.fetch_gradient(
                [member.addresses[rank].ckpt.partition("#")[0]],
                generation=order.generation,
                step=order.step,
                into=source.numpy().data,
                wait_s=_TURN_S,
                digest=digest,
            )
            if meta.nbytes != theirs.nbytes or "round_digest" not in meta.meta:
                raise StateError(f"rank {rank} of {member.replica} publishes another gradient than announced")
            first = first or meta
            if _round(meta) != _round(first):
                raise StateError(f"rank {rank} of {member.replica} publishes another round than its rank 0")
            for name, region in parts:
                self._places.view(flat, name, region).copy_(theirs.view(source, name, region))
                self._places.presence(flat, name).copy_(theirs.presence(source, name))
        if first is None:
            raise StateError(f"{member.replica} holds nothing of what this rank holds")
        return replace(first, digest=str(first.meta["round_digest"]))

    def _parts(self, member: Member) -> dict[int, list[tuple[str, TensorRegion]]]:
        """Return the parts to read from each rank of ``member``. Of copies the lowest rank's is read.

        Where this rank holds nothing of a parameter, it reads an empty part, with the presence.
        """
        holders: dict[str, dict[TensorRegion, tuple[int, HeldParameter]]] = {}
        for rank, row in enumerate(read_layout(member.cuts).ranks):
            for held in row:
                holders.setdefault(held.name, {}).setdefault(held.region, (rank, held))
        parts: dict[int, list[tuple[str, TensorRegion]]] = {}
        for own in self._row:
            read = [(rank, own.region.common(x)) for x, (rank, _) in holders.get(own.name, {}).items()]
            for rank, common in [x for x in read if x[1].elements] or read[:1]:
                parts.setdefault(rank, []).append((own.name, common))
        return parts


def _round(meta: GradientMeta) -> tuple[object, ...]:
    return meta.epoch, meta.weight, meta.meta.get("round_digest")

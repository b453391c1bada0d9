"""Where gradients lie while they are exchanged: in host memory, or on the device of the parameters.

On the host the gradient is reduced in the round's result slot, and digested there bucket by bucket.

On a device the gradient is gathered into one flat buffer, reduced and digested there. The user's update
code gets this buffer. A side stream copies it once into the result slot, which is published; the step does
not wait for that copy. Events order the streams. The main thread never waits for the device here, and the
compute stream waits only for the reduced gradient that it uses next.

Where replicas may have unequal layouts, lanes are gathered from the flat buffer, reduced and digested in
memory of their own, and scattered back.
"""

import os
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager

import torch
import xxhash

from fabric.ckpt_server.format.manifest import bytes_digest
from fabric.ckpt_server.state.device_digest import BLOCK_BYTES, device_digest
from fabric.errors import ConfigError
from fabric.ftar.buckets import Bucket, FlatGradients, NamedParameter
from fabric.ftar.device.connections import connections_for
from fabric.ftar.device.cuda import CudaDevice, CudaEvent
from fabric.ftar.device.device_ring import CHUNK_BYTES, DeviceRing
from fabric.ftar.host.cpu_ring import CpuRing
from fabric.ftar.lanes import LaneDirectory, LanePlane
from fabric.ftar.plane import DataPlane
from fabric.ftar.process_group_plane import GroupPlane, NcclFactory
from fabric.runtime.config import Settings, launched_ranks

_LEAST_CHUNK_BYTES = 64 * 1024
_DIGESTED_BYTES = 8 * BLOCK_BYTES


class HostBackend:
    """Gradients in host memory are reduced in the slot itself.

    ``DeviceBackend`` has the same methods. Where they name no other thread, the exchange thread calls them.
    """

    stream_of_thread = None  # on a device: returns the stream of the calling thread's torch operations

    def __init__(self) -> None:
        self._slot = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._hash, self._digested = xxhash.xxh3_128(), 0  # of the slot's first ``_digested`` bytes
        self._parts = 0  # sum of the digests of lanes

    def mark_ready(self) -> None:
        """Note that all work on the gradients, and all uses of the newest result, are enqueued.

        The main thread or backward's thread calls this before it hands gradients over to the exchange thread.
        """

    @contextmanager
    def round(self, slot: torch.Tensor) -> Iterator[torch.Tensor]:
        """Yield the flat buffer to gather into and reduce in. ``slot`` is the round's result slot."""
        self._slot, self._hash, self._digested = slot, xxhash.xxh3_128(), 0
        self._parts = 0
        yield slot

    def run(self, work: Callable[[], object], ready: tuple[CudaEvent, ...] | None = None) -> None:
        """Run torch operations on gradients and the flat buffer, after ``ready`` on a device."""
        work()

    def reduced(self, bucket: Bucket) -> None:
        """Note that ``bucket`` of the flat buffer has its result.

        The bytes are digested in their order, while other members work on the next bucket.
        """
        if bucket.gap == self._digested:
            self._update(bucket.end)

    def digest(self) -> str:
        """Return, at the end of a round, the digest of the result: 32 hex digits."""
        self._update(self._slot.numel())
        return self._hash.hexdigest()

    def _update(self, end: int) -> None:
        if end > self._digested:
            self._hash.update(self._slot[self._digested : end].numpy().data)
            self._digested = end

    def digest_part(self, part: torch.Tensor, seed: int) -> None:
        """Digest the result of a lane; ``seed`` tells lanes apart."""
        self._parts += xxhash.xxh3_64_intdigest(part.view(torch.uint8).numpy().data, seed)

    def parts_digest(self) -> int:
        """Return, at the end of a round, the sum of the parts' digests, modulo 2**64."""
        return self._parts % 2**64

    def copy_out(self, slot: torch.Tensor) -> CudaEvent | None:
        """Begin to copy the result to ``slot``, after ``digest``.

        Returns the event at which the slot holds the result; None: it does so now.
        """
        return None

    def digest_of(self, data: memoryview) -> str:
        """Return the digest of a result in host memory; from any thread."""
        return bytes_digest(data)

    def scatter(
        self,
        gradients: FlatGradients,
        slot: torch.Tensor,
        weight: float,
        absent: Collection[str] | None = None,
    ) -> None:
        """Write the gradient in ``slot``, divided by ``weight``, into every ``.grad``; on the main thread.

        ``absent``: the parameters whose ``.grad`` becomes None. By default ``slot`` has a gradient that was
        fetched: it says so, and no other process reads it, so ``.grad`` may become a part of it.
        """
        gradients.scatter(slot, weight, absent, lend=absent is None)


class DeviceBackend:
    """Gradients of one device: ``nbytes`` of its memory hold them flat."""

    def __init__(self, device: CudaDevice, nbytes: int) -> None:
        self._device = device
        self.stream_of_thread = device.compute
        self._flat = device.memory(nbytes)
        self._stream, self._copies, self._checks = device.stream(), device.stream(), device.stream()
        self._digests = device_digest(self._flat.device)
        # So many bytes of the flat buffer have their result, or are digested.
        self._reduced = self._digested = 0
        self._sums: list[torch.Tensor] = []
        self._parts: list[tuple[int, int]] = []  # bytes and seed of each digested lane
        self._part_sums: list[torch.Tensor] = []
        self._ready: CudaEvent | None = None
        self._left: CudaEvent | None = None
        # The event at which the newest copy of the flat buffer is in its slot.
        self._copied: CudaEvent | None = None
        # Address of the slot whose round has the same content as the flat buffer.
        self._copied_to = 0

    def mark_ready(self) -> None:
        self._ready = self.stream_of_thread().record()

    @contextmanager
    def round(self, slot: torch.Tensor) -> Iterator[torch.Tensor]:
        self._copied_to = 0
        self._reduced, self._digested, self._sums = 0, 0, []
        self._parts, self._part_sums = [], []
        if self._copied is not None:
            self._stream.wait(self._copied)
        try:
            with self._device.on(self._stream):
                yield self._flat
            self._copied_to = slot.data_ptr()
        finally:
            # Work of an aborted round may still be enqueued and write to the buffer.
            self._left = self._stream.record()

    def run(self, work: Callable[[], object], ready: tuple[CudaEvent, ...] | None = None) -> None:
        """See ``HostBackend``. Without ``ready`` the work waits for the newest ``mark_ready``."""
        for event in (self._ready,) if ready is None else ready:
            if event is not None:
                self._stream.wait(event)
        self._stream.run(work)

    def reduced(self, bucket: Bucket) -> None:
        """See ``HostBackend``. A few blocks are digested at once, because each time costs some kernels."""
        if bucket.gap == self._reduced:
            self._reduced = bucket.end
            if bucket.end - self._digested >= _DIGESTED_BYTES:
                self._digest(bucket.end // BLOCK_BYTES * BLOCK_BYTES)

    def digest(self) -> str:
        self._digest(self._flat.numel())
        self._stream.record().wait()
        return self._digests.name(torch.cat(self._sums), self._flat.numel())

    def _digest(self, end: int) -> None:
        part, self._digested, sums = self._flat[self._digested : end], end, self._sums
        self._stream.run(lambda: sums.append(self._digests.sums([part])))

    def digest_part(self, part: torch.Tensor, seed: int) -> None:
        data, sums = part.view(torch.uint8), self._part_sums
        self._parts.append((data.numel(), seed))
        self._stream.run(lambda: sums.append(self._digests.sums([data])))

    def parts_digest(self) -> int:
        self._stream.record().wait()
        names = [
            (self._digests.name(sums, nbytes), seed)
            for (nbytes, seed), sums in zip(self._parts, self._part_sums, strict=True)
        ]
        return sum(xxhash.xxh3_64_intdigest(name.encode(), seed) for name, seed in names) % 2**64

    def copy_out(self, slot: torch.Tensor) -> CudaEvent | None:
        self._copies.wait(self._stream.record())
        self._copies.run(lambda: slot.copy_(self._flat, non_blocking=True))
        self._copied = self._copies.record()
        return self._copied

    def digest_of(self, data: memoryview) -> str:
        with self._device.on(self._checks):
            sums = self._digests.sums([torch.frombuffer(data, dtype=torch.uint8)])
            return self._digests.name(sums, len(data))

    def scatter(
        self,
        gradients: FlatGradients,
        slot: torch.Tensor,
        weight: float,
        absent: Collection[str] | None = None,
    ) -> None:
        """See ``HostBackend``. A fetched gradient, or the gradient of an older round, is read from
        ``slot``: a newcomer applies it while its next round already fills the flat buffer."""
        without = gradients.absent(slot) if absent is None else absent
        compute = self._device.compute()
        if self._left is not None:
            compute.wait(self._left)
        source = self._flat
        if self._copied_to != slot.data_ptr():
            if self._copied is not None:
                compute.wait(self._copied)  # may fill this slot
            source = slot
        compute.run(lambda: gradients.scatter(source.to(self._flat.device), weight, without))


GradientBackend = HostBackend | DeviceBackend


def device_of(parameters: tuple[NamedParameter, ...]) -> torch.device:
    """Return the parameters' device. Raises ConfigError for several devices or an unsupported device."""
    first, where = parameters[0][0], parameters[0][1].device
    for name, parameter in parameters:
        if parameter.device != where:
            raise ConfigError(
                f"{first} is on {where} and {name} on {parameter.device}: a process may have the parameters "
                "of one device; give each device a rank of its own"
            )
    if where.type not in ("cpu", "cuda"):
        raise ConfigError(f"{first} is on {where}: gradients are reduced on CPUs and CUDA devices")
    return where


def choose_backend(
    settings: Settings,
    gradients: FlatGradients,
    on_piece: Callable[[int], None],
    lanes: LaneDirectory | None = None,
) -> tuple[DataPlane, GradientBackend]:
    """Choose the data plane and the backend for these gradients. Raises ConfigError.

    ``lanes``: the directory of lanes where replicas may have unequal layouts.
    """
    where = device_of(gradients.parameters)
    if where.type == "cpu":
        if settings.data_plane == "nccl":
            raise ConfigError(
                "FABRIC_DATA_PLANE is nccl and the parameters are on the CPU: use a GPU, or auto"
            )
        shares = settings.data_plane != "tcp"

        def make_ring() -> CpuRing:
            return CpuRing(exchange_s=settings.exchange_s, shared_memory=shares, on_piece=on_piece)

        return make_ring() if lanes is None else LanePlane(make_ring), HostBackend()
    if settings.exchange != "float32":
        raise ConfigError(
            f"FABRIC_EXCHANGE is {settings.exchange} and the parameters are on a GPU, whose gradients travel "
            "in their own type: leave it out"
        )
    device = CudaDevice(where)
    if settings.data_plane == "nccl":
        return GroupPlane(NcclFactory(device.device), device.owns, settings.exchange_s), DeviceBackend(
            device, gradients.nbytes
        )
    return device_backend(device, settings, gradients, on_piece, lanes)


def device_backend(
    device: CudaDevice,
    settings: Settings,
    gradients: FlatGradients,
    on_piece: Callable[[int], None],
    lanes: LaneDirectory | None = None,
) -> tuple[DataPlane, GradientBackend]:
    """Return the device ring on ``device``, or one ring per lane, and the backend for gradients there."""
    # Chunks are equal on all members, and a small model needs little memory.
    nbytes = gradients.nbytes if lanes is None else lanes.model_bytes
    chunk = min(CHUNK_BYTES, max(_LEAST_CHUNK_BYTES, nbytes))
    ring = DeviceRing(
        device,
        chunk,
        exchange_s=settings.exchange_s,
        shares=settings.data_plane != "tcp",
        on_piece=on_piece,
        connections=connections_for(len(os.sched_getaffinity(0)) // launched_ranks()),
    )
    plane = ring if lanes is None else LanePlane(ring.sibling, registers=True)
    return plane, DeviceBackend(device, gradients.nbytes)

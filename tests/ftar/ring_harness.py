"""Rings for tests: socket pairs, one plane and thread per member, and the documented sum."""

import socket
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from fabric.ftar.host.cpu_ring import CpuRing
from fabric.ftar.host.exchange_buffers import raw
from fabric.ftar.host.piece_moves import DIGEST_BYTES, Outlet, coded_bytes, digest, fold
from fabric.ftar.plane import Ring
from fabric.ftar.reduce_ops import EXCHANGE_FORMS, SUM, Reduction
from fabric.ftar.ring_schedule import DTYPE_CODES

Links = tuple[socket.socket, socket.socket] | tuple[socket.socket, socket.socket, list, list]
Pairs = list[Links]
WAIT_S = 20.0


def socket_ring(world: int, plane: str = "tcp", connections: int = 1) -> Pairs:
    """Return (next, previous) of each member; member i's next is linked to member i+1's previous.

    ``plane`` is tcp, shm, or mixed: every other link of either kind, beginning with shared memory. With
    several ``connections`` lists of the further ones follow, as ``install`` takes them.
    """
    if connections > 1:
        first, *others = (socket_ring(world, plane) for _ in range(connections))
        further = [([x[i][0] for x in others], [x[i][1] for x in others]) for i in range(world)]
        return [(*first[i], *further[i]) for i in range(world)]
    kinds = ("shm", "tcp") if plane == "mixed" else (plane,)
    links = [tcp_pair() if kinds[i % len(kinds)] == "tcp" else socket.socketpair() for i in range(world)]
    return [(links[i][0], links[i - 1][1]) for i in range(world)]


def sockets_of(links: Links) -> list[socket.socket]:
    """All sockets of one member."""
    return [*links[:2], *(sock for further in links[2:] for sock in further)]


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        one = socket.create_connection(server.getsockname())
        one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return one, server.accept()[0]


def wait_until(condition: Callable[[], object]) -> None:
    """Poll ``condition`` until it holds; fail after WAIT_S."""
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true"
        time.sleep(0.0005)


def names(world: int) -> tuple[str, ...]:
    return tuple(f"m{i}" for i in range(world))


class RingMembers:
    """``world`` planes in one process, each with a thread; ``who`` limits them to some positions.

    ``plane`` says what their links are: see ``socket_ring``. ``make`` makes a plane.
    """

    def __init__(
        self, world: int, who: Sequence[int] | None = None, plane: str = "tcp", make=CpuRing, **options
    ) -> None:
        self.world = world
        self.plane = plane
        self.who = list(range(world) if who is None else who)
        self.planes = {i: make(**options) for i in self.who}
        self._memory: dict[int, dict[int, deque[torch.Tensor]]] = {i: {} for i in self.who}
        self._threads = ThreadPoolExecutor(max_workers=max(1, len(self.who)))

    def __enter__(self) -> "RingMembers":
        return self

    def __exit__(self, *_error: object) -> None:
        for plane in self.planes.values():
            plane.close()
        self._threads.shutdown()

    def install(self, epoch: int, pairs: Pairs | None = None) -> None:
        """Install a ring of all members; without ``pairs`` on fresh sockets."""
        pairs = pairs or socket_ring(self.world, self.plane)
        for i in self.who:
            links = pairs[i] if self.world > 1 else (None, None)
            self.planes[i].install(Ring(epoch, i, names(self.world)), *links)
        if self.world == 1:
            for sock in pairs[0]:
                sock.close()

    def start(
        self,
        epoch: int,
        step: int,
        buffers: Mapping[int, torch.Tensor | Sequence[torch.Tensor]],
        results: dict[int, torch.Tensor] | None = None,
        reduction: Reduction = SUM,
        result_is_stable: bool = False,
    ) -> dict[int, Future]:
        """Begin one exchange; without ``results`` it reduces in place."""

        def reduce(i: int) -> None:
            result = None if results is None else results[i]
            how = {"result_is_stable": True} if result_is_stable else {}
            self.planes[i].all_reduce(epoch, step, buffers[i], result, reduction, **how)

        return {i: self._threads.submit(reduce, i) for i in buffers}

    def reduce(
        self,
        epoch: int,
        step: int,
        inputs: Sequence[torch.Tensor],
        reduction: Reduction = SUM,
        memory: str = "in place",
    ) -> dict[int, torch.Tensor]:
        """Return the results of one exchange; check that it left the inputs unchanged.

        ``memory``: in place, kept (results elsewhere), shared (both in memory from the plane), or in parts
        (as kept, of several tensors, one of which lies in the result).
        """
        buffers, results = {i: inputs[i].clone() for i in self.who}, None
        if memory != "in place":
            results = {i: torch.full_like(inputs[i], 77) for i in self.who}
        if memory == "in parts":
            return self._reduce_parts(epoch, step, inputs, reduction, results)
        if memory == "shared":
            buffers = {i: self.shared(i, inputs[i]) for i in self.who}
            results = {i: self.shared(i, inputs[i]) for i in self.who}
        for future in self.start(epoch, step, buffers, results, reduction).values():
            future.result(WAIT_S)
        if results is None:
            return buffers
        assert all(same_bits(buffers[i], inputs[i]) for i in self.who)
        return results

    def _reduce_parts(
        self,
        epoch: int,
        step: int,
        inputs: Sequence[torch.Tensor],
        reduction: Reduction,
        results: dict[int, torch.Tensor],
    ) -> dict[int, torch.Tensor]:
        buffers = {}
        for i in self.who:
            low, high = (inputs[i].numel() * share // 7 for share in (2, 3 + i % 4))
            results[i][low:high].copy_(inputs[i][low:high])
            buffers[i] = [inputs[i][:low].clone(), results[i][low:high], inputs[i][high:].clone()]
        for future in self.start(epoch, step, buffers, results, reduction).values():
            future.result(WAIT_S)
        for i in self.who:
            first, _, last = buffers[i]
            assert same_bits(first, inputs[i][: len(first)])
            assert same_bits(last, inputs[i][len(inputs[i]) - len(last) :])
        return results

    def shared(self, i: int, values: torch.Tensor) -> torch.Tensor:
        """A copy of ``values`` in memory that member ``i`` got from its plane."""
        nbytes = values.numel() * values.element_size()
        if nbytes not in self._memory[i]:
            self._memory[i][nbytes] = deque(self.planes[i].allocate(max(nbytes, 1)) for _ in range(2))
        self._memory[i][nbytes].rotate(1)
        memory = self._memory[i][nbytes][0][:nbytes].view(values.dtype)
        memory.copy_(values)
        return memory


def documented(
    inputs: Sequence[torch.Tensor], bounds: list[tuple[int, int]], reduction: Reduction = SUM
) -> torch.Tensor:
    """The documented sum: a left fold in ring order from member s for segment s, with 16-bit types in
    float32.
    """
    folds = {"sum": torch.add, "mean": torch.add, "min": torch.minimum, "max": torch.maximum}
    world, result = len(inputs), inputs[0].clone()
    for s, (start, stop) in enumerate(bounds):
        parts = [inputs[(s + k) % world][start:stop] for k in range(world)]
        if result.dtype in (torch.float16, torch.bfloat16):
            parts = [part.float() for part in parts]
        total = parts[0].clone()
        for part in parts[1:]:
            total = folds[reduction.operation](total, part)
        if reduction.operation == "mean":
            total = total / torch.tensor(reduction.weight, dtype=total.dtype)
        result[start:stop] = total.to(result.dtype)
    return result


def combine(
    reduction: Reduction, received: torch.Tensor, own: torch.Tensor, out: torch.Tensor, last: bool
) -> None:
    """One step of a sum by the compiled arithmetic: ``out = received (+) own``."""
    types = [DTYPE_CODES[x.dtype] for x in (own, received, out)]
    fold((raw(received),), raw(own), raw(out), *types, reduction.code, reduction.weight, last)


def coded(values: torch.Tensor, form: str) -> bytes:
    """The bytes of ``values`` in a form, as an Outlet sends them."""
    near, far = tcp_pair()
    with near, far:
        near.setblocking(False)
        far.settimeout(WAIT_S)
        outlet, code = Outlet(near.fileno()), EXCHANGE_FORMS[form]
        room = memoryview(bytearray(coded_bytes(code, values.numel())))
        outlet.begin(b"", room, True, True, code, raw(values))
        came = b""
        while len(came) < len(room) + DIGEST_BYTES:
            if outlet.may_send():
                outlet.pump()
            came += far.recv(1 << 20)
    assert came[-DIGEST_BYTES:] == digest(came[:-DIGEST_BYTES])
    assert came[:-DIGEST_BYTES] == bytes(room)
    return came[:-DIGEST_BYTES]


def random_tensor(length: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Return values of very different sizes, so that the order of a sum shows in its bits."""
    generator = torch.Generator().manual_seed(seed)
    if not dtype.is_floating_point:
        info = torch.iinfo(dtype)
        return torch.randint(info.min, info.max, (length,), dtype=dtype, generator=generator)
    scale = torch.randint(-6, 7, (length,), generator=generator).double()
    values = torch.randn(length, dtype=torch.float64, generator=generator) * 2.0**scale
    return values.to(dtype)


def same_bits(one: torch.Tensor, two: torch.Tensor) -> bool:
    return torch.equal(one.view(torch.uint8), two.view(torch.uint8))

"""Rings for tests: socket pairs, one plane and thread per member, and the documented sum."""

import socket
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from fabric.ftar.plane import Ring
from fabric.ftar.tcp_ring import TcpRing

Pairs = list[tuple[socket.socket, socket.socket]]
WAIT_S = 20.0


def socket_ring(world: int, tcp: bool = False) -> Pairs:
    """(next, previous) of each member; member i's next is linked to member i+1's previous."""
    links = [tcp_pair() if tcp else socket.socketpair() for _ in range(world)]
    return [(links[i][0], links[i - 1][1]) for i in range(world)]


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


class Members:
    """``world`` planes in one process, each with a thread; ``who`` limits them to some positions."""

    def __init__(self, world: int, who: Sequence[int] | None = None, **options) -> None:
        self.world = world
        self.who = list(range(world) if who is None else who)
        self.planes = {i: TcpRing(**options) for i in self.who}
        self._threads = ThreadPoolExecutor(max_workers=max(1, len(self.who)))

    def __enter__(self) -> "Members":
        return self

    def __exit__(self, *_error: object) -> None:
        for plane in self.planes.values():
            plane.close()
        self._threads.shutdown()

    def install(self, epoch: int, pairs: Pairs | None = None) -> None:
        """Install a ring of all members; without ``pairs`` on fresh socket pairs."""
        pairs = pairs or socket_ring(self.world)
        for i in self.who:
            links = pairs[i] if self.world > 1 else (None, None)
            self.planes[i].install(Ring(epoch, i, names(self.world)), *links)
        if self.world == 1:
            for sock in pairs[0]:
                sock.close()

    def start(self, epoch: int, step: int, buffers: dict[int, torch.Tensor]) -> dict[int, Future]:
        return {
            i: self._threads.submit(self.planes[i].all_reduce, epoch, step, buffer)
            for i, buffer in buffers.items()
        }

    def reduce(self, epoch: int, step: int, inputs: Sequence[torch.Tensor]) -> dict[int, torch.Tensor]:
        """Copies of ``inputs`` after one exchange."""
        buffers = {i: inputs[i].clone() for i in self.who}
        for future in self.start(epoch, step, buffers).values():
            future.result(WAIT_S)
        return buffers


def documented_sum(inputs: Sequence[torch.Tensor], bounds: list[tuple[int, int]]) -> torch.Tensor:
    """The left fold in ring order, segment s beginning at member s, 16 bits by way of float32."""
    world, result = len(inputs), inputs[0].clone()
    for s, (start, stop) in enumerate(bounds):
        total = inputs[s][start:stop].clone()
        for k in range(1, world):
            other = inputs[(s + k) % world][start:stop]
            if total.dtype in (torch.float16, torch.bfloat16):
                total = (total.float() + other.float()).to(total.dtype)
            else:
                total = total + other
        result[start:stop] = total
    return result


def random_tensor(length: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Values of very different sizes, so that the order of a sum shows in its bits."""
    generator = torch.Generator().manual_seed(seed)
    if not dtype.is_floating_point:
        info = torch.iinfo(dtype)
        return torch.randint(info.min, info.max, (length,), dtype=dtype, generator=generator)
    scale = torch.randint(-6, 7, (length,), generator=generator).double()
    values = torch.randn(length, dtype=torch.float64, generator=generator) * 2.0**scale
    return values.to(dtype)


def same_bits(one: torch.Tensor, two: torch.Tensor) -> bool:
    return torch.equal(one.view(torch.uint8), two.view(torch.uint8))

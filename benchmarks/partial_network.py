"""Hosts on one machine, each with a network of its own, and a switch between them that cuts and slows links.

Every host is a network namespace with one tunnel device; this process carries each packet from one to the
other, or not. So a cut is silent, as on a real network: nobody is told, and both ends keep their carrier.
Only what happens inside the namespaces is touched; the machine's own network stays as it is.
"""

import contextlib
import ctypes
import fcntl
import heapq
import os
import random
import select
import shutil
import struct
import subprocess
import threading
import time
from collections.abc import Iterable
from pathlib import Path

_NEW_NETWORK = 0x40000000  # CLONE_NEWNET
_TUNSETIFF = 0x400454CA
_TUN_WITHOUT_HEADER = 0x0001 | 0x1000
_MAX_PACKET = 65536
# The most packets that wait on a slow link, as in a router's queue.
_MAX_QUEUED = 4000

Way = tuple[str, str]


def problem() -> str:
    """Why there can be no such network here, or empty."""
    if os.geteuid() != 0:
        return "network namespaces need root, and this is another user"
    if not shutil.which("ip"):
        return "ip (iproute2) is not installed"
    if not Path("/dev/net/tun").exists():
        return "there is no /dev/net/tun"
    name = f"fabric-{os.getpid()}-try"
    made = subprocess.run(["ip", "netns", "add", name], check=False, capture_output=True, text=True)
    if made.returncode:
        return f"network namespaces cannot be made here: {made.stderr.strip()}"
    try:
        os.close(_tunnel(name))
    except OSError as error:
        return f"a tunnel device cannot be made in a network namespace: {error}"
    finally:
        subprocess.run(["ip", "netns", "del", name], check=False)
    return ""


class PartialNetwork:
    """``with`` makes and ends it. ``address[host]`` is where a host is reached."""

    def __init__(self, hosts: Iterable[str], seed: int = 1) -> None:
        self.hosts = tuple(hosts)
        self.address = {host: f"10.88.0.{i + 1}" for i, host in enumerate(self.hosts)}
        self._names = {host: f"fabric-{os.getpid()}-{host}" for host in self.hosts}
        self._chance = random.Random(seed)
        self._cut: frozenset[Way] = frozenset()
        self._slow: dict[Way, tuple[float, float]] = {}
        self._narrow: tuple[str, int] = "", _MAX_PACKET
        self._tunnels: dict[int, str] = {}
        self._over, self._wake = os.pipe()
        self._thread = threading.Thread(target=self._carry, name="switch", daemon=True)

    def inside(self, host: str) -> list[str]:
        """Return the beginning of a command line for this host."""
        return ["ip", "netns", "exec", self._names[host]]

    def __enter__(self) -> "PartialNetwork":
        try:
            for host, name in self._names.items():
                _run("ip", "netns", "add", name)
                self._tunnels[_tunnel(name)] = host
                _run("ip", "-n", name, "address", "add", f"{self.address[host]}/24", "dev", "fabric")
                _run("ip", "-n", name, "link", "set", "fabric", "up")
                _run("ip", "-n", name, "link", "set", "lo", "up")
        except BaseException:
            self.__exit__()
            raise
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._wake)
        if self._thread.is_alive():
            self._thread.join()
        for descriptor in (*self._tunnels, self._over):
            os.close(descriptor)
        for name in self._names.values():
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)

    # --- what goes wrong ---------------------------------------------------------------------------

    def cut(self, *ways: Way) -> None:
        """Cut the direction from the first to the second host of each pair; replace earlier cuts."""
        self._cut = frozenset(ways)

    def slow(self, a: str, b: str, delay_s: float, loss: float) -> None:
        """Delay both directions between these hosts, and lose some packets."""
        self._slow = {(a, b): (delay_s, loss), (b, a): (delay_s, loss)}

    def narrow(self, host: str, most_bytes: int) -> None:
        """Lose packets of more than this size to and from a host."""
        self._narrow = host, most_bytes

    def heal(self) -> None:
        """Take back every cut, every delay and every loss."""
        self._cut, self._slow, self._narrow = frozenset(), {}, ("", _MAX_PACKET)

    # --- the switch --------------------------------------------------------------------------------

    def _carry(self) -> None:
        poll, later = select.poll(), list[tuple[float, int, int, bytes]]()
        for descriptor in (*self._tunnels, self._over):
            poll.register(descriptor, select.POLLIN)
        to = {self.address[host]: fd for fd, host in self._tunnels.items()}
        number = 0
        while True:
            wait_ms = max(0.0, (later[0][0] - time.monotonic()) * 1000) if later else None
            for descriptor, _ in poll.poll(wait_ms):
                if descriptor == self._over:
                    return
                packet = os.read(descriptor, _MAX_PACKET)
                goal = to.get(".".join(map(str, packet[16:20]))) if packet[0] >> 4 == 4 else None
                if goal is None:
                    continue
                way = self._tunnels[descriptor], self._tunnels[goal]
                delay_s, loss = self._slow.get(way, (0.0, 0.0))
                host, most_bytes = self._narrow
                if host in way and len(packet) > most_bytes:
                    continue
                if way in self._cut or self._chance.random() < loss or len(later) > _MAX_QUEUED:
                    continue
                if delay_s:
                    number += 1
                    heapq.heappush(later, (time.monotonic() + delay_s, number, goal, packet))
                else:
                    _put(goal, packet)
            now = time.monotonic()
            while later and later[0][0] <= now:
                _, _, goal, packet = heapq.heappop(later)
                _put(goal, packet)


def both_ways(*pairs: Way) -> tuple[Way, ...]:
    """Return the pairs in both directions."""
    return tuple(way for a, b in pairs for way in ((a, b), (b, a)))


def _put(tunnel: int, packet: bytes) -> None:
    with contextlib.suppress(OSError):  # a full queue loses the packet, as a network does
        os.write(tunnel, packet)


def _tunnel(name: str) -> int:
    """A tunnel device in this namespace; packets to and from it are read and written here."""
    made: list[int | OSError] = []

    def make() -> None:
        # Only this thread enters the namespace, and the thread ends afterwards.
        try:
            with Path(f"/run/netns/{name}").open() as namespace:
                if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), _NEW_NETWORK):
                    raise OSError(ctypes.get_errno(), f"the network namespace {name} cannot be entered")
            tunnel = os.open("/dev/net/tun", os.O_RDWR | os.O_CLOEXEC)
            fcntl.ioctl(tunnel, _TUNSETIFF, struct.pack("16sH14x", b"fabric", _TUN_WITHOUT_HEADER))
            made.append(tunnel)
        except OSError as error:
            made.append(error)

    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
    if isinstance(made[0], OSError):
        raise made[0]
    return made[0]


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)

"""Two hosts on one machine: network namespaces with a cable between them, which can be pulled or cut one way.

The machine's own network stays unchanged.
"""

import os
import shutil
import subprocess

ADDRESSES = ("10.77.0.1", "10.77.0.2")


class Cable:
    """Two namespaces, ``names``, and the ADDRESSES at the ends of a cable; ``with`` makes and ends it."""

    def __init__(self) -> None:
        self.names = tuple(f"fabric-{os.getpid()}-{side}" for side in "ab")

    @staticmethod
    def problem() -> str:
        """Return why this machine allows no namespaces, or an empty text."""
        if not shutil.which("ip") or not shutil.which("tc"):
            return "ip and tc (iproute2) are not installed"
        name = f"fabric-{os.getpid()}-try"
        made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
        if made.returncode:
            return f"network namespaces cannot be made here: {made.stderr.strip()}"
        subprocess.run(["ip", "netns", "del", name], check=True)
        return ""

    def __enter__(self) -> "Cable":
        a, b = self.names
        for name in self.names:
            _run("ip", "netns", "add", name)
        _run("ip", "link", "add", "cable", "netns", a, "type", "veth", "peer", "name", "cable", "netns", b)
        for name, address in zip(self.names, ADDRESSES, strict=True):
            _run("ip", "-n", name, "link", "set", "cable", "mtu", "9000")
            _run("ip", "-n", name, "address", "add", f"{address}/24", "dev", "cable")
            _run("ip", "-n", name, "link", "set", "lo", "up")
        self.plug()
        return self

    def __exit__(self, *_: object) -> None:
        for name in self.names:
            subprocess.run(["ip", "netns", "del", name], check=False)

    def plug(self) -> None:
        """Set both ends up."""
        for name in self.names:
            _run("ip", "-n", name, "link", "set", "cable", "up")

    def pull(self) -> None:
        """Set the first end down: no packet passes, and no process gets an error."""
        _run("ip", "-n", self.names[0], "link", "set", "cable", "down")

    def lose(self, side: int) -> None:
        """Lose this side's outgoing packets silently; incoming ones arrive."""
        tc = ("ip", "netns", "exec", self.names[side], "tc", "qdisc")
        _run(*tc, "replace", "dev", "cable", "root", "pfifo", "limit", "0")

    def lose_large(self) -> None:
        """Lose packets of more than 3000 bytes in both directions. Ends agree on 9000, as on a bad route."""
        for name in self.names:
            tc = ("ip", "netns", "exec", name, "tc", "qdisc", "replace", "dev", "cable", "root")
            _run(*tc, "tbf", "rate", "10gbit", "burst", "3000", "limit", "10mb")

    def lose_nothing(self, side: int) -> None:
        """Undo ``lose`` or ``lose_large``."""
        _run("ip", "netns", "exec", self.names[side], "tc", "qdisc", "del", "dev", "cable", "root")


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)

"""Connections between hosts: ordered and delayed; partitions cut them, resets and deaths end them.

A partition holds sent messages (the kernel retransmits) until it heals, or until an end gives up.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import cast

from sim.clockwork import Clockwork, Process

from fabric.protocol.messages import network, wire

# The most bytes of a message in a small packet.
SMALL_BYTES = 1400
# Seconds without an acknowledgement after which an end closes its connection.
GIVE_UP_S = (0.8, 2.0)
# The same where only large messages are lost: all kernels count from the test, to which nothing is added.
GIVE_UP_LARGE_S = (1.6, 1.8)
TIMED_OUT = "timed out"


# Messages are immutable, so a message to several receivers is encoded and decoded once.
_encode = lru_cache(maxsize=64)(wire.encode)
_decode = lru_cache(maxsize=64)(wire.decode)


def encode(message: network.Message) -> bytes:
    """Return a message's bytes by the real codec."""
    unhashable = isinstance(message, network.Heartbeat)
    return wire.encode(message) if unhashable else cast(bytes, _encode(message))


def decode(data: object) -> network.Message:
    """Return the message in these bytes."""
    return cast(network.Message, _decode(data))


class End:
    """One end of a connection."""

    def __init__(
        self,
        process: Process,
        host: str,
        on_message: Callable[[object], None],
        on_close: Callable[[str], None],
    ) -> None:
        self.process = process
        self.host = host
        self.on_message = on_message
        self.on_close = on_close
        self.open = True
        self.arrival = 0.0  # the arrival time of the last message to this end
        self.held: list[Callable[[], None]] = []


class Connection:
    """A connection with two ends; ``send(0, ...)`` goes from end 0 to end 1."""

    def __init__(self, network: "Network", first: End, second: End) -> None:
        self.network = network
        self.ends = (first, second)
        network.connections[self] = None

    def send(self, side: int, message: object, bulk: bool = False) -> None:
        """Queue a message; lost when this end is closed. Only connections without ``bulk`` have a timeout."""
        if self.ends[side].open:
            there = self.ends[1 - side]
            large = bulk or (isinstance(message, bytes) and len(message) > SMALL_BYTES)
            self._to(1 - side, lambda: self._deliver(there, message), large)
            if large and not bulk and not self.network.can_carry(self.ends[side].host, there.host):
                self.network.clockwork.at(self.network.clockwork.between(*GIVE_UP_LARGE_S), self.give_up)

    def close(self, side: int, why: str) -> None:
        """Close this end; the other end gets everything sent before, then the end."""
        here, there = self.ends[side], self.ends[1 - side]
        if not here.open:
            return
        here.open = False
        self._to(1 - side, lambda: self._end(there, why))
        self._forget()

    def reset(self, why: str) -> None:
        """Reset both ends soon; messages in flight are lost."""
        for end in self.ends:
            self.network.clockwork.at(self.network.delay(), lambda end=end: self._end(end, why))

    def end_by_death(self, process: Process) -> None:
        """Close the end of a dead process; sometimes the last sent messages are lost too."""
        for side, end in enumerate(self.ends):
            if end.process is process and end.open:
                if self.network.clockwork.chance(0.3):
                    end.open = False
                    there = self.ends[1 - side]
                    there.arrival = 0.0
                    self._to(1 - side, lambda there=there: self._end(there, "connection reset by peer"))
                else:
                    self.close(side, "end of file")

    def _forget(self) -> None:
        if not self.is_open:
            self.network.connections.pop(self, None)

    @property
    def is_open(self) -> bool:
        return self.ends[0].open or self.ends[1].open

    def is_between(self, a: str, b: str) -> bool:
        return {self.ends[0].host, self.ends[1].host} == {a, b}

    def _to(self, side: int, action: Callable[[], None], large: bool = False) -> None:
        clockwork, end = self.network.clockwork, self.ends[side]
        arrival = max(clockwork.now + self.network.delay(), end.arrival + 1e-9)
        end.arrival = arrival
        source = self.ends[1 - side].host

        def arrive() -> None:
            lost = self.network.lossy if large else self.network.blocked
            if end.held or (source, end.host) in self.network.blocked or (source, end.host) in lost:
                end.held.append(action)
            else:
                action()

        clockwork.at(arrival - clockwork.now, arrive)

    def flush(self) -> None:
        """Deliver the messages that a healed partition has held."""
        for side, end in enumerate(self.ends):
            if end.held and (self.ends[1 - side].host, end.host) not in self.network.blocked:
                held, end.held = end.held, []
                for action in held:
                    self.network.clockwork.at(0.0, action)

    def give_up(self) -> None:
        """Close both ends if the partition still lasts."""
        a, b = self.ends[0].host, self.ends[1].host
        held = self.ends[0].held or self.ends[1].held
        if not self.network.can_talk(a, b) or (held and not self.network.can_carry(a, b)):
            for end in self.ends:
                later = self.network.clockwork.between(0.0, 0.4)
                self.network.clockwork.at(later, lambda end=end: self._end(end, TIMED_OUT))

    def _deliver(self, end: End, message: object) -> None:
        if end.open:
            end.process.run(lambda: end.on_message(message) if end.open else None)

    def _end(self, end: End, why: str) -> None:
        def ended() -> None:
            if end.open:
                end.open = False
                self._forget()
                end.on_close(why)

        end.process.run(ended)


class Network:
    """All connections, the cuts between hosts, and the delays."""

    def __init__(self, clockwork: Clockwork) -> None:
        self.clockwork = clockwork
        self.connections: dict[Connection, None] = {}
        self.blocked: dict[tuple[str, str], None] = {}
        self.lossy: dict[tuple[str, str], None] = {}  # ways that lose large messages and pass small ones
        # a pair of hosts without a link -> the time until which the link stays cut
        self.healed: dict[frozenset[str], float] = {}
        self.flips: dict[str, bool] = {}  # hosts whose next chunk gets damaged on the wire
        self.unheard: dict[str, bool] = {}  # hosts that the next epoch's message does not reach
        self.slow = 0.03  # the probability that a packet is delayed

    def delay(self) -> float:
        """Return a one-way delay in seconds."""
        clockwork = self.clockwork
        if clockwork.random.random() < self.slow:
            return 0.005 + 0.1 * clockwork.random.random()
        return 0.0002 + 0.002 * clockwork.random.random()

    def can_talk(self, a: str, b: str) -> bool:
        return (a, b) not in self.blocked and (b, a) not in self.blocked

    def can_carry(self, a: str, b: str) -> bool:
        """Return whether messages of every size pass between two hosts."""
        return self.can_talk(a, b) and (a, b) not in self.lossy and (b, a) not in self.lossy

    def could_talk(self, a: str, b: str, seconds: float) -> bool:
        """Return whether two hosts could talk during this time up to now."""
        healed = self.healed.get(frozenset((a, b)), -seconds)
        return self.can_talk(a, b) and self.clockwork.now - healed >= seconds

    def block(self, a: str, b: str) -> None:
        """Cut the direction from ``a`` to ``b``; a connection needs both directions."""
        self.blocked[a, b] = None
        for connection in list(self.connections):
            if connection.is_open and connection.is_between(a, b):
                self.clockwork.at(self.clockwork.between(*GIVE_UP_S), connection.give_up)

    def heal(self) -> None:
        self.healed |= {frozenset(pair): self.clockwork.now for pair in self.blocked}
        self.blocked.clear()
        self.lossy.clear()
        for connection in list(self.connections):
            connection.flush()

    def death(self, process: Process) -> None:
        for connection in list(self.connections):
            connection.end_by_death(process)

    def reset_between(self, a: str, b: str) -> bool:
        """Reset one connection between these hosts, if one exists."""
        found = [c for c in self.connections if c.is_open and c.is_between(a, b)]
        if not found:
            return False
        self.clockwork.random.choice(found).reset("connection reset by a middle box")
        return True

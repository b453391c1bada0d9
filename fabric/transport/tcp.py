"""Sockets between peers: a listener that survives any client, and a dialler with a time limit.

Both run the handshake of ``greeting`` with exact reads, so they read no byte that follows the handshake. They
return a raw non-blocking socket: a control socket becomes a Link, a data socket goes to a ring in another
thread.

``TCP_USER_TIMEOUT`` bounds how long sent bytes may stay unacknowledged, so that control links notice a cut
network within two seconds, at no cost to a step. The kernel also counts the time for which a peer's window
stays closed, and a healthy member that computes for minutes does not read its ring. So data sockets have no
such timeout (0), and the exchange has its own deadlines.
"""

import asyncio
import hashlib
import logging
import os
import re
import socket
import struct
import threading
import weakref
from collections.abc import Callable, Coroutine, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial

from fabric.errors import ConfigError, FabricError, ProtocolError, Refused, Unconnected, Unreachable
from fabric.runtime import logs
from fabric.runtime.http import bind_first_free
from fabric.runtime.http.connection_limit import ConnectionLimit, ConnectionSlot, Limits, end_connection
from fabric.runtime.private_folder import peer_of
from fabric.transport import greeting as proof
from fabric.transport.connecting import connect
from fabric.transport.greeting import MAX_HANDSHAKE_BYTES, Greeting
from fabric.transport.link import HEADER_BYTES, frame, words_of

# Links between processes on one host: a unix socket beside the TCP socket.
#
# The name has the TCP port and the listener's job, replica and rank, because hosts often use equal ports.
# The name is abstract, so it exists only in the port's network namespace. Two containers on one machine
# can have two namespaces. Both ends run the handshake of any link, so a process that took the name cannot
# pass for a member. Both ends ask the kernel for the other's user: these links share memory, and a job
# without a token must not share memory with another user.


_LOCAL_BACKLOG = 64


def local_name(job: str, replica: str, rank: int, port: int) -> bytes:
    """Return the name of the unix socket on which this rank listens beside ``port``."""
    # A hash, because a socket's name has at most 107 bytes.
    whose = hashlib.blake2b(f"{job}\n{replica}\n{rank}".encode(), digest_size=16).hexdigest()
    return b"\0fabric-link-%d-%s" % (port, whose.encode())


def listen_locally(name: bytes) -> socket.socket | None:
    """Return a non-blocking listener for this host's members. None where the name is taken: they use TCP."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        sock.bind(name)
        sock.listen(_LOCAL_BACKLOG)
    except OSError:
        sock.close()
        return None
    return sock


def connect_locally(name: bytes) -> socket.socket | None:
    """Return a non-blocking connection to this host's listener of this name, None if there is none."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        sock.connect(name)
        check_user(sock)
    except (OSError, Refused):
        sock.close()
        return None
    return sock


def check_user(sock: socket.socket) -> None:
    """Raise Refused if the process at the other end is another user's."""
    _, uid = peer_of(sock)
    if uid != os.geteuid():
        raise Refused(f"the other end on this host belongs to user {uid}, not to {os.geteuid()}: use TCP")


# A stranger needs no token to connect, and may stay silent for as long as a handshake may take. If the
# listener waited for silent connections, some hundred of them would keep a job's own links from forming.
# So the listener always accepts, and drops the oldest handshake when there are too many. If one address
# has too many, its own oldest handshake is dropped.


# The most handshakes under way at a time; one address may have half of them.
MAX_HANDSHAKES = 256
# A member of a large job answers within this time, even if all others dial at once. No handshake younger than
# this is dropped for another address.
_AT_LEAST_S = 0.25

logger = logging.getLogger(__name__)

# Seconds for which sent bytes may stay unacknowledged on a control link: several retries of the kernel where
# round trips are short. A peer's kernel acknowledges bytes even if the peer's process hangs.
SILENT_S = 1.6
QUICK_S = {"control": SILENT_S, "rank": 3.0}  # where a rank's link ends, its whole replica starts again
# If the kernel waits longer than this before it resends, the network is slow and the link gets more time.
QUICK_RETRY_S = 0.4
SLOW_SILENT_S = 10.0
# Time limit of a connection attempt in seconds. One lost packet costs the kernel a second.
CONNECT_S = 2.0
HANDSHAKE_S = 5.0
# The members of a large job dial together, so the backlog is large. The kernel lowers it to its own limit.
_BACKLOG = 1024
_ACCEPT_BACKOFF_S = 0.05
_INTERNET = (socket.AF_INET, socket.AF_INET6)
# With TCP_USER_TIMEOUT set, one unanswered probe ends an idle link when that timeout has passed.
_QUICK_KEEPALIVE = {socket.TCP_KEEPIDLE: 15, socket.TCP_KEEPINTVL: 5, socket.TCP_KEEPCNT: 3}
_KEEPALIVE = {socket.TCP_KEEPIDLE: 5, socket.TCP_KEEPINTVL: 2, socket.TCP_KEEPCNT: 3}

# The head of the kernel's struct tcp_info: eight bytes, then the time to the next try, in microseconds.
_TCP_INFO = struct.Struct("8xI")
# A later field of it: the time for which sent bytes were not acknowledged yet, in microseconds.
_SENDING = struct.Struct("168xQ")

# The tokens that the process accepts now: two tokens while a new token replaces the old token.
Tokens = Callable[[], Sequence[bytes]]
# The TCP sockets of links as long as they live, for a drill that damages them.
_links: weakref.WeakSet[socket.socket] = weakref.WeakSet()
_listening: weakref.WeakSet[socket.socket] = weakref.WeakSet()
_guard = threading.Lock()
_led_back: set[str] = set()  # the addresses of other replicas that have led back to this process

OnConnection = Callable[[Greeting, socket.socket], None]


@dataclass(slots=True)
class ListenerIdentity:
    """The identity of a listener. ``store_id`` may be set later; while empty, any store id is accepted."""

    job: str
    replica: str
    store_id: str = ""
    rank: int = 0


class Listener:
    """Accepts links for one identity and hands each authenticated socket to ``on_connection``.

    The socket is
    non-blocking and belongs to the callback. ``close`` ends the accepting, and unfinished handshakes.
    """

    def __init__(
        self,
        identity: ListenerIdentity,
        token: bytes | Tokens,
        on_connection: OnConnection,
        handshake_s: float = HANDSHAKE_S,
    ) -> None:
        self.identity = identity
        self._tokens: Tokens = token if callable(token) else lambda: (token,)
        self._on_connection = on_connection
        self._handshake_s = handshake_s
        self._server: socket.socket | None = None
        self._local: socket.socket | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        limits = Limits(MAX_HANDSHAKES, MAX_HANDSHAKES)
        self._handshakes = ConnectionLimit(limits, idle="without a greeting")
        self._handshake_ended = asyncio.Event()

    @property
    def address(self) -> tuple[str, int]:
        """The host and port to which the listener is bound. Raises ConfigError before ``start``."""
        if self._server is None:
            raise ConfigError("the listener has no address before it is started")
        host, port = self._server.getsockname()[:2]
        return str(host), int(port)

    async def start(self, host: str, ports: range = range(1), local: bool = False) -> None:
        """Bind the first free port of ``ports`` (0: any) and accept; with ``local`` on a unix socket too.

        The unix socket is for links from this host. Raises ConfigError where no port can be bound.
        """
        self._server = bind_first_free(host, ports)
        self._server.listen(_BACKLOG)
        own = self.identity
        name = local_name(own.job, own.replica, own.rank, self.address[1])
        self._local = listen_locally(name) if local else None
        for server in (self._server, self._local):
            if server is not None:
                _listening.add(server)
                self._spawn(self._accept_loop(server))

    async def close(self) -> None:
        """Stop accepting; sockets already handed on stay open."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for server in (self._server, self._local):
            if server is not None:
                server.close()

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _accept_loop(self, server: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, address = await loop.sock_accept(server)
            except OSError as error:
                # No descriptor is left, or the client left the queue: make room, and accept the next client
                self._handshakes.close_one()
                logger.warning("could not accept a connection: %s", error)
                await asyncio.sleep(_ACCEPT_BACKOFF_S)
                continue
            place = str(address[0]) if server.family in _INTERNET else "this host"
            with ExitStack() as undo:
                undo.callback(sock.close)
                while (wait_s := self._handshakes.young_s(place, _AT_LEAST_S)) > 0:
                    self._handshake_ended.clear()
                    with suppress(TimeoutError):
                        async with asyncio.timeout(wait_s):
                            await self._handshake_ended.wait()
                slot = self._handshakes.admit(place, partial(end_connection, sock))
                assert slot is not None  # each handshake counts as idle
                self._spawn(self._serve(sock, slot))
                undo.pop_all()
            # ``accept`` does not yield to the event loop while connections wait, so yield here.
            await asyncio.sleep(0)

    async def _serve(self, sock: socket.socket, slot: ConnectionSlot) -> None:
        handed_on = False
        try:
            sock.setblocking(False)
            if sock.family == socket.AF_UNIX:
                check_user(sock)
            async with asyncio.timeout(self._handshake_s):
                greeting = await self._handshake(sock)
            tune(sock, greeting.kind)
            self._on_connection(greeting, sock)
            handed_on = True
        except TimeoutError:
            logger.warning("a client did not greet within %g s and was dropped", self._handshake_s)
        except OSError as error:
            # The dialler died or closed the connection, which is not a refusal.
            logger.info("a connection ended before its greeting did: %s", error)
        except FabricError as error:
            logger.warning("a connection was refused: %s", error)
        finally:
            slot.leave()
            self._handshake_ended.set()
            if not handed_on:
                sock.close()

    async def _handshake(self, sock: socket.socket) -> Greeting:
        challenge = proof.random_bytes()
        await _send_frame(sock, proof.WIRE + challenge)
        hello = await _receive_frame(sock)
        try:
            greeting, token = proof.read_hello_of_any(hello, challenge, self._tokens())
            self._check(greeting)
        except FabricError as error:
            with suppress(OSError):
                await _send_frame(sock, proof.refuse_frame(error))
            raise
        await _send_frame(sock, proof.accept_frame(challenge, hello, token))
        return greeting

    def _check(self, greeting: Greeting) -> None:
        own, who = self.identity, f"{greeting.replica!r}"
        if greeting.job != own.job:
            raise Refused(
                f"{who} belongs to job {greeting.job!r}, this is job {own.job!r}: "
                "check the address and the job's name"
            )
        # A process that probes members before it has the job's record knows no store
        is_new = greeting.kind == "probe" and not greeting.store_id
        if own.store_id and greeting.store_id != own.store_id and not is_new:
            raise Refused(
                f"{who} was told of store {greeting.store_id!r}, this job's store is "
                f"{own.store_id!r}: the control store was wiped or is another one, restart {who}"
            )
        if greeting.to and greeting.to != own.replica == greeting.replica:
            raise Unconnected(
                f"its address leads back to {own.replica} itself, as where two hosts have one name; set "
                f"FABRIC_ADVERTISE on the host of {greeting.to}"
            )
        if greeting.to and greeting.to != own.replica:
            raise Refused(
                f"{who} looks for {greeting.to!r} and reached {own.replica!r}: "
                "the address was taken over, wait for the next epoch"
            )
        wanted = greeting.rank if greeting.to_rank < 0 else greeting.to_rank
        if wanted != own.rank or (greeting.kind == "rank" and greeting.replica != own.replica):
            raise Refused(
                f"rank {greeting.rank} of {who} reached rank {own.rank} of {own.replica!r}: "
                "the address was taken over, wait for the next epoch"
            )


async def dial(
    address: str, greeting: Greeting, token: bytes, timeout_s: float, local: bool = False
) -> socket.socket:
    """Return a connected, authenticated, non-blocking socket to ``address``: "host:port", "host,host:port".

    Ranks, and the connections of a link, begin at different hosts. The next host is tried where nothing
    listens. With ``local`` it is a unix socket if the replica in the greeting listens on this host.

    Raises Unreachable where no process answers within ``timeout_s``, Unconnected without a connection,
    Unauthorized, Refused or ProtocolError by the handshake, ConfigError for a malformed address.
    """
    *others, last = address.split(",")
    places = [f"{host}:{last.rpartition(':')[2]}" for host in others] + [last]
    first = (greeting.rank + greeting.connection) % len(places)
    *places, last = places[first:] + places[:first]
    for place in places:
        with suppress(Unconnected):
            return await _dial_host(place, greeting, token, timeout_s, local)
    return await _dial_host(last, greeting, token, timeout_s, local)


async def _dial_host(
    address: str, greeting: Greeting, token: bytes, timeout_s: float, local: bool
) -> socket.socket:
    host, port = parse_address(address)
    whom = f"{greeting.to or 'a peer'} at {address}"
    if local and (near := await _dial_locally(port, greeting, token, timeout_s)) is not None:
        return near
    with ExitStack() as undo:
        within_s = min(timeout_s, CONNECT_S)
        try:
            sock = await connect(host, port, within_s)
        except TimeoutError as error:
            why = f"nothing came back within {within_s:g} s, check the network between"
            raise Unconnected(f"{whom} cannot be reached: {why}") from error
        except OSError as error:
            raise Unconnected(f"{whom} cannot be reached: {words_of(error)}") from error
        undo.callback(sock.close)
        try:
            async with asyncio.timeout(timeout_s):
                await _greet(sock, greeting, token)
                tune(sock, greeting.kind)
        except Unconnected as error:
            sentence = f"{whom} cannot be reached: {error}"
            if address not in _led_back:
                _led_back.add(address)
                logs.tell(f"{greeting.replica}: {sentence}")
            raise Unconnected(sentence) from error
        except TimeoutError as error:
            raise Unreachable(
                f"{whom} did not answer within {timeout_s:g} s: check that it runs and is reachable"
            ) from error
        except OSError as error:
            raise Unreachable(f"{whom} cannot be reached: {words_of(error)}") from error
        undo.pop_all()
        return sock


async def _dial_locally(
    port: int, greeting: Greeting, token: bytes, timeout_s: float
) -> socket.socket | None:
    """Dial the unix socket. None if no process or a wrong one answers: the port may be another host's."""
    rank = greeting.rank if greeting.to_rank < 0 else greeting.to_rank
    sock = connect_locally(local_name(greeting.job, greeting.to, rank, port))
    if sock is None:
        return None
    with ExitStack() as undo:
        undo.callback(sock.close)
        try:
            async with asyncio.timeout(timeout_s):
                await _greet(sock, greeting, token)
        except (OSError, FabricError):  # TimeoutError is an OSError
            return None
        undo.pop_all()
        return sock


def _leave_to_parent() -> None:
    """Close in a forked worker what it has inherited: it may outlive the trainer that has the port."""
    for sock in (*_listening, *_links):
        with suppress(OSError):  # ``close`` waits for a loop that runs in the parent alone
            os.close(sock.detach())


os.register_at_fork(after_in_child=_leave_to_parent)


def open_links() -> list[socket.socket]:
    """Return the TCP sockets of all links of this process. Any thread may call it."""
    with _guard:
        return list(_links)


def tune(sock: socket.socket, kind: str) -> None:
    """Set TCP_NODELAY for small messages, keepalive for idle links, a timeout for unacknowledged bytes."""
    if sock.family not in _INTERNET:
        return
    with _guard:
        _links.add(sock)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    state = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
    # The time after which the kernel resends unacknowledged bytes, by the round trips so far.
    is_quick = kind in QUICK_S and _TCP_INFO.unpack(state)[0] <= QUICK_RETRY_S * 1e6
    for option, value in (_QUICK_KEEPALIVE if is_quick and kind == "control" else _KEEPALIVE).items():
        sock.setsockopt(socket.IPPROTO_TCP, option, value)
    timeout_s = 0.0 if kind in ("data", "collective") else QUICK_S[kind] if is_quick else SLOW_SILENT_S
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(timeout_s * 1000))


def sending_s(sock: socket.socket) -> float:
    """Return the seconds, since the connection began, for which bytes to the peer were under way.

    It is 0 on a unix socket, and where the kernel does not count this time.
    """
    if sock.family not in _INTERNET:
        return 0.0
    state = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _SENDING.size)
    return float(_SENDING.unpack(state)[0]) / 1e6 if len(state) == _SENDING.size else 0.0


def parse_address(address: str) -> tuple[str, int]:
    """Return host and port of "host:port" or "[v6]:port"; raises ConfigError."""
    form = re.fullmatch(r"(?:\[(.+)\]|([^:\[\]]+)):(\d{1,5})", address, re.ASCII)
    if form is None or int(form[3]) > 65535:
        raise ConfigError(f"{address[:80]!r} is not an address: write host:port")
    return form[1] or form[2], int(form[3])


async def _greet(sock: socket.socket, greeting: Greeting, token: bytes) -> None:
    challenge = proof.read_challenge(await _receive_frame(sock))
    hello = proof.hello_frame(greeting, challenge, proof.random_bytes(), token)
    await _send_frame(sock, hello)
    proof.read_verdict(await _receive_frame(sock), challenge, hello, token)


async def _send_frame(sock: socket.socket, payload: bytes) -> None:
    await asyncio.get_running_loop().sock_sendall(sock, frame(payload, MAX_HANDSHAKE_BYTES))


async def _receive_frame(sock: socket.socket) -> bytes:
    length = int.from_bytes(await _receive_exactly(sock, HEADER_BYTES), "big")
    if not 0 < length <= MAX_HANDSHAKE_BYTES:
        raise ProtocolError("the other side did not greet as fabric does: check the address")
    return await _receive_exactly(sock, length)


async def _receive_exactly(sock: socket.socket, count: int) -> bytes:
    # Read exactly: the bytes after the handshake are for the owner of the socket.
    loop = asyncio.get_running_loop()
    data = b""
    while len(data) < count:
        piece = await loop.sock_recv(sock, count - len(data))
        if not piece:
            raise ConnectionResetError(0, "the other side closed during the greeting")
        data += piece
    return data

"""Opens connections to a host by name, although the name server is away or some of its addresses are dead.

All addresses of a name are tried at once, each with the whole time limit. The last address that worked is
kept for each name. It is tried too where the look-up fails or is slow, but not where the look-up has an
answer: the name may have moved, and the old address may be another host's now.
"""

import asyncio
import os
import socket
import threading
from collections.abc import Coroutine, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from typing import Any


@dataclass(frozen=True, slots=True)
class _Address:
    """An address of a host, with the port, as ``sock_connect`` takes it."""

    family: int
    where: tuple[Any, ...]


# A look-up that takes longer than this counts as slow. Then the kept address is tried beside it.
_SLOW_S = 0.25
# A look-up may block a thread for a minute, so look-ups have threads of their own.
_LOOK_UPS = ThreadPoolExecutor(4, "fabric-look-up")
_last_good: dict[str, _Address] = {}  # name -> the address at which its host last answered


def begin_connect(host: str, port: int, within_s: float) -> "Future[socket.socket]":
    """Begin ``connect`` for a thread without an event loop. A cancel of the result ends the attempts."""
    return asyncio.run_coroutine_threadsafe(connect(host, port, within_s), _dialling_loop(os.getpid()))


@cache
def _dialling_loop(_process: int) -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="fabric-dial", daemon=True).start()
    return loop


async def connect(host: str, port: int, within_s: float) -> socket.socket:
    """Return a connected non-blocking socket. Raises OSError, TimeoutError where nothing came back in time.

    The look-up may take ``within_s``, and so may each address.
    """
    numeric: list[_Address] = []
    with suppress(OSError):  # it is a name
        numeric = _addresses(host, port, socket.AI_NUMERICHOST)
    if numeric:
        return await _first([_open(address, within_s) for address in numeric])
    loop = asyncio.get_running_loop()
    look_up = loop.run_in_executor(_LOOK_UPS, _addresses, host, port)
    kept = _last_good.get(host)
    try:
        if kept is not None:
            await asyncio.wait({look_up}, timeout=_SLOW_S)
        has_answer = look_up.done() and look_up.exception() is None
        ways = [_open_by_name(host, look_up, within_s)]
        if kept is not None and not has_answer:
            ways.append(_open(_Address(kept.family, (kept.where[0], port, *kept.where[2:])), within_s))
        return await _first(ways)
    finally:
        look_up.cancel()


async def _open_by_name(host: str, look_up: asyncio.Future[list[_Address]], within_s: float) -> socket.socket:
    try:
        async with asyncio.timeout(within_s):
            addresses = await look_up
    except TimeoutError as error:
        raise OSError(f"the name {host} was not resolved within {within_s:g} s") from error
    sock = await _first([_open(address, within_s) for address in addresses])
    with suppress(OSError):  # the peer has closed the connection
        _last_good[host] = _Address(sock.family, sock.getpeername())
    return sock


async def _open(address: _Address, within_s: float) -> socket.socket:
    sock = socket.socket(address.family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        async with asyncio.timeout(within_s):
            await asyncio.get_running_loop().sock_connect(sock, address.where)
    except BaseException:
        sock.close()
        raise
    return sock


async def _first(ways: Sequence[Coroutine[None, None, socket.socket]]) -> socket.socket:
    """Return the first connection that comes about, and end the other attempts. Raises the last OSError."""
    tasks = [asyncio.create_task(way) for way in ways]
    failure = OSError("there is no address")
    chosen: socket.socket | None = None
    try:
        for next_done in asyncio.as_completed(tasks):
            try:
                chosen = await next_done
            except OSError as error:  # TimeoutError is an OSError
                failure = error
            else:
                return chosen
        raise failure
    finally:
        for task in tasks:
            task.cancel()
            task.add_done_callback(partial(_close_unless, chosen))


def _close_unless(chosen: socket.socket | None, task: asyncio.Task[socket.socket]) -> None:
    if not task.cancelled() and task.exception() is None and task.result() is not chosen:
        task.result().close()


def _addresses(host: str, port: int, flags: int = 0) -> list[_Address]:
    entries = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=flags)
    return [_Address(family, where) for family, _, _, _, where in entries]

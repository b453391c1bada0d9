"""Small pure functions: ranges, kernel states, ports, tokens, errors as JSON."""

import asyncio
import errno
import logging
import os
import signal
import sys

import pytest
from aiohttp import ClientSession, web
from hypothesis import given
from hypothesis import strategies as st
from server_support import no_more_descriptors

from fabric.ckpt_server.server.local_ranks import LocalRank, LocalRanks
from fabric.ckpt_server.server.routes import (
    check_if_match,
    wanted_range,
)
from fabric.ckpt_server.server.slots import Memfd
from fabric.ckpt_server.server.trainer_watch import TrainerWatch, state_in
from fabric.ckpt_server.wire.server_settings import ServerSettings
from fabric.errors import (
    ConfigError,
    FabricError,
    Gone,
    ProtocolError,
    Refused,
    StoreError,
    StoreIndefinite,
    Unauthorized,
)
from fabric.runtime.http import parse_ports
from fabric.runtime.http.http_service import (
    bearer_required,
    bind_first_free,
    check_bearer,
    check_exposure,
    errors_as_json,
    query_integer,
    serve,
    status_of,
)
from fabric.runtime.http.token_file import read_token


@given(st.integers(0, 50), st.integers(0, 60), st.integers(0, 60))
def test_ranges_select_the_bytes_of_the_rfc(nbytes, first, last):
    data = bytes(range(nbytes))
    for header, wanted in (
        (f"bytes={first}-", data[first:]),
        (f"bytes=-{last}", data[max(nbytes - last, 0) :]),
        (f"Bytes={first}-{max(first, last)}", data[first : max(first, last) + 1]),
    ):
        try:
            begin, end = wanted_range(header, None, '"t"', nbytes)
        except web.HTTPRequestRangeNotSatisfiable as error:
            assert not wanted and error.headers["Content-Range"] == f"bytes */{nbytes}"
        else:
            assert data[begin:end] == wanted != b""


@given(st.text(max_size=30))
def test_range_headers_of_any_kind_are_a_range_nothing_or_refused(text):
    for header in (text, f"bytes={text}"):
        try:
            found = wanted_range(header, None, '"t"', 100)
        except (ProtocolError, web.HTTPRequestRangeNotSatisfiable):
            continue
        assert found is None or 0 <= found[0] < found[1] <= 100


def test_if_match_accepts_listed_tags_and_refuses_others():
    check_if_match(None, '"t"')
    check_if_match('"a","t"', '"t"')
    for header in ("", "t", 'W/"t"', '"T"'):
        with pytest.raises(web.HTTPPreconditionFailed):
            check_if_match(header, '"t"')


def stat(state: str, flags: int, threads: int) -> str:
    return f"77 (a) b (R) {state} 1 2 3 4 5 {flags} 7 8 9 10 11 12 13 14 15 16 {threads} 0 999 1 2"


@pytest.mark.parametrize(
    ("state", "flags", "threads", "verdict"),
    [
        ("R", 0, 40, "running"),
        ("S", 0, 1, "running"),
        ("D", 0, 1, "running"),
        ("T", 0, 40, "stopped"),
        ("t", 0, 1, "stopped"),
        ("Z", 0, 1, "gone"),
        ("X", 0, 1, "gone"),
        ("R", 0x4 | 0x400, 40, "gone"),  # the process was killed, and the kernel still frees its memory
        ("D", 0x4, 1, "gone"),
        ("Z", 0x4, 40, "running"),  # only the process's first thread has ended
    ],
)
def test_letters_of_the_kernel_are_read_as_process_states(state, flags, threads, verdict):
    assert state_in(stat(state, flags, threads)) == verdict


async def test_process_states_of_the_kernel_of_real_processes_is_noticed_without_being_asked(tmp_path):
    ranks = LocalRanks(ServerSettings("job", "r0", tmp_path))
    rank = ranks.held[0] = LocalRank(ranks.settings, 0, "", ranks.changed)
    trainer = rank.trainer
    assert trainer.state == "absent"
    watching = asyncio.create_task(ranks.watch())

    async def until(state: str) -> None:
        while trainer.state != state:
            trainer.changed.clear()
            await asyncio.wait_for(trainer.changed.wait(), 30)

    child = await asyncio.create_subprocess_exec(sys.executable, "-c", "import signal; signal.pause()")
    trainer.attach(child.pid, 1)
    assert trainer.state == "running"
    child.send_signal(signal.SIGSTOP)
    await until("stopped")
    child.send_signal(signal.SIGCONT)
    await until("running")
    child.kill()
    await until("gone")
    await child.wait()
    assert trainer.state == "gone"  # the trainer is reaped, so /proc shows nothing of it
    trainer.attach(child.pid, 2)
    assert trainer.state == "gone"
    trainer.attach(os.getpid(), 3)
    assert trainer.state == "running"
    watching.cancel()
    trainer.close()
    rank.slots.close()


REFUSALS = [
    (errno.EPERM, "the container's seccomp profile allow "),
    (errno.ENOSYS, "seccomp profile or sandbox allow "),
    (errno.EMFILE, "raise its limit on open files"),
    (errno.EIO, "read the kernel's log"),
]


@pytest.mark.parametrize("number, remedy", REFUSALS)
async def test_a_refused_system_call_has_the_remedy_of_its_own_reason(monkeypatch, number, remedy):
    def refuse(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "pidfd_open", refuse)
    monkeypatch.setattr(os, "memfd_create", refuse)
    with pytest.raises(Refused) as watching:
        TrainerWatch().attach(os.getpid(), 1)
    with pytest.raises(ConfigError) as making:
        Memfd("snapshot slot 0")
    for said, call in ((str(watching.value), "pidfd_open"), (str(making.value), "memfd_create")):
        assert f"({call}: {os.strerror(number)}): " in said and remedy in said
        assert ("ulimit" in said) == (number == errno.EMFILE)


async def test_a_trainer_is_refused_where_its_container_forbids_shared_memory(monkeypatch):
    """It attached, and the job then waited for the links of one host for ever."""

    def refuse(*_):
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "memfd_create", refuse)
    with pytest.raises(Refused, match=r"can hold no state: .*: let the container's seccomp .* memfd_create$"):
        TrainerWatch().attach(os.getpid(), 1)


@pytest.mark.parametrize("left", [0, 1])
async def test_a_process_that_cannot_be_watched_is_refused_and_the_former_is_watched_on(left):
    trainer = TrainerWatch()
    child = await asyncio.create_subprocess_exec(sys.executable, "-c", "import signal; signal.pause()")
    trainer.attach(child.pid, 1)
    with no_more_descriptors(left) as lowest:
        sentence = (
            rf"cannot watch process {os.getpid()} \({('open', 'pidfd_open')[left]}: Too many open files\): "
            "raise its limit on open files"
        )
        with pytest.raises(Refused, match=sentence):
            trainer.attach(os.getpid(), 2)
    assert (trainer.pid, trainer.incarnation, trainer.state) == (child.pid, 1, "running")
    os.close(again := os.dup(0))
    assert again == lowest, "nothing is left open"
    trainer.changed.clear()
    child.kill()
    await asyncio.wait_for(trainer.changed.wait(), 30)
    assert trainer.state == "gone"
    await child.wait()
    trainer.close()


@pytest.mark.parametrize(("text", "ports"), [("0", [0]), ("8000", [8000]), (" 80-82 ", [80, 81, 82])])
def test_a_setting_of_ports_is_read_as_its_list(text, ports):
    assert list(parse_ports(text)) == ports


@pytest.mark.parametrize(
    "text", ["", "-", "-1", "80-", "-80", "82-80", "0-5", "65536", "a", "8000-8001-8002", "1e3"]
)
def test_malformed_ports_are_refused(text):
    with pytest.raises(ConfigError, match="give a port, a range such as 8000-8010, or 0"):
        parse_ports(text)


def test_the_first_free_port_of_a_range_wins():
    with bind_first_free("127.0.0.1", range(1)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port {port} on 127.0.0.1 is taken"):
            bind_first_free("127.0.0.1", range(port, port + 1))
        with bind_first_free("127.0.0.1", range(port, port + 200)) as free:
            assert free.getsockname()[1] > port


def test_an_address_of_another_host_is_refused_for_listening():
    with pytest.raises(ConfigError, match="bind to an address of this machine"):
        bind_first_free("192.0.2.1", range(1))
    with pytest.raises(ConfigError, match="is unknown"):
        bind_first_free("no host\x00", range(1))


def test_listening_for_others_needs_a_token():
    for host in ("127.0.0.1", "localhost", "::1", "127.8.8.8"):
        check_exposure(host, None)
    check_exposure("0.0.0.0", "token")
    for host in ("0.0.0.0", "::", "", "192.0.2.1"):
        with pytest.raises(ConfigError, match="without a token"):
            check_exposure(host, None)


def test_a_token_is_read_from_a_private_file(tmp_path, caplog):
    path = tmp_path / "token"
    path.write_text("  secret-1\n")
    path.chmod(0o600)
    with caplog.at_level(logging.WARNING):
        assert read_token(path) == "secret-1"
        assert not caplog.records
        path.chmod(0o644)
        assert read_token(path) == "secret-1"
    assert "chmod 600" in caplog.text and "secret-1" not in caplog.text
    for content, sentence in (
        (b"", "is empty"),
        (b"a b", "one line"),
        (b"\xff", "one line"),
        (b"x" * 5000, "one line"),
    ):
        path.write_bytes(content)
        with pytest.raises(ConfigError, match=sentence):
            read_token(path)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_token(tmp_path)


def test_only_a_well_formed_bearer_header_passes():
    check_bearer("Bearer t", "t")
    check_bearer("bearer  t ", "t")
    for header in ("", "Bearer", "Bearer ", "Bearer T", "Basic t", "t", "Bearer \udcff"):
        with pytest.raises(Unauthorized):
            check_bearer(header, "t")


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (Unauthorized("x"), 401),
        (ProtocolError("x"), 400),
        (ConfigError("x"), 400),
        (Refused("x"), 409),
        (Gone("x"), 409),
        (StoreError("x"), 503),
        (StoreIndefinite("x"), 504),
        (FabricError("x"), 500),
    ],
)
def test_every_error_has_its_http_status(error, status):
    assert status_of(error) == status


async def test_every_error_is_json_and_a_defect_shows_nothing_of_itself(caplog):
    async def defect(request: web.Request) -> web.Response:
        raise KeyError("the inside")

    async def number(request: web.Request) -> web.Response:
        return web.json_response(query_integer(request, "n", low=-5, high=5))

    async def elsewhere(request: web.Request) -> web.Response:
        raise web.HTTPTemporaryRedirect("/number")

    app = web.Application(middlewares=[errors_as_json, bearer_required("t", frozenset({"/open"}))])
    for path, handler in (
        ("/defect", defect),
        ("/number", number),
        ("/open", number),
        ("/elsewhere", elsewhere),
    ):
        app.router.add_get(path, handler)
    runner, port = await serve(app, "localhost", "0", shutdown_s=0.1)
    try:
        async with ClientSession(f"http://localhost:{port}") as client:

            async def ask(path: str, token: str = "t") -> tuple[int, object]:
                async with client.get(path, headers={"Authorization": f"Bearer {token}"}) as response:
                    return response.status, await response.json()

            status, body = await ask("/defect")
            assert status == 500 and "inside" not in str(body) and list(body) == ["error"]
            assert "the inside" in caplog.text
            assert await ask("/number?n=-5") == (200, -5)
            assert await ask("/number") == (200, None)
            for text in ("6", "-6", "", "x", "1.0", "--1", "\u0661", "1" * 30):
                assert (await ask(f"/number?n={text}"))[0] == 400
            assert (await ask("/number", "x"))[0] == 401
            assert (await ask("/open", "x"))[0] == 200
            assert (await ask("/missing"))[0] == 404
            assert await ask("/elsewhere") == (200, None)
    finally:
        await runner.cleanup()

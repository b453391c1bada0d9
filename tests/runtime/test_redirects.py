"""The hosts to which a client follows a lighthouse's redirect with the job's token."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from aiohttp import web
from yarl import URL

from fabric.ckpt_server.server.trainer_status import StatusSender
from fabric.ckpt_server.wire.server_settings import ServerSettings
from fabric.client.control import lighthouse_link
from fabric.client.control.lighthouse_link import LighthouseLink
from fabric.errors import Unreachable
from fabric.runtime.config import Settings
from fabric.runtime.http.lighthouse_client import Lighthouses, RedirectRefused, check

PODS = (
    "http://fabric-lighthouse-0.fabric-lighthouse:8600",
    "http://fabric-lighthouse-1.fabric-lighthouse:8600",
)


@pytest.mark.parametrize(
    ("given", "asked", "location"),
    [
        (PODS, PODS[0], PODS[1] + "/v1/jobs/j"),
        (("http://fabric-lighthouse:8600",), "http://fabric-lighthouse:8600", PODS[0]),
        (("http://lh0.x.example:8600",), "http://lh0.x.example:8600", "https://LH1.x.example:1/v1"),
        (("http://127.0.0.1:8600",), "http://127.0.0.1:8600", "http://127.0.0.1:8601/v1"),
        (("http://localhost:8600",), "http://localhost:8600", "http://[::1]:8601/v1"),
        (("http://10.0.0.1:8600",), "http://10.0.0.1:8600", "http://10.0.0.1:8601/v1"),
        (("http://10.0.0.1:8600",), "http://10.0.0.1:8600", "/v1/elsewhere"),
    ],
)
async def test_a_redirect_to_another_lighthouse_is_followed(given, asked, location):
    assert await check(URL(asked), location, given) == URL(asked).join(URL(location))


@pytest.mark.parametrize(
    ("given", "location", "words"),
    [
        ("https://lh0.x.example:8600", "http://lh0.x.example:8600", "from TLS"),
        ("http://lh0.x.example:8600", "http://10.9.9.9:8600", "none of those given"),
        ("http://lh0.example:8600", "http://10.9.9.9:8600", "none of those given"),
        ("http://10.0.0.1:8600", "http://10.0.0.2:8600", "none of those given"),
        ("http://10.0.0.1:8600", "http://127.0.0.1:8600", "none of those given"),
        ("http://10.0.0.1:8600", "file:///etc/passwd", "not an address"),
        ("http://10.0.0.1:8600", "http://[", "not an address"),
        ("http://10.0.0.1:8600", "http://10.0.0.1:99999", "not an address"),
    ],
)
async def test_a_redirect_to_anywhere_else_is_refused(given, location, words, monkeypatch):
    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", _nowhere)
    with pytest.raises(RedirectRefused, match=words):
        await check(URL(given), location, (given,))


@pytest.mark.parametrize(
    ("given", "location"),
    [("http://example.com", "http://evil.com"), ("http://lh0.x.example", "http://lh0.x.example.evil.com")],
)
async def test_a_name_that_only_looks_alike_is_refused(given, location, monkeypatch):
    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", _nowhere)
    with pytest.raises(RedirectRefused, match="none of those given"):
        await check(URL(given), location, (given,))


async def test_a_redirect_to_where_a_given_name_leads_is_followed(monkeypatch):
    """A Service or a load balancer has one name, and the lighthouses advertise their own addresses."""
    there = {"lighthouse": ["10.0.0.1", "10.0.0.2"], "one": ["10.0.0.1"], "both": ["10.0.0.1", "10.6.6.6"]}

    async def resolve(host, *_, **__):
        return [(0, 0, 0, "", (address, 0)) for address in there[host]]

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", resolve)
    for host in ("10.0.0.2", "one"):
        await check(URL("http://lighthouse:1"), f"http://{host}:1/", ["http://lighthouse:1"])
    for host in ("10.0.0.3", "both"):
        with pytest.raises(RedirectRefused):
            await check(URL("http://lighthouse:1"), f"http://{host}:1/", ["http://lighthouse:1"])


async def _nowhere(*_, **__):
    raise OSError("unknown")


# --- the three that ask ----------------------------------------------------------------------------------

# This address of the host is not a loopback address, and stands for an unnamed host.
OTHER = "0.0.0.0"


@asynccontextmanager
async def sends_away() -> AsyncIterator[tuple[str, list[str], asyncio.Event]]:
    """Run a lighthouse that redirects to another host; yield the requests that reached that host."""
    reached: list[str] = []
    asked = asyncio.Event()

    async def there(request: web.Request) -> web.StreamResponse:
        reached.append(request.headers.get("Authorization", ""))
        raise web.HTTPUnauthorized

    async def here(request: web.Request) -> web.StreamResponse:
        if asked.is_set():
            seen_twice.set()
        asked.set()
        raise web.HTTPTemporaryRedirect(f"http://{OTHER}:{ports[0]}{request.rel_url}")

    ports: list[int] = []
    seen_twice, runners = asyncio.Event(), []
    for answer in (there, here):
        app = web.Application()
        app.router.add_get("/{rest:.*}", answer)
        runners.append(runner := web.AppRunner(app))
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        ports.append(runner.addresses[0][1])
    try:
        async with asyncio.timeout(30):
            yield f"http://127.0.0.1:{ports[1]}", reached, seen_twice
    finally:
        for runner in runners:
            await runner.cleanup()


async def test_a_command_shows_no_token_to_an_unnamed_host():
    async with sends_away() as (url, reached, _):
        asking = Lighthouses((url,), "job", "secret")
        with pytest.raises(Unreachable, match="none of those given"):
            await asyncio.to_thread(asking.ask, asking.path())
        assert reached == []


async def test_a_trainer_shows_no_token_to_an_unnamed_host(tmp_path, monkeypatch):
    monkeypatch.setattr(lighthouse_link, "_BACKOFF_S", (0.001, 0.005))
    file = tmp_path / "token"
    file.touch(mode=0o600)
    file.write_text("secret\n")
    async with sends_away() as (url, reached, seen_twice):
        link = LighthouseLink(Settings(job="j", replica="r0", lighthouse=(url,), token_file=file))
        task = asyncio.create_task(link.run(lambda _: None, lambda _: None))
        await seen_twice.wait()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert reached == [] and link.url == url


async def test_a_checkpoint_server_shows_no_token_to_an_unnamed_host():
    async with sends_away() as (url, reached, seen_twice):
        settings = ServerSettings("j", "r0", Path(), lighthouse=(url,))
        sender = StatusSender(settings, "secret", None, None, None)  # type: ignore[arg-type]
        task = asyncio.create_task(sender.run())
        await seen_twice.wait()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert reached == []

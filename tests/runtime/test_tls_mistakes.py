"""The sentences for TLS settings that do not match those of a lighthouse."""

import asyncio
import ssl
from http.client import RemoteDisconnected

import pytest
from aiohttp import web
from authority import Authority, mixed

from fabric.client.control import lighthouse_link
from fabric.client.control.lighthouse_link import LighthouseLink
from fabric.errors import Unreachable
from fabric.runtime.config import Settings
from fabric.runtime.http.lighthouse_client import Lighthouses, describe, permanent_cause
from fabric.runtime.http.tls import Tls

NONE = Tls()


@pytest.fixture(scope="module")
def authority(tmp_path_factory) -> Authority:
    return Authority(tmp_path_factory.mktemp("tls") / "ca")


@pytest.fixture(scope="module")
def mine(authority) -> Tls:
    return authority.tls("mine")


@pytest.fixture(scope="module")
def stranger(tmp_path_factory) -> Tls:
    other = Authority(tmp_path_factory.mktemp("tls") / "other")
    return other.tls("stranger")


class TlsService:
    """Something that listens, with ``tls`` or without, and what a client of it hears."""

    def __init__(self, tls: Tls) -> None:
        self.tls = tls

    async def __aenter__(self) -> "TlsService":
        self.runner = web.AppRunner(web.Application())
        await self.runner.setup()
        await web.TCPSite(self.runner, "127.0.0.1", 0, ssl_context=self.tls.server_context()).start()
        self.address = f"127.0.0.1:{self.runner.addresses[0][1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.runner.cleanup()


def heard_by_a_command(service: Tls, scheme: str, tls: Tls) -> str:
    async def ask() -> str:
        async with TlsService(service) as there:
            asked = Lighthouses((f"{scheme}://{there.address}",), "", "", tls)
            with pytest.raises(Unreachable) as caught:
                await asked._ask("/v1/jobs", None)
        return str(caught.value)

    return asyncio.run(ask())


def heard_by_a_trainer(service: Tls, scheme: str, tls: Tls, autonomy_s: float) -> str:
    async def ask() -> str:
        async with TlsService(service) as there:
            return await refusal([f"{scheme}://{there.address}"], tls, autonomy_s)

    return asyncio.run(ask())


async def refusal(urls: list[str], tls: Tls, autonomy_s: float) -> str:
    refused: list[str] = []
    link = LighthouseLink(
        Settings(job="j", replica="r0", lighthouse=tuple(urls), autonomy_s=autonomy_s, tls=tls)
    )
    async with asyncio.timeout(60):
        await link.run(lambda _: None, refused.append)
    return refused[0]


def test_a_command_names_the_setting_that_it_lacks(mine, stranger):
    bare = heard_by_a_command(mine, "https", NONE)
    assert "not believed (self-signed certificate in certificate chain): give FABRIC_TLS" in bare
    assert "check the address" not in bare
    other = heard_by_a_command(mine, "https", mixed(mine, stranger))
    assert (
        "ca.crt in FABRIC_TLS must be the authority that issued it" in other
        and "check the address" not in other
    )
    plain = heard_by_a_command(mine, "http", NONE)
    assert "if it speaks TLS, write https:// and give FABRIC_TLS" in plain
    reverse = heard_by_a_command(NONE, "https", mine)
    assert "it does not speak TLS: write http://" in reverse and "check the address" not in reverse
    forged = heard_by_a_command(mine, "https", mixed(stranger, mine))
    assert "tls.crt in FABRIC_TLS is of its authority" in forged


def test_a_trainer_with_a_bad_certificate_ends_and_does_not_wait(mine):
    told = heard_by_a_trainer(mine, "https", NONE, 1e6)
    assert told.startswith("no lighthouse can be spoken to: https://") and "give FABRIC_TLS" in told
    assert "write http://" in heard_by_a_trainer(NONE, "https", mine, 1e6)


def test_a_trainer_that_is_hung_up_on_waits_and_says_for_what(mine, caplog, monkeypatch):
    monkeypatch.setattr(lighthouse_link, "_QUIET_S", 0.0)
    plain = heard_by_a_trainer(mine, "http", NONE, 0.0)
    assert plain.startswith("no lighthouse was found within 0 s") and "write https://" in plain
    said = [record.getMessage() for record in caplog.records]
    assert [
        line
        for line in said
        if line.startswith("fabric: r0: no lighthouse yet: http://") and "https://" in line
    ]


def test_one_wrong_address_of_several_ends_nothing(mine):
    async def ask() -> str:
        async with TlsService(mine) as wrong, TlsService(NONE) as right:
            return await refusal([f"https://{wrong.address}", f"http://{right.address}"], NONE, 1e6)

    assert "is not a lighthouse" in asyncio.run(ask()), "the second one was asked, and said so"


async def shown_by(service: TlsService, client: ssl.SSLContext) -> str:
    """Return the serial number of the certificate that the service shows now."""
    host, port = service.address.split(":")
    reader, writer = await asyncio.open_connection(host, int(port), ssl=client)
    serial = writer.get_extra_info("peercert")["serialNumber"]
    writer.write(b"GET / HTTP/1.0\r\n\r\n")
    assert (await reader.read(8)).startswith(b"HTTP"), "the service believes the client too"
    writer.close()
    return serial


def replace(authority: Authority, tls: Tls, days: int = 2) -> None:
    """Put new files in the place of those of ``tls``, the certificate first, as a renewal does."""
    for new, old in zip(authority.issue("renewed", days=days), tls.files[:2], strict=True):
        new.replace(old)


def test_renewed_files_are_read_by_services_and_clients(authority):
    renewed = authority.tls("in-place")
    other = authority.tls("other")

    async def look() -> None:
        mine, others = renewed.client_context(), other.client_context()
        async with TlsService(renewed) as here, TlsService(other) as there:
            first = await shown_by(here, others)
            replace(authority, renewed, days=0)
            for service, client in ((here, others), (there, mine)):
                with pytest.raises((OSError, AssertionError)):
                    await shown_by(service, client)
            replace(authority, renewed)
            assert await shown_by(here, others) != first
            await shown_by(there, mine)
            renewed.files[1].write_text("not a key")
            assert await shown_by(here, others) == await shown_by(here, mine), "the last good ones stay"
            renewed.files[0].unlink()
            await shown_by(here, mine)

    asyncio.run(look())


def test_an_expired_certificate_is_waited_for(authority, mine):
    old = authority.tls("old", days=0)
    assert "expired: renew tls.crt in its FABRIC_TLS; each process reads" in heard_by_a_command(
        old, "https", mine
    )
    waited = heard_by_a_trainer(old, "https", mine, 0.0)
    assert waited.startswith("no lighthouse was found within 0 s") and "has expired" in waited
    assert "is of its authority, and has not expired" in heard_by_a_command(mine, "https", old)


def test_other_errors_are_not_called_tls_mistakes():
    url = "http://127.0.0.1:1"
    for error in (ConnectionRefusedError(), OSError(113, "No route to host"), TimeoutError()):
        assert not permanent_cause(error, NONE) and "TLS" not in describe(error, url, NONE)
    hung_up = RemoteDisconnected("Remote end closed connection without response")
    assert not permanent_cause(hung_up, NONE) and "https://" in describe(hung_up, url, NONE), (
        "it may just have ended"
    )
    alert = ssl.SSLError(1, "[SSL: TLSV1_ALERT_UNKNOWN_CA] tlsv1 alert unknown ca (_ssl.c:1)")
    assert "FABRIC_TLS" in permanent_cause(alert, NONE)

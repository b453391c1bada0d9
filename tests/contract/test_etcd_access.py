"""Access to a real etcd: users and passwords, TLS, client certificates, and all refusals."""

from base64 import b64encode
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import aiohttp
import pytest
from authority import Authority
from etcd_process import EtcdMember, free_ports, require_etcd, running_etcd, wait_until
from store_harness import soon

from fabric.errors import ConfigError, StoreError, StoreUnavailable
from fabric.store import open_store
from fabric.store.base import Compare, Put
from fabric.store.etcd_http import EtcdAccess

pytestmark = pytest.mark.etcd


async def ask(member: EtcdMember, path: str, body: dict[str, object]) -> None:
    async with (
        aiohttp.ClientSession() as http,
        http.post(f"http://{member.address}/v3/auth/{path}", json=body) as answer,
    ):
        assert answer.status == 200, await answer.text()


async def enable_users(member: EtcdMember) -> None:
    """Create the user root for etcd, and the user ``fabric`` with rights to all keys below /fabric/ and
    /test/.
    """
    await ask(member, "user/add", {"name": "root", "password": "secret of root"})
    await ask(member, "user/grant", {"user": "root", "role": "root"})
    await ask(member, "user/add", {"name": "fabric", "password": "secret of fabric"})
    await ask(member, "role/add", {"name": "fabric"})
    for prefix in (b"/fabric/", b"/test/"):
        await ask(member, "role/grant", {"name": "fabric", "perm": permission(prefix)})
    await ask(member, "user/grant", {"user": "fabric", "role": "fabric"})
    await ask(member, "enable", {})


def permission(prefix: bytes) -> dict[str, object]:
    end = prefix[:-1] + bytes([prefix[-1] + 1])
    return {
        "permType": "READWRITE",
        "key": b64encode(prefix).decode(),
        "range_end": b64encode(end).decode(),
    }


def user(folder: Path, password: str = "secret of fabric") -> EtcdAccess:
    file = folder / "password"
    file.write_text(password + "\n")
    return EtcdAccess(user="fabric", password_file=file)


async def test_a_user_with_a_password_is_let_in_and_its_token_is_renewed(tmp_path: Path) -> None:
    with running_etcd(tmp_path) as member:
        await enable_users(member)
        store = open_store(member.url, access=user(tmp_path))
        await store.connect()
        lease = await store.grant_lease(60)
        assert await store.commit([Compare("/test/a", create_revision=0)], [Put("/test/a", b"1", lease.id)])
        # etcd keeps tokens in memory, so a restarted etcd knows none of the old tokens.
        member.stop()
        member.start()
        assert await store.commit([], [Put("/test/b", b"2")]), "a write with an old token is made again"
        assert await store.keep_alive(lease.id) == lease.ttl_s
        await store.close()


async def test_a_missing_permission_is_a_refusal_and_not_a_loop(tmp_path: Path) -> None:
    with running_etcd(tmp_path) as member:
        await enable_users(member)
        store = open_store(member.url, access=user(tmp_path))
        await store.connect()
        with pytest.raises(StoreError, match="permission denied"):
            await soon(store.commit([], [Put("/other/a", b"1")]))
        await store.close()


async def test_a_wrong_password_is_one_sentence_and_a_corrected_file_is_enough(tmp_path: Path) -> None:
    with running_etcd(tmp_path) as member:
        await enable_users(member)
        store = open_store(member.url, access=user(tmp_path, "wrong"))
        with pytest.raises(StoreError, match="refused the user 'fabric'") as caught:
            await soon(store.connect())
        assert "wrong" not in str(caught.value)
        user(tmp_path)
        await soon(store.connect())
        await store.close()


async def test_without_a_user_a_guarded_etcd_refuses(tmp_path: Path) -> None:
    with running_etcd(tmp_path) as member:
        await enable_users(member)
        with pytest.raises(StoreError):
            await soon(open_store(member.url).connect())


async def test_a_user_for_an_etcd_without_users_is_refused_with_a_sentence(
    etcd_url: str, tmp_path: Path
) -> None:
    with pytest.raises(StoreError, match="authentication is not enabled"):
        await soon(open_store(etcd_url, access=user(tmp_path)).connect())


@contextmanager
def tls_etcd(folder: Path, authority: Authority, *, wants_certificates: bool) -> Iterator[EtcdMember]:
    require_etcd()
    cert, key = authority.issue("server")
    extra = ["--cert-file", str(cert), "--key-file", str(key)]
    if wants_certificates:
        extra += ["--client-cert-auth", "--trusted-ca-file", str(authority.ca)]
    ports = free_ports(2)
    member = EtcdMember(folder / "tls", *ports, extra=tuple(extra), tls=True)
    try:
        member.launch()
        wait_until(member.is_healthy, "etcd to listen")
        yield member
    finally:
        member.stop()


async def connects(url: str, access: EtcdAccess) -> None:
    """Connect and write; wait while etcd listens but has no leader."""
    store = open_store(url, access=access, attempt_timeout_s=5.0)
    try:
        await store.connect()
        assert await store.commit([], [Put("/test/tls", b"1")])
    finally:
        await store.close()


async def until_ready(url: str, access: EtcdAccess) -> None:
    """Wait, because etcd listens a moment before it has elected a leader."""
    for _ in range(200):
        try:
            return await connects(url, access)
        except StoreUnavailable as error:
            if "no leader" not in str(error) and "not ready" not in str(error):
                raise
    pytest.fail("etcd elected no leader")


async def test_tls_with_our_own_authority(tmp_path: Path) -> None:
    authority = Authority(tmp_path / "ca")
    with tls_etcd(tmp_path, authority, wants_certificates=False) as member:
        url = f"etcds://{member.address}"
        await until_ready(url, EtcdAccess(ca_file=authority.ca))
        with pytest.raises(StoreUnavailable, match="certificate verify failed"):
            await connects(url, EtcdAccess())
        with pytest.raises(StoreError):
            await connects(f"etcd://{member.address}", EtcdAccess())


async def test_mutual_tls(tmp_path: Path) -> None:
    authority = Authority(tmp_path / "ca")
    with tls_etcd(tmp_path, authority, wants_certificates=True) as member:
        url = f"etcds://{member.address}"
        cert, key = authority.issue("lighthouse")
        await until_ready(url, EtcdAccess(ca_file=authority.ca, cert_file=cert, key_file=key))
        with pytest.raises(StoreError):
            await connects(url, EtcdAccess(ca_file=authority.ca))
        stranger = Authority(tmp_path / "other")
        other_cert, other_key = stranger.issue("lighthouse")
        with pytest.raises(StoreError):
            await connects(url, EtcdAccess(ca_file=authority.ca, cert_file=other_cert, key_file=other_key))


def test_objects_that_do_not_fit_are_refused_before_any_is_changed(tmp_path: Path) -> None:
    password = tmp_path / "password"
    password.write_text("x")
    empty = tmp_path / "empty"
    empty.write_text("")
    for url, access, sentence in (
        ("etcd://a:1", EtcdAccess(ca_file=password), "without TLS"),
        ("etcds://a:1", EtcdAccess(cert_file=password), "give both"),
        ("etcds://a:1", EtcdAccess(ca_file=password), "cannot be used"),
        ("etcds://a:1", EtcdAccess(ca_file=tmp_path / "missing"), "cannot be used"),
        ("etcd://a:1", EtcdAccess(user="x"), "give both"),
        ("etcd://a:1", EtcdAccess(password_file=password), "give both"),
        ("etcd://a:1", EtcdAccess(user="x", password_file=tmp_path / "missing"), "cannot be read"),
        ("etcd://a:1", EtcdAccess(user="x", password_file=empty), "is empty"),
        ("sqlite:///tmp/x.db", EtcdAccess(user="x", password_file=password), "leave them out"),
    ):
        with pytest.raises(ConfigError, match=sentence):
            open_store(url, access=access)

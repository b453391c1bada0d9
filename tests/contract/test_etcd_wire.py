"""Answers that no real etcd sends: of a broken endpoint, or of another program."""

import base64
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import msgspec
import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from fabric.errors import LeaseGone, StoreError, StoreIndefinite, StoreUnavailable
from fabric.store import etcd_http, open_store
from fabric.store.base import Compare, Delete, Put, Store

Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]

HEADER = {"cluster_id": "7", "member_id": "1", "revision": "5", "raft_term": "2"}
STORE_ID = base64.b64encode(b"0123456789abcdef").decode()
STORE_ID_KEY = base64.b64encode(b"/fabric/store-id").decode()
FOUND_ID = {"kvs": [{"key": STORE_ID_KEY, "value": STORE_ID, "create_revision": "2", "mod_revision": "2"}]}


@asynccontextmanager
async def posing(answers: dict[str, object]) -> AsyncIterator[Store]:
    """A store that is connected to a server which gives these answers by path.

    An answer is a value for JSON, a (status, text), or a coroutine function of the request.
    """

    async def serve(request: web.Request) -> web.StreamResponse:
        answer = answers.get(request.path, "unexpected")
        if callable(answer):
            response = await answer(request)
            assert isinstance(response, web.StreamResponse)
            return response
        if isinstance(answer, tuple):
            return web.Response(status=answer[0], text=answer[1])
        return web.json_response(answer)

    answers.setdefault("/v3/maintenance/status", {"header": HEADER, "version": "3.5.21"})
    answers.setdefault("/v3/kv/range", {"header": HEADER, **FOUND_ID})
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", serve)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    store = open_store(f"etcd://127.0.0.1:{port}", attempt_timeout_s=2.0)
    try:
        await store.connect()
        yield store
    finally:
        await store.close()
        await runner.cleanup()


COMMIT = "/v3/kv/txn"


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        ((500, "Internal Server Error"), StoreIndefinite),
        ((502, "<html>bad gateway</html>"), StoreIndefinite),
        ((503, json.dumps({"code": 14, "message": "etcdserver: request timed out"})), StoreIndefinite),
        ((503, json.dumps({"code": 14, "message": "transport is closing"})), StoreIndefinite),
        ((504, json.dumps({"code": 4, "message": "context deadline exceeded"})), StoreIndefinite),
        ((503, json.dumps({"code": 14, "message": "etcdserver: no leader"})), StoreUnavailable),
        ((400, json.dumps({"code": 3, "message": "etcdserver: too many operations"})), StoreError),
        ((429, json.dumps({"code": 8, "message": "etcdserver: too many requests"})), StoreError),
        ((401, json.dumps({"code": 16, "message": "etcdserver: invalid auth token"})), StoreError),
        ((403, json.dumps({"code": 7, "message": "etcdserver: permission denied"})), StoreError),
        ((404, json.dumps({"code": 5, "message": "etcdserver: requested lease not found"})), LeaseGone),
        ((500, json.dumps({"code": "3", "message": "a code that is no number"})), StoreIndefinite),
        ((302, "elsewhere"), StoreIndefinite),
        ((200, "not json"), StoreIndefinite),
        ((200, "[" * 100_000), StoreIndefinite),
        ((200, "[]"), StoreIndefinite),
        ((200, '{"header": 5, "succeeded": true}'), StoreIndefinite),
        ((200, '{"header": {"revision": "many"}, "succeeded": true}'), StoreIndefinite),
        ((200, '{"header": {"cluster_id": "8", "revision": "6"}, "succeeded": true}'), StoreError),
    ],
)
async def test_a_transaction_is_definite_or_indefinite(
    answer: tuple[int, str], error: type[StoreError]
) -> None:
    async with posing({COMMIT: answer}) as store:
        with pytest.raises(StoreError) as caught:
            await store.commit([Compare("/a", create_revision=0)], [Put("/a", b"1", lease=3)])
        assert type(caught.value) is error
        assert "\n" not in str(caught.value)


async def test_an_answer_without_bound_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(etcd_http, "MAX_ANSWER_BYTES", 1 << 20)
    sent = 0

    async def flood(request: web.Request) -> web.StreamResponse:
        nonlocal sent
        response = web.StreamResponse()
        await response.prepare(request)
        try:
            while True:
                await response.write(b"[" * 65_536)
                sent += 65_536
        except ConnectionError:
            return response

    async with posing({COMMIT: flood, "/v3/lease/grant": flood}) as store:
        with pytest.raises(StoreIndefinite, match="more than 1048576 bytes"):
            await store.commit([], [Put("/a", b"1")])
        with pytest.raises(StoreIndefinite, match="more than 1048576 bytes"):
            await store.grant_lease(5)
        assert sent < 100 << 20


@pytest.mark.parametrize(
    "answer",
    [
        {"header": HEADER, "kvs": {}},
        {"header": HEADER, "kvs": ["x"]},
        {"header": HEADER, "kvs": [{"key": "***", "value": ""}]},
        {"header": HEADER, "kvs": [{"key": "YQ==", "value": 5}]},
        {"header": HEADER, "kvs": [{"key": "YQ==", "mod_revision": "1.5"}]},
        {"header": HEADER, "kvs": [{"key": "YQ==", "mod_revision": True}]},
        {"header": HEADER, "kvs": [{"key": "YQ==", "mod_revision": 1 << 63}]},
        {"header": HEADER, "kvs": [{"key": "YQ==", "mod_revision": "9" * 5000}]},
        {"header": [], "kvs": []},
        (404, "404 page not found"),
        (200, ""),
    ],
)
async def test_a_malformed_answer_to_a_read_is_an_error(answer: object) -> None:
    answers: dict[str, object] = {}
    async with posing(answers) as store:
        answers["/v3/kv/range"] = answer
        with pytest.raises(StoreError) as caught:
            await store.get("/a")
        assert not isinstance(caught.value, StoreIndefinite)


@pytest.mark.parametrize("status", [(404, "404 page not found"), (200, "<html>welcome</html>")])
async def test_a_server_that_is_no_etcd_is_one_sentence(status: tuple[int, str]) -> None:
    with pytest.raises(StoreUnavailable, match="make sure that"):
        async with posing({"/v3/maintenance/status": status}):
            pass


async def test_a_store_that_went_back_in_time_is_an_error() -> None:
    answers: dict[str, object] = {}
    async with posing(answers) as store:
        assert (await store.list("/fabric"))[1] == 5
        answers["/v3/kv/range"] = {"header": {**HEADER, "revision": "4"}}
        with pytest.raises(StoreError, match="went back from revision 5 to 4"):
            await store.get("/a")


async def test_a_renewal_that_fails_in_its_stream_is_not_a_lease_that_ended() -> None:
    error = {"error": {"grpc_code": 14, "http_code": 503, "message": "etcdserver: no leader"}}
    async with posing({"/v3/lease/keepalive": error}) as store:
        with pytest.raises(StoreUnavailable, match="no leader"):
            await store.keep_alive(5)


@pytest.mark.parametrize("answer", [{"result": {"header": HEADER, "ID": "5"}}, {"header": HEADER}])
async def test_a_renewal_without_a_ttl_is_a_lease_that_ended(answer: object) -> None:
    async with posing({"/v3/lease/keepalive": answer}) as store:
        with pytest.raises(LeaseGone):
            await store.keep_alive(5)


@pytest.mark.parametrize(
    ("version", "sentence"),
    [
        ("3.3.27", "too old"),
        ("2.3.8", "too old"),
        ("3.4.23", "no longer gets fixes"),
        ("3.5.0", "lose committed data"),
        ("3.5.2", "lose committed data"),
        ("3.5.2-rc.1", "lose committed data"),
        ("3.5.3", None),
        ("3.5.21", None),
        ("3.6.0", None),
        ("4.0.0", None),
        ("", "does not say"),
        ("new", "does not say"),
        (None, "does not say"),
        (3, "does not say"),
    ],
)
def test_releases_of_etcd_below_the_supported_version_are_warned_about(
    version: object, sentence: str | None
) -> None:
    warning = etcd_http.version_warning(version)
    assert warning is None if sentence is None else sentence in (warning or "")


def test_zero_fields_and_strings_of_integers() -> None:
    answer = etcd_http.parse(b'{"header": {"revision": "9223372036854775807"}, "kvs": [{"key": "YQ=="}]}')
    assert answer.header.revision == (1 << 63) - 1
    [found] = answer.key_values
    assert (found.key, found.value, found.create_revision, found.lease) == ("a", b"", 0, 0)


def test_a_key_that_is_no_text_is_still_a_key() -> None:
    body = json.dumps({"kvs": [{"key": base64.b64encode(b"a\xff").decode()}]})
    [found] = etcd_http.parse(body.encode()).key_values
    assert found.key.encode("utf-8", "surrogateescape") == b"a\xff"


def test_a_transaction_names_its_guards_and_the_store() -> None:
    made = etcd_http.transaction_request([Compare("a", 0, 7)], [Put("b", b"1", 5), Delete("c")], "id")
    request = json.loads(msgspec.json.encode(made))
    assert request["compare"] == [
        {"key": "YQ==", "target": "CREATE", "result": "EQUAL", "create_revision": "0"},
        {"key": "YQ==", "target": "MOD", "result": "EQUAL", "mod_revision": "7"},
        {"key": STORE_ID_KEY, "target": "VALUE", "result": "EQUAL", "value": "aWQ="},
    ]
    assert request["success"] == [
        {"request_put": {"key": "Yg==", "value": "MQ==", "lease": "5"}},
        {"request_delete_range": {"key": "Yw=="}},
    ]


Nested = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["header", "kvs", "kv", "events", "key", "revision"]), inner, max_size=4
        )
    ),
    max_leaves=12,
)


@given(Nested)
def test_no_malformed_answer_of_etcd_is_accepted(anything: object) -> None:
    """Whatever the JSON, the answer is a value or a StoreError, never another exception."""
    try:
        answer = etcd_http.parse(json.dumps(anything).encode())
    except StoreError:
        return
    assert answer.key_values is not None and answer.failed_store_id in (None, b"")


@given(st.integers(100, 599), st.binary(max_size=200))
def test_any_error_body_is_a_failure(status: int, body: bytes) -> None:
    found = etcd_http.failure(status, body)
    assert found.text
    assert not found.is_definite or found.code is not None or found.is_no_leader

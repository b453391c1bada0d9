"""Pages in a browser on the host cannot use a service without a token."""

import json

import aiohttp
import pytest
from aiohttp import web

from fabric.runtime.http.http_service import errors_as_json, host_of, pages_kept_out, serve


@pytest.fixture
async def service():
    """Run a service; yield its URL and the requests that reached it."""
    heard: list[str] = []

    async def answer(request: web.Request) -> web.StreamResponse:
        heard.append(request.path)
        if request.path == "/socket":
            socket = web.WebSocketResponse()
            await socket.prepare(request)
            await socket.close()
            return socket
        return web.json_response({})

    app = web.Application(middlewares=[errors_as_json, pages_kept_out(("http://lh.example:8600", "0.0.0.0"))])
    app.router.add_route("*", "/{path:.*}", answer)
    runner, port = await serve(app, "127.0.0.1", 0)
    yield f"http://127.0.0.1:{port}", heard
    await runner.cleanup()


async def status(http, url, method="GET", body=None, **headers) -> int:
    sent = {name.replace("_", "-"): value for name, value in headers.items()}
    async with http.request(method, url, data=body, headers=sent) as answer:
        text = await answer.read()
        assert answer.status == 200 or json.loads(text)["error"]
        return answer.status


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example", "[::ffff", "", "10.0.0.1"]
)
async def test_a_request_under_a_rebound_dns_name_is_refused(service, host):
    url, heard = service
    async with aiohttp.ClientSession() as http:
        assert await status(http, url + "/v1/jobs", Host=host) in (400, 403)
    assert not heard


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "localhost:8600", "[::1]:8600", "LH.example", "127.9.9.9", "x.localhost"]
)
async def test_loopback_and_the_advertised_name_are_answered(service, host):
    url, heard = service
    async with aiohttp.ClientSession() as http:
        assert await status(http, url + "/v1/jobs", Host=host) == 200
    assert heard


@pytest.mark.parametrize("origin", ["http://evil.example", "https://127.0.0.1:1", "null", ""])
async def test_a_page_of_another_site_can_do_nothing(service, origin):
    url, heard = service
    async with aiohttp.ClientSession() as http:
        json_kind = {"Content_Type": "application/json"}
        assert await status(http, url + "/v1/jobs/j/evict", "POST", "{}", Origin=origin, **json_kind) == 403
        assert await status(http, url + "/v1/jobs", Origin=origin) == 403
        with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
            await http.ws_connect(url + "/socket", headers={"Origin": origin})
        assert refused.value.status == 403
    assert not heard


@pytest.mark.parametrize(
    "kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"]
)
async def test_a_body_of_a_kind_that_a_form_can_send_is_refused(service, kind):
    url, heard = service
    async with aiohttp.ClientSession() as http:
        assert await status(http, url + "/v1/jobs/j/evict", "POST", "{}", Content_Type=kind) == 400
        assert not heard
        assert (
            await status(http, url + "/x", "POST", "{}", Content_Type="application/json; charset=utf-8")
            == 200
        )
        assert await status(http, url + "/x", Origin=url) == 200, "the service's own page"
    assert heard == ["/x", "/x"]


def test_hosts_of_urls():
    cases = {"http://A.example:1/x": "a.example", "[::1]:8600": "::1", "h.": "h", "": "", "http://[": ""}
    assert {text: host_of(text) for text in cases} == cases

"""The page's login is valid for a limited time and in the page alone, and guesses of tokens are slowed."""

import asyncio
import logging
import time

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer, make_mocked_request
from in_process import TroubledStore, lighthouse_on
from memory_store import MemorySpace

from fabric.lighthouse.http import dashboard
from fabric.lighthouse.http.tokens import MOST_FAILURES, MOST_WAITING, WITHIN_S, Tokens, TokenTries

TOKENS = Tokens("own")


def scope(expires: float, path: str = "/v1/jobs", scheme: str = "Page"):
    stamp = str(int(expires))
    login = f"{stamp}.{dashboard._proof(stamp, '', 'own')}."
    request = make_mocked_request("GET", path, headers={"Authorization": f"{scheme} {login}"})
    return dashboard.scope_of_login(request, TOKENS)


def test_a_login_is_good_until_it_ends():
    assert scope(time.time() + 60) is None
    assert scope(time.time() + dashboard.LOGIN_S) is None
    assert scope(time.time() - 5) is False
    assert scope(time.time() + 60, scheme="Bearer") is False


def test_a_login_that_was_made_under_a_wrong_clock_is_not_good_for_years():
    assert scope(time.time() + 10 * 365 * 86400) is False


def test_a_login_opens_no_sockets_of_processes():
    for path in ("/v1/jobs/gpt/session", "/v1/jobs/gpt/trainer-status"):
        assert scope(time.time() + 60, path) is False
    assert scope(time.time() + 60, "/v1/jobs/gpt/live") is None


async def test_another_port_of_the_host_gets_no_login(http):
    """A cookie goes to every port of its host, so a neighbour's server once got the operator's rights."""
    seen = []

    async def note(request: web.Request) -> web.Response:
        seen.append({name: request.headers.get(name) for name in ("Cookie", "Authorization")})
        return web.Response()

    neighbour = web.Application()
    neighbour.router.add_get("/", note)
    async with (
        lighthouse_on(TroubledStore(MemorySpace()), lease_s=60, tokens=Tokens("own")) as lighthouse,
        aiohttp.ClientSession(cookie_jar=aiohttp.CookieJar(unsafe=True)) as browser,
        TestServer(neighbour) as server,
    ):
        async with browser.post(f"{lighthouse.url}/login", json={"token": "own"}) as answer:
            login = (await answer.json())["page"]
            assert "Set-Cookie" not in answer.headers
        async with browser.get(server.make_url("/")):
            assert seen == [{"Cookie": None, "Authorization": None}]
        assert await status_of(browser, lighthouse.url, f"Page {login}") == 200
        assert await status_of(browser, lighthouse.url, f"Bearer {login}") == 401
        assert await status_of(browser, lighthouse.url, None) == 401


@pytest.mark.parametrize(
    "kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"]
)
async def test_a_form_of_another_site_sends_no_login(http, kind):
    async with lighthouse_on(TroubledStore(MemorySpace()), lease_s=60, tokens=Tokens("own")) as lighthouse:
        url, sent = f"{lighthouse.url}/login", {"Origin": "http://evil.example", "Content-Type": kind}
        async with http.post(url, data='{"token": "own", "x": "="}', headers=sent) as answer:
            assert answer.status == 400
        # A script of another site has to ask before it sends JSON, and is answered without a permission.
        asked = {"Origin": "http://evil.example", "Access-Control-Request-Method": "POST"}
        async with http.options(url, headers=asked) as answer:
            assert not any(name.startswith("Access-Control") for name in answer.headers)


async def status_of(http: aiohttp.ClientSession, url: str, authorization: str | None) -> int:
    headers = {"Authorization": authorization} if authorization else {}
    async with http.get(f"{url}/v1/jobs", headers=headers) as answer:
        return answer.status


async def test_the_tokens_of_a_guessing_address_wait_and_only_a_few_at_a_time(caplog):
    now = [0.0]
    tries = TokenTries(lambda: now[0], pause_s=60.0)
    for _ in range(MOST_FAILURES):
        await tries.pause("a")
        tries.failed("a")
    waiting = [asyncio.ensure_future(tries.pause("a")) for _ in range(MOST_WAITING)]
    await asyncio.sleep(0)
    assert not any(pause.done() for pause in waiting)
    with pytest.raises(web.HTTPTooManyRequests):
        await tries.pause("a")
    await tries.pause("b")
    now[0] += WITHIN_S
    await tries.pause("a")
    for pause in waiting:
        pause.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    assert not tries._waiting
    told = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert told == ["a wrong token came from a", "20 wrong tokens came from a: its tokens wait from now on"]


def test_addresses_are_forgotten_before_they_cost_memory():
    tries = TokenTries()
    for i in range(10_000):
        tries.failed(str(i))
    assert len(tries._failures) < 5000


@pytest.mark.parametrize("path", ["/login", "/v1/jobs"])
async def test_a_guesser_is_slowed_and_locks_out_no_right_token(http, path, monkeypatch):
    """Guesses by a header had no limit, and the login refused a right token after 20 guesses."""
    paused = []
    pause = TokenTries.pause

    async def noted(tries: TokenTries, address: str) -> None:
        paused.append(len(tries._failures.get(address, ())) >= MOST_FAILURES)
        tries._pause_s = 0.0
        await pause(tries, address)

    monkeypatch.setattr(TokenTries, "pause", noted)
    async with lighthouse_on(TroubledStore(MemorySpace()), lease_s=60, tokens=Tokens("own")) as lighthouse:

        async def tried(token: str) -> int:
            if path == "/login":
                async with http.post(f"{lighthouse.url}/login", json={"token": token}) as answer:
                    return answer.status
            return await status_of(http, lighthouse.url, f"Bearer {token}")

        assert [await tried(f"guess {i}") for i in range(MOST_FAILURES + 1)] == [401] * (MOST_FAILURES + 1)
        assert await tried("own") == 200
        assert paused == [False] * MOST_FAILURES + [True] * 2

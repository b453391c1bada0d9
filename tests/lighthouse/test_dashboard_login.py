"""The page's login cookie is valid for a limited time and for the page alone, and the login limits
guesses.
"""

import time

import pytest
from aiohttp.test_utils import make_mocked_request
from in_process import TroubledStore, lighthouse_on
from memory_store import MemorySpace

from fabric.lighthouse.http import dashboard
from fabric.lighthouse.http.login_limit import MOST_FAILURES, WITHIN_S, LoginTries, TooManyTries
from fabric.lighthouse.http.tokens import Tokens

TOKENS = Tokens("own")


def scope(expires: float, path: str = "/v1/jobs", **headers: str):
    stamp = str(int(expires))
    cookie = f"{dashboard.COOKIE}={stamp}.{dashboard._proof(stamp, '', 'own')}."
    request = make_mocked_request("GET", path, headers={"Host": "lh:8600", "Cookie": cookie, **headers})
    return dashboard.scope_of_cookie(request, TOKENS)


def test_a_cookie_is_good_until_it_ends():
    assert scope(time.time() + 60) is None
    assert scope(time.time() + dashboard.COOKIE_S) is None
    assert scope(time.time() - 5) is False


def test_a_cookie_that_was_made_under_a_wrong_clock_is_not_good_for_years():
    assert scope(time.time() + 10 * 365 * 86400) is False


def test_a_cookie_opens_no_sockets_of_processes():
    for path in ("/v1/jobs/gpt/session", "/v1/jobs/gpt/trainer-status"):
        assert scope(time.time() + 60, path) is False
    assert scope(time.time() + 60, "/v1/jobs/gpt/live") is None


@pytest.mark.parametrize(
    ("origin", "opens"),
    [("http://lh:8600", True), ("https://lh:8600", True), ("http://evil:8600", False), ("null", False)],
)
def test_a_cookie_is_accepted_from_the_lighthouses_own_page_only(origin, opens):
    assert scope(time.time() + 60, Origin=origin) is (None if opens else False)


def test_an_address_may_try_a_bounded_number_of_wrong_tokens():
    now = [0.0]
    tries = LoginTries(lambda: now[0])
    for _ in range(MOST_FAILURES):
        tries.check("a")
        tries.failed("a")
    with pytest.raises(TooManyTries, match="wait 60 s"):
        tries.check("a")
    tries.check("b")
    now[0] += WITHIN_S
    tries.check("a")


def test_addresses_are_forgotten_before_they_cost_memory():
    tries = LoginTries()
    for i in range(10_000):
        tries.failed(str(i))
    assert len(tries._failures) < 5000


async def test_the_login_answers_429_after_too_many_guesses(http):
    async with lighthouse_on(TroubledStore(MemorySpace()), lease_s=60, tokens=Tokens("own")) as lighthouse:
        for status in [401] * MOST_FAILURES + [429]:
            async with http.post(f"{lighthouse.url}/login", json={"token": "guess"}) as answer:
                assert answer.status == status
        async with http.post(f"{lighthouse.url}/login", json={"token": "own"}) as answer:
            assert answer.status == 429 and "Retry-After" in answer.headers

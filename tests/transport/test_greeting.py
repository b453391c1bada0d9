"""The handshake accepts only a peer with the token, and no answer can be used twice."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fabric.errors import FabricError, ProtocolError, Refused, Unauthorized
from fabric.transport.greeting import (
    CHALLENGE_BYTES,
    WIRE,
    Greeting,
    accept_frame,
    hello_frame,
    random_bytes,
    read_challenge,
    read_hello,
    read_verdict,
    refuse_frame,
)

GREETING = Greeting("job", "store", "replica-1", 7, "data", epoch=3)
TOKEN = b"secret"


def test_both_sides_pass_with_one_token():
    challenge = read_challenge(WIRE + random_bytes())
    hello = hello_frame(GREETING, challenge, random_bytes(), TOKEN)
    assert read_hello(hello, challenge, TOKEN) == GREETING
    read_verdict(accept_frame(challenge, hello, TOKEN), challenge, hello, TOKEN)


@pytest.mark.parametrize(("dialler", "acceptor"), [(b"", b"x"), (b"x", b""), (b"x", b"y")])
def test_another_token_is_refused_on_both_sides(dialler: bytes, acceptor: bytes):
    challenge = random_bytes()
    hello = hello_frame(GREETING, challenge, random_bytes(), dialler)
    with pytest.raises(Unauthorized, match="token") as refused:
        read_hello(hello, challenge, acceptor)
    with pytest.raises(Unauthorized, match="token"):
        read_verdict(refuse_frame(refused.value), challenge, hello, dialler)
    with pytest.raises(Unauthorized, match="acceptor does not hold"):
        read_verdict(accept_frame(challenge, hello, acceptor), challenge, hello, dialler)


def test_a_recorded_greeting_does_not_answer_another_challenge():
    hello = hello_frame(GREETING, random_bytes(), random_bytes(), TOKEN)
    with pytest.raises(Unauthorized):
        read_hello(hello, random_bytes(), TOKEN)


def test_a_recorded_verdict_does_not_answer_another_nonce():
    challenge = random_bytes()
    old = hello_frame(GREETING, challenge, random_bytes(), TOKEN)
    new = hello_frame(GREETING, challenge, random_bytes(), TOKEN)
    with pytest.raises(Unauthorized):
        read_verdict(accept_frame(challenge, old, TOKEN), challenge, new, TOKEN)


def test_a_dialler_cannot_reflect_its_own_proof_as_a_verdict():
    challenge = random_bytes()
    hello = hello_frame(GREETING, challenge, random_bytes(), TOKEN)
    proof = hello[CHALLENGE_BYTES : CHALLENGE_BYTES + 32]
    with pytest.raises(Unauthorized):
        read_verdict(b"+" + proof, challenge, hello, TOKEN)


def greeting_with(**changes: object) -> bytes:
    """Return a correctly signed hello whose JSON is no valid Greeting."""
    challenge = b"c" * CHALLENGE_BYTES
    from fabric.transport import greeting as module

    body = {**{f: getattr(GREETING, f) for f in GREETING.__slots__}, **changes}
    raw = json.dumps({k: v for k, v in body.items() if v is not None}).encode()
    nonce = b"n" * CHALLENGE_BYTES
    return nonce + module._proof(TOKEN, b"dial", challenge, nonce, raw) + raw


@pytest.mark.parametrize(
    "changes",
    [
        {"kind": "root"},
        {"kind": None},
        {"job": 5},
        {"epoch": "3"},
        {"epoch": 2**70},
        {"protocol": 99},
        {"protocol": None},
        {"replica": "r" * 300},
        {"connections": 0},
        {"connections": 17},
        {"connection": -1},
        {"connection": 4, "connections": 4},
    ],
)
def test_a_signed_greeting_is_still_checked(changes: dict[str, object]):
    with pytest.raises(ProtocolError):
        read_hello(greeting_with(**changes), b"c" * CHALLENGE_BYTES, TOKEN)


def test_unknown_fields_of_a_newer_release_are_ignored():
    assert read_hello(greeting_with(colour="red"), b"c" * CHALLENGE_BYTES, TOKEN) == GREETING


def test_a_refusal_arrives_as_its_sentence():
    with pytest.raises(Refused, match="replica-1 is not in epoch 3"):
        read_verdict(refuse_frame(Refused("replica-1 is not in epoch 3")), b"", b"", TOKEN)


def test_a_refusal_is_bounded_and_printable():
    with pytest.raises(Refused) as refused:
        read_verdict(b"-\x1b[2J" + b"x" * 4000, b"", b"", TOKEN)
    assert str(refused.value).isprintable()
    assert len(str(refused.value)) <= 400


@given(st.binary(max_size=200))
def test_random_bytes_are_refused_by_every_reader(data: bytes):
    challenge = b"c" * CHALLENGE_BYTES
    for read in (
        lambda: read_challenge(data),
        lambda: read_hello(data, challenge, TOKEN),
        lambda: read_verdict(data, challenge, b"hello", TOKEN),
    ):
        with pytest.raises(FabricError):
            read()


def test_a_greeting_that_would_not_fit_is_refused_before_it_is_sent():
    huge = Greeting("j" * 5000, "", "replica-1", 1, "control")
    with pytest.raises(ProtocolError, match="shorter"):
        hello_frame(huge, random_bytes(), random_bytes(), TOKEN)

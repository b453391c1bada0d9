"""The greeting of a dialler, and the proof that both sides hold the job's token: bytes only, no sockets.

The acceptor opens with its wire version and a random challenge. The dialler answers with a nonce of its
own, an HMAC-SHA256 keyed by the token, and its greeting in JSON. The acceptor replies with an HMAC over these
messages, or with one sentence that gives the reason of its refusal. The token itself never travels, and
neither side's proof can be replayed. A dialler that has reached the wrong process (a reused port) notices it
here. With an empty token every process that reaches the port passes. Nothing is encrypted.
"""

import hashlib
import hmac
import json
import secrets
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass

from fabric.errors import ProtocolError, Refused, Unauthorized, Unconnected
from fabric.model import PROTOCOL_VERSION, Int64, printable
from fabric.protocol.messages.wire import check_version, decode_as

# Version of the handshake itself, which is read before any greeting.
WIRE = b"fabric-link/1\n"
CHALLENGE_BYTES = 32
PROOF_BYTES = hashlib.sha256().digest_size
MAX_HANDSHAKE_BYTES = 4096
MAX_REFUSAL_CHARACTERS = 400
_ACCEPTED, _REFUSED, _BAD_TOKEN, _LEADS_BACK = b"+", b"-", b"!", b"@"
# The most connections of one ring link.
MOST_CONNECTIONS = 16
# Longer names could make a greeting exceed the size limit of the handshake.
MAX_NAME_CHARACTERS = 256


@dataclass(frozen=True, slots=True)
class Greeting:
    """A dialler's description of itself; ``to``: the replica that it wants to reach, empty for any.

    ``kind`` is ``control`` for an ordered message link, ``data`` for a ring link of ``epoch``, ``rank`` for
    the link of rank ``rank`` to rank ``to_rank`` of its own replica, ``probe`` for a connection that ends
    after one large message each way. Data links join equal ranks of two replicas, or two ranks of ``lane``,
    where ``to_rank`` is the dialled rank. A data link has ``connections``, this one is number ``connection``.
    ``collective`` is a ring link of collectives between replicas: ``lane`` has the number of their group,
    ``epoch`` the attempt. ``echo`` is a connection that is measured and ends.
    """

    job: str
    store_id: str
    replica: str
    incarnation: Int64
    kind: str
    epoch: Int64 = 0
    protocol: Int64 = PROTOCOL_VERSION
    to: str = ""
    rank: Int64 = 0
    lane: Int64 = 0
    to_rank: Int64 = -1  # -1: the dialler's own rank
    connection: Int64 = 0
    connections: Int64 = 1


def read_challenge(payload: bytes) -> bytes:
    """Return the challenge in the acceptor's first frame; raises ProtocolError if it is not one of ours."""
    if not payload.startswith(WIRE) or len(payload) != len(WIRE) + CHALLENGE_BYTES:
        raise ProtocolError(
            "the address does not answer as a fabric link of this version: "
            "check the address, and that both sides run the same release"
        )
    return payload[len(WIRE) :]


def hello_frame(greeting: Greeting, challenge: bytes, nonce: bytes, token: bytes) -> bytes:
    """Return the dialler's answer to ``challenge``."""
    body = json.dumps(asdict(greeting), separators=(",", ":")).encode()
    hello = nonce + _proof(token, b"dial", challenge, nonce, body) + body
    if len(hello) > MAX_HANDSHAKE_BYTES:
        raise ProtocolError(
            f"the greeting of {greeting.replica[:40]!r} is over {MAX_HANDSHAKE_BYTES} bytes: "
            "use shorter job and replica names"
        )
    return hello


def read_hello(hello: bytes, challenge: bytes, token: bytes) -> Greeting:
    """Return the greeting in a dialler's answer.

    Raises Unauthorized where the proof does not match, ProtocolError for anything malformed and for
    a protocol version that we do not speak.
    """
    start = CHALLENGE_BYTES + PROOF_BYTES
    if len(hello) <= start:
        raise ProtocolError("the greeting is cut short: the other side is not fabric")
    nonce, proof, body = hello[:CHALLENGE_BYTES], hello[CHALLENGE_BYTES:start], hello[start:]
    if not hmac.compare_digest(proof, _proof(token, b"dial", challenge, nonce, body)):
        raise Unauthorized(
            "the dialler's token does not match this job's token: give both processes the same token file"
        )
    try:
        value = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"the greeting is not JSON: {error}") from error
    if isinstance(value, dict):
        check_version(value.get("protocol"))
    greeting = decode_as(Greeting, value, "greeting")
    if greeting.kind not in ("control", "data", "rank", "probe", "collective", "echo"):
        raise ProtocolError(
            f"a link is of kind control, data, rank, probe, collective or echo, not {greeting.kind[:20]!r}"
        )
    if not 0 <= greeting.connection < greeting.connections <= MOST_CONNECTIONS:
        raise ProtocolError(
            f"a link has 1 to {MOST_CONNECTIONS} connections, and this is number {greeting.connection} of "
            f"{greeting.connections}"
        )
    if max(len(greeting.replica), len(greeting.job), len(greeting.store_id)) > MAX_NAME_CHARACTERS:
        raise ProtocolError(f"a name in the greeting is over {MAX_NAME_CHARACTERS} characters")
    return greeting


def read_hello_of_any(hello: bytes, challenge: bytes, tokens: Sequence[bytes]) -> tuple[Greeting, bytes]:
    """Return the greeting, and the token of ``tokens`` that made its proof. Raises as ``read_hello`` does."""
    for token in tokens[:-1]:
        with suppress(Unauthorized):
            return read_hello(hello, challenge, token), token
    return read_hello(hello, challenge, tokens[-1]), tokens[-1]


def accept_frame(challenge: bytes, hello: bytes, token: bytes) -> bytes:
    """Return the acceptor's frame of consent, which proves that it holds the token too."""
    return _ACCEPTED + _proof(token, b"accept", challenge, hello)


def refuse_frame(error: Exception) -> bytes:
    """Return the acceptor's frame of refusal, with the sentence that the dialler shows to its user."""
    marks = ((Unauthorized, _BAD_TOKEN), (Unconnected, _LEADS_BACK), (Exception, _REFUSED))
    mark = next(mark for kind, mark in marks if isinstance(error, kind))
    return mark + str(error)[:MAX_REFUSAL_CHARACTERS].encode()


def read_verdict(verdict: bytes, challenge: bytes, hello: bytes, token: bytes) -> None:
    """Return if the acceptor consented and proved that it holds the token.

    Raises Unauthorized where either token is wrong, Unconnected where the address leads back to the dialler,
    otherwise Refused with the acceptor's sentence.
    """
    if verdict[:1] == _ACCEPTED:
        if not hmac.compare_digest(verdict[1:], _proof(token, b"accept", challenge, hello)):
            raise Unauthorized(
                "the acceptor does not hold this job's token: "
                "give both processes the same token file, or check the address"
            )
        return
    sentence = printable(verdict[1:].decode(errors="replace")[:MAX_REFUSAL_CHARACTERS])
    if verdict[:1] == _BAD_TOKEN:
        raise Unauthorized(sentence)
    if verdict[:1] == _LEADS_BACK:
        raise Unconnected(sentence)
    if verdict[:1] == _REFUSED:
        raise Refused(sentence)
    raise ProtocolError("the acceptor's verdict cannot be read: the other side is not fabric")


def random_bytes() -> bytes:
    """Return an unpredictable challenge or nonce."""
    return secrets.token_bytes(CHALLENGE_BYTES)


def _proof(token: bytes, role: bytes, *parts: bytes) -> bytes:
    # Each part is preceded by its length, so no two different conversations hash alike.
    mac = hmac.new(token, WIRE + role, hashlib.sha256)
    for part in parts:
        mac.update(len(part).to_bytes(4, "big"))
        mac.update(part)
    return mac.digest()

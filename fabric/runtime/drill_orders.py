"""The order of a drill for one process, and its form on the socket in that process's run folder.

The socket exists only if FABRIC_DRILL allows drills. An order is one line of JSON, a report is one line too.
The connection is the order's lease: at its end, or after ``seconds``, the process goes on.

The lighthouse and ``fabric drill`` prove the token for drills to each other, and never send it.
"""

import hashlib
import hmac
import json
import os
import time
from collections.abc import Mapping
from typing import Annotated, Any

import msgspec

from fabric.errors import ProtocolError
from fabric.protocol.messages.wire import decode_line
from fabric.runtime.failpoints import NAMES

SIGNED = "Drill"  # the scheme of a header Authorization with a proof
DRILL_SOCKET_NAME = "drill.sock"
MAX_ORDER_BYTES = 4096
ADVICE = "use a drill of this version"  # where the other process sends something else
MOST_SECONDS = 3600.0
# A drill changes data at these points, or the clock at no point of a step.
DATA_POINTS = frozenset({"gather", "publish"})
CLOCK = "clock"
LINKS = "links"
_STEP_POINTS = NAMES - DATA_POINTS
ACTIONS: Mapping[str, frozenset[str]] = {
    "hold": _STEP_POINTS,
    "kill": _STEP_POINTS,
    "flip": DATA_POINTS,  # a bit of a gradient, once; a bit of each snapshot until the order ends
    "nan": frozenset({"gather"}),
    "leap": frozenset({CLOCK}),  # ``time.time`` is an hour ahead until the order ends
    "cut": frozenset({LINKS}),  # all packets to the links are lost until the order ends
    "lose": frozenset({LINKS}),  # a fifth of the packets to the links is lost until the order ends
}


class PointOrder(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Do ``action`` when the process reaches ``point`` for the first time at ``step`` or later."""

    drill: Annotated[str, msgspec.Meta(min_length=1, max_length=64)]  # its name, for sentences and logs
    point: str
    action: str
    seconds: Annotated[float, msgspec.Meta(ge=0, le=MOST_SECONDS)] = 0.0  # how long the action lasts
    step: Annotated[int, msgspec.Meta(ge=0)] = 0
    micro_batch: int = -1  # act at this micro-batch of exactly ``step``; -1: at any

    def line(self) -> bytes:
        return msgspec.json.encode(self) + b"\n"


def read_order(line: bytes) -> PointOrder:
    """Invert ``PointOrder.line``. Raises ProtocolError with one sentence."""
    body = decode_line(line, ADVICE)
    try:
        order = msgspec.convert(body, PointOrder)
        if not order.drill.isprintable():
            raise ValueError("the name of the drill cannot be printed")
    except (msgspec.ValidationError, ValueError) as error:
        raise ProtocolError(
            f"this order of a drill has wrong fields ({str(error)[:300]}): {ADVICE}"
        ) from error
    if order.point not in ACTIONS.get(order.action, ()):
        raise ProtocolError(
            f"this process knows no point {order.point[:40]!r} with action {order.action[:40]!r}: {ADVICE}"
        )
    return order


def order_key(token: str, job: str) -> str:
    """Return the key of a lighthouse's orders to the trainers of ``job``. The key does not show ``token``."""
    return hmac.digest(token.encode(), f"orders to job {job}".encode(), "sha256").hex()


def proof_of(key: str, nonce: str, answer: Mapping[str, Any]) -> str:
    """Return the proof that the writer of ``answer`` knows ``key`` and has heard ``nonce``."""
    text = json.dumps([nonce, answer], sort_keys=True)
    return hmac.digest(key.encode(), text.encode(), "sha256").hex()


def signed_request(token: str, method: str, path: str, body: bytes) -> str:
    """Return the header Authorization of one request of a drill. The header does not show ``token``."""
    stamp = f"{time.time():.0f}.{os.urandom(8).hex()}"
    return f"{SIGNED} {stamp}.{request_proof(token, stamp, method, path, body)}"


def request_proof(token: str, stamp: str, method: str, path: str, body: bytes) -> str:
    """Return the proof that the sender of this request knows ``token``; ``stamp`` is used once."""
    text = f"request {stamp} {method} {path} {hashlib.sha256(body).hexdigest()}"
    return hmac.digest(token.encode(), text.encode(), "sha256").hex()

"""The compiled moves of pieces (piece_moves.c), which also says what their digest finds."""

from typing import final

BLOCK_BYTES: int
DIGEST_BYTES: int

Buffer = bytes | bytearray | memoryview
Places = memoryview | tuple[memoryview, ...]  # one memory, or several one after the other

def coded_bytes(form: int, count: int) -> int:
    """Return the bytes of ``count`` elements of float32 in ``form``, a code of ``EXCHANGE_FORMS``."""

def digest(payload: Buffer) -> bytes:
    """Return the digest of a payload, DIGEST_BYTES long."""

def fold(
    parts: tuple[memoryview, ...],
    own: memoryview,
    into: memoryview,
    element: int,
    first: int,
    kept: int,
    operation: int,
    weight: float,
    last: bool,
    form: int = 0,
) -> None:
    """``into = ((parts[0] (+) parts[1]) (+) ...) (+) own``, and finished (divided, rounded) where ``last``.

    ``into`` may be ``own``. ``element``, ``first`` and ``kept`` are the codes of the types of own elements,
    of the first part and of ``into``. With ``form`` the elements become what that form can hold. Raises
    ValueError where the sizes do not fit.
    """

@final
class Inlet:
    """Receives payloads from the non-blocking socket ``fd``, one piece after another.

    ``element`` is the code of own elements, ``operation`` that of the reduction; ``weight`` divides a mean.
    """

    def __init__(self, fd: int, scratch: Buffer, element: int, operation: int, weight: float) -> None: ...
    def begin(
        self,
        size: int,
        own: Places | None,
        into: memoryview | None,
        received: int,
        kept: int,
        last: bool,
        digested: bool,
        form: int = 0,
        onward: memoryview | None = None,
        ahead: int = 0,
    ) -> None:
        """Begin a piece of ``size`` bytes; ``digested``: its digest follows.

        With ``own`` the sum of the piece and own elements goes to ``into``. Without it the piece goes there,
        and without ``into`` nowhere. ``received`` and ``kept`` are the codes of the types on the socket and
        in ``into``.

        With ``form`` the piece comes in that form, and what goes on goes to ``onward`` in that form too; the
        last sum becomes what the form can hold. With its digest come up to ``ahead`` bytes of the header
        behind it. Raises ValueError where the sizes do not fit.
        """

    def ahead(self) -> bytes:
        """Return the bytes behind the piece that have come with its digest; ``pump`` does not count them."""

    def pump(self, stop: int = -1) -> int:
        """Receive what has come of the piece and its digest, a MiB or so at most; return the bytes.

        Raises BlockingIOError, another OSError, or EOFError where none has come. With ``stop``, a
        descriptor, receive all of it, and return early only at an error or when ``stop`` is readable.
        """

    def moved_s(self) -> float:
        """Return the monotonic time at which bytes came last, 0 for never; from any thread."""

    def kept(self) -> int:
        """Return the bytes of ``into``, with a form of ``onward``, that are complete."""

    def finish(self) -> bytes | None:
        """End the piece: return the digest of ``into``, with a form of ``onward``; empty without one.

        None: the piece does not match its digest.
        """

@final
class Outlet:
    """Sends payloads over the non-blocking socket ``fd``, one piece after another."""

    def __init__(self, fd: int) -> None: ...
    def begin(
        self,
        header: bytes,
        payload: memoryview,
        digested: bool,
        computes: bool,
        form: int = 0,
        source: Places | None = None,
    ) -> None:
        """Begin a piece. ``digested``: a digest goes behind it. ``computes``: all of it may go now, and its
        digest is computed here; otherwise ``allow`` says what may go.

        The elements of ``source`` are written to ``payload`` before they are sent, in ``form`` if there is
        one.
        """

    def allow(self, ready: int, digest: bytes | None = None) -> None:
        """Let the first ``ready`` bytes of the payload go, and with the last ones its ``digest``."""

    def pump(self, stop: int = -1) -> int:
        """Send what the socket takes; return the bytes. Raises OSError where none went: BlockingIOError.

        With ``stop``, a descriptor, send all, and return early only at an error or when ``stop`` is readable.
        """

    def moved_s(self) -> float:
        """Return the monotonic time at which bytes went last, 0 for never; from any thread."""

    def may_send(self) -> bool:
        """Whether bytes may go that have not gone."""

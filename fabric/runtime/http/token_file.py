"""A token in a file, which may be replaced while the job runs.

The file holds one token on one line, or two tokens on two lines while one replaces the other. A service
accepts both tokens; a client shows the first. A job changes its token in three steps, each on all hosts: add
the new token below the old one, swap both lines, remove the old token.
"""

import hmac
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from fabric.errors import ConfigError

log = logging.getLogger(__name__)

MAX_TOKEN_BYTES = 4096
MOST_TOKENS = 2
# Seconds between two checks of the token file for a change.
LOOK_S = 1.0


def read_tokens(path: Path) -> tuple[str, ...]:
    """Read the tokens in the file at ``path``, without surrounding white space: one, or two.

    Raises ConfigError where the file is missing, empty, too long or not lines of printable ASCII. Warns in
    the log where other users of this machine can read it.
    """
    try:
        with path.open("rb") as file:
            readable_by_all = bool(path.stat().st_mode & 0o004)
            data = file.read(MOST_TOKENS * (MAX_TOKEN_BYTES + 2) + 1).strip()
    except OSError as error:
        raise ConfigError(
            f"the token file {path} cannot be read ({error.strerror}): write the job's token there, mode 0600"
        ) from error
    if not data:
        raise ConfigError(f"the token file {path} is empty: write the job's token into it")
    lines = [line.strip() for line in data.split(b"\n")]
    if len(lines) > MOST_TOKENS or not all(map(_is_token, lines)):
        raise ConfigError(
            f"the token file {path} must hold one line of at most {MAX_TOKEN_BYTES} printable characters"
            " without spaces, and a second one while a token is replaced: write a new token into it"
        )
    if readable_by_all:
        log.warning("the token file %s can be read by every user of this machine: chmod 600 it", path)
    return tuple(line.decode() for line in lines)


def read_token(path: Path) -> str:
    """Read the token that this process sends from the file at ``path``. Raises ConfigError."""
    return read_tokens(path)[0]


def is_same(given: str, token: str) -> bool:
    """Whether ``given`` equals ``token``; the comparison takes the same time for every guess."""
    # Bytes outside of UTF-8 come as lone surrogates; refuse such bytes instead of raising an error.
    return hmac.compare_digest(given.encode("utf-8", "replace"), token.encode())


class TokenFile:
    """The current tokens of one file; they stay as they were when the file can no longer be read."""

    def __init__(self, path: Path | None, clock: Callable[[], float] = time.monotonic) -> None:
        """Raise ConfigError where ``path`` holds no token. Without a path no token is needed."""
        self._path = path
        self._clock = clock
        self._stamp = _stamp(path)
        self._tokens = () if path is None else read_tokens(path)
        self._looked = clock()
        self._logged = ""

    @classmethod
    def of(cls, token: "TokenFile | str | None") -> "TokenFile":
        """Return ``token`` itself, or one that never changes."""
        if isinstance(token, TokenFile):
            return token
        fixed = cls(None)
        fixed._tokens = (token,) if token else ()
        return fixed

    @property
    def is_open(self) -> bool:
        return not self._tokens

    def shown(self) -> str:
        """Return the token that this process sends, read again if the file has changed; empty for none."""
        self._look()
        return self._tokens[0] if self._tokens else ""

    def accepted(self) -> tuple[str, ...]:
        """Return the tokens that a client may send; check the file at most once in LOOK_S."""
        if self._clock() - self._looked >= LOOK_S:
            self._look()
        return self._tokens

    def accepts(self, given: str) -> bool:
        matches = [is_same(given, token) for token in self.accepted()]
        return any(matches)

    def _look(self) -> None:
        if self._path is None:
            return
        self._looked = self._clock()
        try:
            if (stamp := _stamp(self._path)) != self._stamp or self._logged:
                self._tokens, self._stamp = read_tokens(self._path), stamp
                self._logged = ""
        except ConfigError as error:
            if str(error) != self._logged:
                self._logged = str(error)
                log.warning("%s; the token that was read before stays in use", error)


def _stamp(path: Path | None) -> tuple[int, int, int] | None:
    """Return what differs once the file is another one; None where it is not there."""
    if path is not None:
        with suppress(OSError):
            there = path.stat()
            return there.st_mtime_ns, there.st_ino, there.st_size
    return None


def _is_token(line: bytes) -> bool:
    return 0 < len(line) <= MAX_TOKEN_BYTES and all(33 <= byte <= 126 for byte in line)

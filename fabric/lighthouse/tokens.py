"""Who may ask about which job: the lighthouse's own token opens all of them, a job's token that job alone.

A job's token lies in a file that is named like the job, in one folder. The folder is looked at again when a
request comes, at most once a second: a job is let in, or shut out, without a restart. What is no name of a
job there is passed over, so a mounted Kubernetes secret will do as it is.
"""

import hmac
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from aiohttp import web
from aiohttp.typedefs import Middleware

from fabric.errors import ConfigError, ProtocolError, Unauthorized
from fabric.lighthouse.incoming import check_name
from fabric.runtime.web import Handler, bearer_of, read_token

log = logging.getLogger(__name__)

LOOK_S = 1.0
Scope = frozenset[str] | None


@dataclass(slots=True)
class _Known:
    stamp: tuple[int, int]
    token: str  # empty where the file cannot be used


class Tokens:
    """``own`` opens every job, the files in ``folder`` one each. Neither: everything is open."""

    def __init__(self, own: str | None, folder: Path | None = None) -> None:
        self._own = own
        self._folder = folder
        self._known: dict[str, _Known] = {}
        self._looked = float("-inf")

    @property
    def is_open(self) -> bool:
        """Whether nobody has to show anything."""
        return self._own is None and self._folder is None

    def scope(self, given: str) -> Scope:
        """What this token opens. Raises Unauthorized where that is nothing."""
        if self._own is not None and _same(given, self._own):
            return None
        jobs = frozenset(name for name, token in self.of_jobs().items() if _same(given, token))
        if not jobs:
            raise Unauthorized(
                "the token does not match this job's: use the token file that the job was given"
            )
        return jobs

    def key(self, job: str) -> str | None:
        """The token of ``job``, of the lighthouse where it is empty; None where there is none."""
        return self.of_jobs().get(job) if job else self._own

    def of(self, job: str) -> str | None:
        """What opens the checkpoint servers of ``job``: its own token, else the lighthouse's."""
        return self.of_jobs().get(job, self._own)

    def of_jobs(self) -> dict[str, str]:
        """Job -> token, as the files have them now."""
        if self._folder is not None and time.monotonic() - self._looked >= LOOK_S:
            self._looked = time.monotonic()
            self._known = self._look(self._folder)
        return {name: known.token for name, known in self._known.items() if known.token}

    def _look(self, folder: Path) -> dict[str, _Known]:
        found: dict[str, _Known] = {}
        try:
            files = sorted(folder.iterdir())
        except OSError as error:
            # Nobody is let in by what cannot be seen; who has a session keeps it.
            log.error("the folder of job tokens %s cannot be read: %s", folder, error.strerror)
            return found
        for file in files:
            try:
                check_name("job", file.name)
                stat = file.stat()
                if not file.is_file():
                    continue
                stamp = (stat.st_mtime_ns, stat.st_ino)
                known = self._known.get(file.name)
                found[file.name] = known if known and known.stamp == stamp else _read(file, stamp)
            except (ProtocolError, OSError):
                continue
        return found


def _read(file: Path, stamp: tuple[int, int]) -> _Known:
    try:
        return _Known(stamp, read_token(file))
    except ConfigError as error:
        log.warning("%s", error)
        return _Known(stamp, "")


def _same(given: str, token: str) -> bool:
    # Bytes that are no UTF-8 come as lone surrogates, which must be refused rather than raise.
    return hmac.compare_digest(given.encode("utf-8", "replace"), token.encode())


def token_required(
    tokens: Tokens, open_paths: frozenset[str], cookie: Callable[[web.Request, Tokens], Scope | bool]
) -> Middleware:
    """A middleware that lets a request through when its token, or its ``cookie`` (False: none that counts),
    opens the job of its path; where no job is named, the handler asks ``is_in_scope``."""

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        if tokens.is_open or request.path in open_paths:
            return await handler(request)
        scope = cookie(request, tokens)
        if isinstance(scope, bool):
            scope = tokens.scope(bearer_of(request.headers.get("Authorization", "")))
        job = request.match_info.get("job")
        if scope is not None and job is not None and job not in scope:
            raise Unauthorized(
                f"this token is not that of job {job[:64]}: use the token file that the job was given"
            )
        request["scope"] = scope
        return await handler(request)

    return check


def is_in_scope(request: web.Request, job: str) -> bool:
    """Whether the request may learn of ``job``."""
    scope: Scope = request.get("scope")
    return scope is None or job in scope

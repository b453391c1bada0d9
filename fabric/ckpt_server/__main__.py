"""Entry of the checkpoint server process: ``python -m fabric.ckpt_server --job J --replica R --run-dir D``.

Exit code 0 after a normal end, 1 with one sentence on standard error when it cannot serve. It imports
no torch, so it starts in a fraction of a second and stays small.
"""

import argparse
import math
import sys
from pathlib import Path

import uvloop

from fabric.ckpt_server.server.process import AlreadyServed, ServerSettings, run, tell_ready
from fabric.errors import ConfigError, FabricError
from fabric.runtime import logs
from fabric.runtime.http.connection_limit import raise_descriptor_limit
from fabric.runtime.http.tls import Tls


def parse(arguments: list[str]) -> tuple[ServerSettings, str, int]:
    """Return the settings on the command line, how to log, and the descriptor to report to (-1: none)."""
    parser = argparse.ArgumentParser(prog="python -m fabric.ckpt_server", description="Checkpoint server")
    parser.add_argument("--job", required=True, help="name of the job")
    parser.add_argument("--replica", required=True, help="name of this replica")
    parser.add_argument("--run-dir", required=True, type=Path, help="folder for the socket, lock and log")
    parser.add_argument("--bind", default="127.0.0.1", help="address to listen on")
    parser.add_argument("--port", default="0", help="port, range such as 8000-8010, or 0 for any")
    parser.add_argument("--advertise", default="", help="host name that others reach this one by")
    parser.add_argument("--token-file", type=Path, help="file with the job's token")
    for name in ("cert", "key", "ca"):
        parser.add_argument(
            f"--tls-{name}", type=Path, help="see fabric/runtime/http/tls.py: all three, or none"
        )
    parser.add_argument("--lighthouse", default="", help="base URLs, separated by commas")
    parser.add_argument("--orphan-s", type=float, default=600.0, help="seconds to live without a trainer")
    parser.add_argument("--rank", type=int, default=0, help="rank of the trainer within its replica")
    parser.add_argument(
        "--log", default="text", choices=logs.FORMATS, help="how to log: text, or a JSON object per line"
    )
    parser.add_argument("--ready-fd", type=int, default=-1, help=argparse.SUPPRESS)
    values = parser.parse_args(arguments)
    settings = ServerSettings(
        job=values.job,
        replica=values.replica,
        run_dir=values.run_dir.absolute(),
        bind=values.bind,
        port=values.port,
        advertise=values.advertise,
        token_file=None if values.token_file is None else values.token_file.absolute(),
        lighthouse=tuple(url.strip() for url in values.lighthouse.split(",") if url.strip()),
        orphan_s=values.orphan_s,
        rank=values.rank,
        tls=Tls(values.tls_cert, values.tls_key, values.tls_ca),
    )
    return settings, values.log, values.ready_fd


def check(settings: ServerSettings) -> None:
    """Raises ConfigError for settings that cannot be used."""
    for what, name in (("job", settings.job), ("replica", settings.replica)):
        if not name.isprintable() or not 0 < len(name) <= 200:
            raise ConfigError(f"the {what} {name[:40]!r} is no name: give 1 to 200 printable characters")
    for url in settings.lighthouse:
        if not url.startswith(("http://", "https://")):
            raise ConfigError(
                f'the lighthouse "{url[:200]}" is no URL: give addresses such as http://host:port'
            )
    settings.tls.check()
    if settings.rank < 0:
        raise ConfigError(f"the rank is {settings.rank}: give 0 or more")
    if not (settings.orphan_s > 0 and math.isfinite(settings.orphan_s)):
        raise ConfigError(f"orphan-s is {settings.orphan_s}: give a number of seconds above 0")


def main() -> int:
    """Run the server; returns the exit code."""
    settings, form, ready_fd = parse(sys.argv[1:])
    logs.set_up("checkpoint server", form)
    logs.describe(job=settings.job, replica=settings.replica, rank=settings.rank or None)
    try:
        check(settings)
        raise_descriptor_limit()
        uvloop.run(run(settings, ready_fd))
    except FabricError as error:
        tell_ready(ready_fd, {"ok": False, "error": str(error), "busy": isinstance(error, AlreadyServed)})
        sys.stderr.write(f"fabric: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Entry of the checkpoint server process: ``python -m fabric.ckpt_server --job J --replica R --run-dir D``.

Exit code 0 after a normal end, 1 with one sentence on standard error when it cannot serve. It imports
no torch, so it starts in a fraction of a second and stays small.
"""

import argparse
import sys

import uvloop
from msgspec.structs import fields

from fabric.ckpt_server.server.process import AlreadyServed, run, tell_ready
from fabric.ckpt_server.wire.server_settings import OPTIONS, ServerSettings, option_of
from fabric.errors import FabricError
from fabric.runtime import logs
from fabric.runtime.http.connection_limit import raise_descriptor_limit


def parse(arguments: list[str]) -> tuple[ServerSettings, int]:
    """Return the settings on the command line, and the descriptor for the report of readiness (-1: none)."""
    parser = argparse.ArgumentParser(prog="python -m fabric.ckpt_server", description="Checkpoint server")
    for field in fields(ServerSettings):
        kind, meaning = OPTIONS[field.name]
        parser.add_argument(
            option_of(field.name),
            type=kind,
            help=meaning,
            choices=logs.FORMATS if field.name == "log" else None,
            required=field.required,
            default=argparse.SUPPRESS,
        )
    parser.add_argument("--ready-fd", type=int, default=-1, help=argparse.SUPPRESS)
    values = vars(parser.parse_args(arguments))
    ready_fd = values.pop("ready_fd")
    return ServerSettings(**values), ready_fd


def main() -> int:
    settings, ready_fd = parse(sys.argv[1:])
    logs.set_up("checkpoint server", settings.log)
    logs.describe(job=settings.job, replica=settings.replica)
    try:
        settings.check()
        raise_descriptor_limit()
        uvloop.run(run(settings, ready_fd))
    except FabricError as error:
        tell_ready(ready_fd, {"ok": False, "error": str(error), "busy": isinstance(error, AlreadyServed)})
        sys.stderr.write(f"fabric: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

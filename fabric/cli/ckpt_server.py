"""``fabric ckpt-server``: passes its arguments to ``python -m fabric.ckpt_server``."""

import sys

import click

from fabric.cli.lighthouse_options import current_tls


@click.command("ckpt-server", context_settings={"ignore_unknown_options": True, "help_option_names": []})
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def ckpt_server(arguments: tuple[str, ...]) -> None:
    """Hold and serve one replica's snapshots."""
    from fabric.ckpt_server.__main__ import main

    folder = current_tls().folder
    tls = [] if folder is None else [f"--tls-folder={folder}"]
    sys.argv = ["fabric ckpt-server", *tls, *arguments]
    raise SystemExit(main())

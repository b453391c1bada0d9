"""``fabric ckpt-server``: the same as ``python -m fabric.ckpt_server``, which reads its own arguments."""

import sys

import click


@click.command("ckpt-server", context_settings={"ignore_unknown_options": True, "help_option_names": []})
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def ckpt_server(arguments: tuple[str, ...]) -> None:
    """Hold and serve one replica's snapshots."""
    from fabric.ckpt_server.__main__ import main

    sys.argv = ["fabric ckpt-server", *arguments]
    raise SystemExit(main())

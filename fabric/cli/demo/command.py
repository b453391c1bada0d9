import click
from pathlib import Path
from fabric.cli.demo.verify import verify
from fabric.errors import ConfigError


@click.group()
def demo(): ...
@demo.command("verify")
@click.argument("directory", type=click.Path(path_type=Path))
def verify_command(directory):
    try:
        v = verify(directory)
    except ConfigError as e:
        click.echo(f"Error: {e}", err=True)
        raise SystemExit(2)
    for b in v.broken:
        click.echo(b)
    raise SystemExit(1 if v.broken else 0)

"""Every published figure of SPARe, FT-HSDP, TorchPass and ResiHP beside ours, with its tolerance.

Exit code 1: a figure is outside its tolerance. `--quick` plays three random worlds per figure and not eight.
"""

import json
import os

import click
from papers.figures import Figure
from papers.published import ASSUMPTIONS, reproduce
from rich.console import Console
from rich.table import Table

QUICK_SEEDS, SEEDS = 3, 8


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--quick", is_flag=True, help=f"{QUICK_SEEDS} random worlds per figure and not {SEEDS}.")
def main(as_json: bool, quick: bool) -> None:
    """Print every published figure beside ours; exit 1 where one is outside its tolerance."""
    figures = reproduce(QUICK_SEEDS if quick else SEEDS, os.cpu_count() or 1)
    if as_json:
        click.echo(json.dumps([figure.as_dict() for figure in figures], indent=2))
    else:
        Console().print(table_of(figures))
        for assumption in ASSUMPTIONS:
            click.echo(f"- {assumption}")
    if not all(figure.ok for figure in figures):
        raise SystemExit(1)


def table_of(figures: list[Figure]) -> Table:
    table = Table("figure", "source", "published", "ours", "deviation", "tolerance", "")
    for figure in figures:
        tolerance = f"± {figure.tolerance:.4g}" if figure.tolerance is not None else figure.bound
        table.add_row(
            figure.id,
            figure.source,
            "-" if figure.published is None else f"{figure.published:.5g}",
            f"{figure.ours:.5g}",
            "-" if figure.deviation is None else f"{figure.deviation:+.1%}",
            "-" if figure.published is None else tolerance,
            "" if figure.published is None or figure.bound == "shape" else ("ok" if figure.ok else "OUTSIDE"),
        )
    return table


if __name__ == "__main__":
    main()

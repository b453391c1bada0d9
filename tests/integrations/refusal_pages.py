"""The table of refusals in the page of an adapter, made from the rows of its argument tables."""

from collections.abc import Mapping
from pathlib import Path

from fabric.integrations.arguments import Row

PAGES = Path(__file__).parent.parent.parent / "docs/adopt"


def refusals(tables: Mapping[str, Mapping[str, Row]]) -> str:
    """Return what the rows of each table refuse, as a page has it: each title and reason once."""
    lines = []
    for title, rows in tables.items():
        names: dict[str, list[str]] = {}
        for name, row in sorted(rows.items()):
            if row.kind == "refused":
                names.setdefault(row.words, []).append(f"`{name}`")
        cells = [f"{', '.join(names[why])} | {why} |" for why in sorted(names)]
        lines += [f"| {'' if i else title} | {cell}" for i, cell in enumerate(cells)]
    return "\n".join(["| of | refused | because, and instead |", "|---|---|---|", *lines]) + "\n"


def check_page(name: str, tables: Mapping[str, Mapping[str, Row]]) -> None:
    """Assert that the page ``name`` of docs/adopt has the table of these refusals."""
    table = refusals(tables)
    assert table in (PAGES / f"{name}.md").read_text(), "put this into the page:\n" + table

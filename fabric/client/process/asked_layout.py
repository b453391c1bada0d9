"""The layout that this replica's launcher asks the script to build."""

import sys
from typing import NoReturn

from fabric.errors import FabricError
from fabric.exit_codes import FAILED, LAYOUT_REFUSED
from fabric.runtime.config import asked_layout
from fabric.runtime.rank_layout import RankLayout


def layout() -> RankLayout:
    """Return the layout in which to build the model: ranks, tensor parallel size, layers of each stage.

    If these ranks cannot have the layout, the process ends with one sentence and exit code 1.
    """
    try:
        return asked_layout()
    except FabricError as error:
        sys.stderr.write(f"fabric: {error}\n")
        raise SystemExit(FAILED) from None


def refuse_layout(why: str) -> NoReturn:
    """End this process, whose script cannot build the layout: ``fabric launch`` must choose another."""
    try:
        asked = str(asked_layout())
    except FabricError:
        asked = "that is asked for"
    sys.stderr.write(f"fabric: this script cannot build the layout {asked}: {why}\n")
    sys.stderr.flush()
    raise SystemExit(LAYOUT_REFUSED)

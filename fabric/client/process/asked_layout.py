"""The layout that this replica's launcher asks the script to build."""

import sys
from typing import NoReturn

from fabric.errors import FabricError
from fabric.runtime.config import asked_layout
from fabric.runtime.exit_codes import FAILED, LAYOUT_REFUSED
from fabric.runtime.rank_layout import RankLayout


def layout() -> RankLayout:
    """Return what to build, before the model is made: ranks, tensor parallel size, layers of each stage.

    A layout that these ranks cannot have ends the process with one sentence and exit code 1.
    """
    try:
        return asked_layout()
    except FabricError as error:
        sys.stderr.write(f"fabric: {error}\n")
        raise SystemExit(FAILED) from None


def refuse_layout(why: str) -> NoReturn:
    """End this process: the script cannot build the layout, and ``fabric launch`` must choose another one."""
    try:
        asked = str(asked_layout())
    except FabricError:
        asked = "that is asked for"
    sys.stderr.write(f"fabric: this script cannot build the layout {asked}: {why}\n")
    sys.stderr.flush()
    raise SystemExit(LAYOUT_REFUSED)

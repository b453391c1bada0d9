"""fabric: a checkpoint and recovery fabric for data-parallel PyTorch training."""

from importlib import metadata as _metadata
from pathlib import Path as _Path

__version__ = "0.1.0"


def _check_for_clash() -> None:
    """PyPI's SSH tool is imported as ``fabric`` too: installed together, files of both lie in one folder.

    Raises ImportError with what to do, rather than fail later in some module of the other.
    """
    try:
        other = _metadata.distribution("fabric")
    except _metadata.PackageNotFoundError:
        return
    here = _Path(__file__).resolve().parent
    theirs = other.locate_file("fabric")
    if _Path(str(theirs)).resolve() == here:
        raise ImportError(
            f"the SSH tool 'fabric' {other.version} and 'ckpt-fabric' are both installed into {here}: "
            "uninstall both, then install ckpt-fabric alone (pip uninstall fabric ckpt-fabric; "
            "pip install ckpt-fabric), or use separate environments"
        )


_check_for_clash()

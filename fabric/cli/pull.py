"""``fabric pull``: a snapshot or durable checkpoint into a safetensors file, verified, resumed where cut
off."""

import mmap
import os
from collections.abc import Callable
from pathlib import Path

import click
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

from fabric.ckpt_server.digest import block_digest, file_digest
from fabric.cli.look import token_of
from fabric.cli.states import DurableState, RemoteState, open_manifested
from fabric.errors import ConfigError, IntegrityError, Unreachable

_RANGE_BLOCKS = 16
_TRIES = 5


@click.command()
@click.argument("url")
@click.option("-o", "--output", required=True, type=click.Path(path_type=Path), help="The file to write.")
@click.option(
    "--token-file",
    envvar="FABRIC_TOKEN_FILE",
    type=click.Path(path_type=Path),
    help="File with the token; FABRIC_TOKEN_FILE.",
)
def pull(url: str, output: Path, token_file: Path | None) -> None:
    """Fetch the snapshot at URL into a safetensors file: a checkpoint server's newest one, or that of
    .../v1/snapshots/STEP; or a durable checkpoint: its folder, or that of its job for the newest (#1 at the
    end for rank 1's part).

    The file is there when it is whole and verified; until then OUTPUT.part holds what has come, and a later
    call goes on from it.
    """
    state = open_manifested(url, token_of(token_file))
    part = output.with_name(output.name + ".part")
    console = Console(stderr=True)
    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    try:
        with Progress(*columns, console=console) as bar:
            task = bar.add_task("", total=state.nbytes)
            fetch_into(part, state, lambda nbytes: bar.advance(task, nbytes))
        part.replace(output)
    except OSError as error:
        raise ConfigError(f"{part} cannot be written: {error.strerror or error}") from error
    finally:
        state.close()
    click.echo(f"{output}: step {state.step}, {state.nbytes:,} bytes, digest {state.manifest['digest']}")


def fetch_into(
    part: Path, state: RemoteState | DurableState, progress: Callable[[int], None] = lambda _: None
) -> int:
    """Fill ``part`` with the state, keeping the blocks in it that are right; returns the bytes fetched.

    ``progress`` is called with a number of bytes as they are there. Raises FabricError or OSError.
    """
    size, blocks = state.manifest["block_bytes"], state.manifest["blocks"]
    descriptor = os.open(part, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    fetched = 0
    with os.fdopen(descriptor, "r+b") as file:
        here = os.fstat(descriptor).st_size
        os.truncate(descriptor, state.nbytes)
        missing = []
        for index, digest in enumerate(blocks):
            begin, end = index * size, min((index + 1) * size, state.nbytes)
            file.seek(begin)
            if begin < here and block_digest(memoryview(file.read(end - begin))) == digest:
                progress(end - begin)
            else:
                missing.append(index)
        for first, count in _runs(missing):
            data = _fetch(state, first, count)
            file.seek(first * size)
            file.write(data)
            fetched += len(data)
            progress(len(data))
        file.flush()
        os.fsync(descriptor)
        _check_whole(file.fileno(), state)
    return fetched


def _fetch(state: RemoteState | DurableState, first: int, count: int) -> memoryview:
    """Some blocks, verified; what fails is tried again."""
    size = state.manifest["block_bytes"]
    begin, end = first * size, min((first + count) * size, state.nbytes)
    for tries in range(_TRIES):
        try:
            return state.read(begin, end)
        except (Unreachable, IntegrityError):
            if tries == _TRIES - 1:
                raise
    raise AssertionError


def _runs(missing: list[int]) -> list[tuple[int, int]]:
    """(first, count) of neighbouring blocks, at most ``_RANGE_BLOCKS`` together."""
    runs: list[tuple[int, int]] = []
    for index in missing:
        first, count = runs[-1] if runs else (0, 0)
        if runs and index == first + count and count < _RANGE_BLOCKS:
            runs[-1] = first, count + 1
        else:
            runs.append((index, 1))
    return runs


def _check_whole(descriptor: int, state: RemoteState | DurableState) -> None:
    with mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ) as whole, memoryview(whole) as view:
        found = file_digest(view)
    wanted = state.manifest["digest"]
    if found != wanted:
        raise IntegrityError(f"what came from {state.name} has the digest {found} and not {wanted}")

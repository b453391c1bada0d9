"""``fabric pull``: copies a snapshot or durable checkpoint into a safetensors file, verified and
resumable."""

import mmap
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import BinaryIO

import click
from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

from fabric.ckpt_server.fetch.multi_source import BlockRange, runs_of
from fabric.ckpt_server.format.digest import BlockDigests, block_digest, digest_of_blocks, file_digest
from fabric.ckpt_server.reading import BlockState, MergedState, open_manifested
from fabric.cli.lighthouse_options import current_tls, lighthouse_options
from fabric.cli.states.inspect import StateNames, tell_part, token_of
from fabric.cli.terminal_text import plain_console
from fabric.errors import ConfigError, IntegrityError, Unreachable

_TRIES = 5


@click.command()
@click.argument("state")
@click.option("-o", "--output", required=True, type=click.Path(path_type=Path), help="The file to write.")
@lighthouse_options
def pull(state: str, output: Path, lighthouse: str, job: str, token_file: Path | None) -> None:
    """Fetch STATE into a safetensors file: the newest snapshot of a replica of the job, or of the checkpoint
    server at a URL, or that of .../v1/snapshots/STEP; or a durable checkpoint: its folder, or that of its job
    or FABRIC_DURABLE for the newest. A state of several ranks is put together: of a replica, of a durable
    one, or where STATE is a URL of each rank's server, with commas between them (one URL alone, or FOLDER#1,
    is one rank's part).

    The file is there when it is whole and verified; until then OUTPUT.part holds what has come, and a later
    call continues from it (a state of several ranks starts over).
    """
    if output.exists() and not output.is_file():
        raise ConfigError(f"{output} is a {'folder' if output.is_dir() else 'device'}: name a file to write")
    part = output.with_name(output.name + ".part")
    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    written = ""
    with ExitStack() as stack:
        (place,) = StateNames(lighthouse, job, token_file).find(state)
        opened = open_manifested(place, token_of(token_file), stack, current_tls())
        try:
            with Progress(*columns, console=plain_console(stderr=True)) as bar:
                task = bar.add_task("", total=opened.nbytes)

                def progress(nbytes: int) -> None:
                    bar.advance(task, nbytes)

                if isinstance(opened, MergedState):
                    written = f", digest of the file {export_into(part, opened, progress)}"
                else:
                    fetch_into(part, opened, progress)
            part.replace(output)
        except OSError as error:
            raise ConfigError(f"{part} cannot be written: {error.strerror or error}") from error
        digest = opened.manifest["digest"]
        click.echo(f"{output}: step {opened.step}, {opened.nbytes:,} bytes, digest {digest}{written}")
        tell_part(opened)


def fetch_into(part: Path, state: BlockState, progress: Callable[[int], None] = lambda _: None) -> int:
    """Fill ``part`` with the state, but keep its correct blocks; return the bytes fetched.

    ``progress`` is called with each number of bytes that has arrived. Raises FabricError or OSError.
    """
    size, blocks = state.manifest["block_bytes"], state.manifest["blocks"]
    fetched = 0
    with _open(part) as file:
        here = os.fstat(file.fileno()).st_size
        _make_room(file.fileno(), here, state.nbytes)
        missing = []
        for index, digest in enumerate(blocks):
            begin, end = index * size, min((index + 1) * size, state.nbytes)
            file.seek(begin)
            if begin < here and block_digest(memoryview(file.read(end - begin))) == digest:
                progress(end - begin)
            else:
                missing.append(index)
        for run in runs_of(missing):
            file.seek(run.first * size)
            for data in _fetch(state, run):
                file.write(data)
                fetched += len(data)
                progress(len(data))
        file.flush()
        os.fsync(file.fileno())
        _check_whole(file.fileno(), state)
    return fetched


def export_into(part: Path, state: MergedState, progress: Callable[[int], None]) -> str:
    """Write ``part`` from its beginning, merged from the ranks' parts; return the digest of the file.

    Each part is verified as it is read. Raises FabricError or OSError."""
    digests = BlockDigests()
    with _open(part) as file:
        _make_room(file.fileno(), 0, state.nbytes)
        for piece in state.pieces():
            file.write(piece)
            digests.update(piece)
            progress(len(piece))
        file.flush()
        os.fsync(file.fileno())
    return digest_of_blocks(state.nbytes, digests.blocks())


def _open(part: Path) -> BinaryIO:
    return os.fdopen(os.open(part, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666), "r+b")


def _make_room(descriptor: int, here: int, nbytes: int) -> None:
    """Allocate the file. A full disk makes this fail, and the file keeps its content."""
    os.truncate(descriptor, nbytes)
    try:
        os.posix_fallocate(descriptor, 0, nbytes)
    except OSError:
        os.truncate(descriptor, min(here, nbytes))
        raise


def _fetch(state: BlockState, run: BlockRange) -> Iterator[memoryview]:
    """Yield verified blocks; after a failure try again from the first missing block."""
    left, tries = run.count, 0
    while left:
        try:
            for block in state.blocks(run.first + run.count - left, left):
                yield block
                left, tries = left - 1, 0
        except (Unreachable, IntegrityError):
            tries += 1
            if tries == _TRIES:
                raise


def _check_whole(descriptor: int, state: BlockState) -> None:
    with mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ) as mapped, memoryview(mapped) as view:
        digest = file_digest(view)
    wanted = state.manifest["digest"]
    if digest != wanted:
        raise IntegrityError(f"what came from {state.name} has the digest {digest} and not {wanted}")

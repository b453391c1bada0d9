"""``fabric inspect``, ``fabric diff`` and ``fabric pull``: show, compare and copy states."""

import json
import mmap
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, BinaryIO

import click
import numpy as np
from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn
from rich.text import Text

from fabric.ckpt_server.durable.reader import list_checkpoints
from fabric.ckpt_server.durable.storage import Storage
from fabric.ckpt_server.fetch.multi_source import BlockRange, runs_of
from fabric.ckpt_server.format.manifest import BlockDigests, block_digest, digest_of_blocks, file_digest
from fabric.ckpt_server.format.safetensors_file import ELEMENT_BYTES, TensorSpan
from fabric.ckpt_server.reading import BlockState, MergedState, ReadableState, open_manifested, open_state
from fabric.ckpt_server.server.statistics import values
from fabric.cli.lighthouse_options import current_tls, json_option, lighthouse_options, lighthouses_of
from fabric.cli.terminal_text import plain_console, print_table
from fabric.errors import ConfigError, IntegrityError, ProtocolError, StateError, Unreachable
from fabric.lighthouse.connections.validation import check_name
from fabric.model import Value
from fabric.runtime.http.lighthouse_client import understood
from fabric.runtime.http.token_file import read_token

# Finds a state by the name of a replica, or by the value of ``FABRIC_DURABLE``.


class StateNames(Value):
    """Finds the states that users name, with the options of a command."""

    lighthouse: str
    job: str
    token_file: Path | None

    def find(self, *names: str) -> list[str]:
        """Return the path or URLs of each name. Replicas get one common step. Raises FabricError."""
        replicas = [name for name in names if self._is_replica(name)]
        if not replicas:
            return [self._in_job_folder(name) for name in names]
        lighthouses = lighthouses_of(self.lighthouse, self.job, self.token_file, needs_job=True)
        status = lighthouses.ask(lighthouses.path())
        with understood("the lighthouse"):
            held = {name: _held(status, name, self.job) for name in replicas}
            common = set.intersection(*(set(states) for states in held.values()))
            if not common:
                steps = {x: ", ".join(str(step) for _, step in sorted(states)) for x, states in held.items()}
                listed = "; ".join(f"{x} holds step {text or 'none'}" for x, text in steps.items())
                raise StateError(f"{listed}: they hold no step in common now; ask again in a moment")
            newest = max(common)
            return [held[x][newest] if x in held else self._in_job_folder(x) for x in names]

    def asks_lighthouse(self, *names: str) -> bool:
        """Whether one of the names is a replica's, so that the states that it stands for change."""
        return any(map(self._is_replica, names))

    def _is_replica(self, name: str) -> bool:
        try:
            check_name("replica", name)
        except ProtocolError:
            return False
        if Path(name).exists():
            return False
        if not self.lighthouse:
            raise ConfigError(
                f"there is no file {name}: correct its path, or give --lighthouse and --job for a replica"
            )
        return True

    def _in_job_folder(self, name: str) -> str:
        """Return the job's folder in ``name``, where that is a value of ``FABRIC_DURABLE``."""
        is_storage = Path(name).is_dir() or ("://" in name and not name.startswith(("http://", "https://")))
        if not is_storage or not self.job or "#" in name:
            return name
        folder = f"{name.rstrip('/')}/{self.job}"
        return folder if list_checkpoints(Storage(folder), self.job).complete else name


def _held(status: dict[str, Any], replica: str, job: str) -> dict[tuple[int, int], str]:
    """Return the URLs of the replica's states by generation and step: those that all of its ranks hold."""
    servers = [x for x in status["checkpoint_servers"] if x["replica"] == replica and x["ckpt"]]
    servers.sort(key=lambda server: server["rank"])
    if not servers:
        holders = ", ".join(sorted({x["replica"] for x in status["checkpoint_servers"]})) or "none"
        raise ConfigError(
            f"{replica} is neither a file nor a replica of job {job} that holds a state (these do: {holders})"
        )
    refs = [{(ref["generation"], ref["step"]) for ref in x["snapshots"]} for x in servers]
    return {
        (generation, step): ",".join(
            f"{x['ckpt'].partition('#')[0].rstrip('/')}/v1/snapshots/{step}" for x in servers
        )
        for generation, step in set.intersection(*refs)
    }


_PIECE_ELEMENTS = 1 << 20

# A snapshot of a running job is there for a few steps only, so a comparison may begin again.
_TRIES = 5


def token_of(token_file: Path | None) -> str:
    """Return the token in the file, empty without a file."""
    return "" if token_file is None else read_token(token_file)


def tell_part(state: ReadableState) -> None:
    """Print a note if the state is one rank's part, because its tensors may be parts of larger tensors."""
    if state.ranks > 1:
        click.echo(
            f"{state.name} is the part of rank {state.rank} of {state.ranks}: for the whole state name the"
            " durable folder, or a URL of each rank with commas between them",
            err=True,
        )


@click.command("inspect")
@click.argument("state")
@lighthouse_options
@json_option
def inspect_state(state: str, lighthouse: str, job: str, token_file: Path | None, as_json: bool) -> None:
    """Show what is in STATE: a file, a replica of the job, the URL of a checkpoint server (its newest
    snapshot) or of a snapshot, or a durable checkpoint (its folder, or that of its job or FABRIC_DURABLE for
    the newest). Of several ranks: a URL of each, with commas between them, or the durable folder (FOLDER#1 is
    the part of rank 1)."""
    (place,) = StateNames(lighthouse, job, token_file).find(state)
    with open_state(place, token_of(token_file), current_tls()) as opened:
        tell_part(opened)
        spans = list(opened.tensors.values())
        if as_json:
            tensors = {s.name: {"dtype": s.dtype, "shape": s.shape, "nbytes": s.end - s.begin} for s in spans}
            body = {"step": opened.step, "digest": opened.digest, "nbytes": opened.nbytes, "tensors": tensors}
            click.echo(json.dumps(body, indent=2))
            return
        rows = [
            (x.name, x.dtype, "x".join(map(str, x.shape)) or "scalar", f"{x.end - x.begin:,}") for x in spans
        ]
        console = plain_console()
        print_table(console, "", ("tensor", "dtype", "shape", "bytes"), rows)
        console.print(
            Text(f"step {opened.step}, {len(spans)} tensors, {opened.nbytes:,} bytes, digest {opened.digest}")
        )


@click.command()
@click.argument("states", nargs=2, metavar="FIRST SECOND")
@lighthouse_options
@json_option
def diff(states: tuple[str, str], lighthouse: str, job: str, token_file: Path | None, as_json: bool) -> None:
    """Show which tensors of two states differ, and by how much; each is named as for inspect, and they may be
    of different layouts of ranks. Two replicas are compared at the newest step that both hold. Exit code 1
    where any tensor differs."""
    names, token = StateNames(lighthouse, job, token_file), token_of(token_file)
    for tries_left in reversed(range(_TRIES)):
        try:
            places = names.find(*states)
            rows = _differences(places, token, as_json)
        except (StateError, Unreachable):
            if not tries_left or not names.asks_lighthouse(*states):
                raise
        else:
            raise SystemExit(1 if rows else 0)


def _differences(names: list[str], token: str, as_json: bool) -> list[dict[str, Any]]:
    """Compare the two states and print the result; return an entry for each tensor that differs."""
    with open_state(names[0], token, current_tls()) as a, open_state(names[1], token, current_tls()) as b:
        rows = differences(a, b)
        tell_part(a)
        tell_part(b)
        if as_json:
            click.echo(json.dumps({"steps": [a.step, b.step], "different": rows}, indent=2))
        else:
            _show(rows, a, b)
            if a.step != b.step:
                note = f"{a.name} has step {a.step}, and {b.name} step {b.step}: what is trained differs"
                click.echo(note, err=True)
    return rows


def differences(a: ReadableState, b: ReadableState) -> list[dict[str, Any]]:
    """Return an entry for each tensor that is not bitwise equal in both, ordered as in ``a``, then ``b``."""
    entries = []
    for name, span in a.tensors.items():
        other = b.tensors.get(name)
        if other is None:
            entries.append({"tensor": name, "why": f"only in {a.name}"})
        elif (span.dtype, span.shape) != (other.dtype, other.shape):
            kinds = [f"{s.dtype} {'x'.join(map(str, s.shape))}" for s in (span, other)]
            entries.append({"tensor": name, "why": f"{kinds[0]} in {a.name}, {kinds[1]} in {b.name}"})
        else:
            entry = _compare(a, span, b, other)
            entries += [entry] if entry is not None else []
    entries += [{"tensor": n, "why": f"only in {b.name}"} for n in b.tensors if n not in a.tensors]
    return entries


def _compare(
    a: ReadableState, left_span: TensorSpan, b: ReadableState, right_span: TensorSpan
) -> dict[str, Any] | None:
    """Describe how two tensors of one shape differ; None where they are bitwise equal."""
    size = _PIECE_ELEMENTS * ELEMENT_BYTES[left_span.dtype]
    different, largest, unlike = 0, 0.0, 0
    for offset in range(0, left_span.end - left_span.begin, size):
        end = min(offset + size, left_span.end - left_span.begin)
        x, y = (
            a.read(left_span.begin + offset, left_span.begin + end),
            b.read(right_span.begin + offset, right_span.begin + end),
        )
        if x == y:
            continue
        left, right = values(x, left_span.dtype), values(y, left_span.dtype)
        same = np.frombuffer(x, np.uint8).reshape(left.size, -1) == np.frombuffer(y, np.uint8).reshape(
            left.size, -1
        )
        at = ~same.all(axis=1)
        different += int(at.sum())
        with np.errstate(invalid="ignore", over="ignore"):
            gap = np.abs(left[at].astype(np.float64) - right[at].astype(np.float64))
        unlike += int((~np.isfinite(gap)).sum())
        largest = max(largest, float(np.max(gap[np.isfinite(gap)], initial=0.0)))
    if not different:
        return None
    elements = (left_span.end - left_span.begin) // ELEMENT_BYTES[left_span.dtype]
    entry: dict[str, Any] = {
        "tensor": left_span.name,
        "different": different,
        "elements": elements,
        "largest": largest,
    }
    return {**entry, "not_finite": unlike} if unlike else entry


def _show(rows: list[dict[str, Any]], a: ReadableState, b: ReadableState) -> None:
    console = plain_console()
    shown = []
    for row in rows:
        counts = f"{row['different']:,} of {row['elements']:,}" if "different" in row else row["why"]
        largest = f"{row['largest']:.3g}" if "largest" in row else ""
        more = f" ({row['not_finite']:,} not finite)" if "not_finite" in row else ""
        shown.append((row["tensor"], counts + more, largest))
    print_table(console, "", ("tensor", "elements that differ", "largest difference"), shown)
    equal = len(a.tensors.keys() - {row["tensor"] for row in rows})
    console.print(
        Text(f"step {a.step} and step {b.step}: {equal} tensors are bitwise equal, {len(rows)} are not")
    )


# ``fabric pull``: copies a snapshot or durable checkpoint into a safetensors file, verified and resumable.


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
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped, memoryview(mapped) as view:
            digest = file_digest(view)
    wanted = state.manifest["digest"]
    if digest != wanted:
        raise IntegrityError(f"what came from {state.name} has the digest {digest} and not {wanted}")
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

"""torchft's checkpoint transports over fabric's checkpoint server: verified blocks, and no pickle."""

import shutil
import tempfile
import time
from abc import ABC, abstractmethod
from datetime import timedelta
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch

from fabric.ckpt_server.attach import ServerHandle
from fabric.ckpt_server.format.manifest import BlockDigests, digest_of_blocks, make_manifest
from fabric.ckpt_server.state.training_state import capture, host_bytes
from fabric.ckpt_server.wire.server_settings import ServerSettings
from fabric.client.state.restored_values import restore_values
from fabric.errors import ConfigError, FabricError
from fabric.model import SnapshotRef, Value
from fabric.runtime import config

T = TypeVar("T")
_GENERATION = 1
_ORPHAN_S = 60.0  # how long a server outlives a process that died


class CheckpointTransport(ABC, Generic[T]):
    """Moves a state from one replica to others; see ``HTTPTransport``."""

    @abstractmethod
    def metadata(self) -> str:
        """Return what receivers need to know of the sender."""

    @abstractmethod
    def send_checkpoint(self, dst_ranks: list[int], step: int, state_dict: T, timeout: timedelta) -> None:
        """Offer the state of ``step``."""

    def disallow_checkpoint(self) -> None:
        """Withdraw the state that was offered last."""

    @abstractmethod
    def recv_checkpoint(self, src_rank: int, metadata: str, step: int, timeout: timedelta) -> T:
        """Return the state of ``step`` from the sender with this ``metadata``."""

    def shutdown(self, wait: bool = True) -> None:
        """Release what the transport holds."""


class _Sent(Value):
    """A state of the caller, as an object that ``capture`` takes."""

    value: Any

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, _: Any) -> None:
        """Nothing is loaded into it."""


class HTTPTransport(CheckpointTransport[T]):
    """Serves states from a checkpoint server of its own, beside this process. Not thread-safe.

    The constructor's ``timeout`` and ``num_chunks`` change nothing: fabric reads blocks of 4 MiB. Address,
    token and TLS follow the settings of this replica. States are nested lists, dicts and tensors.
    """

    def __init__(self, timeout: timedelta = timedelta(seconds=60), num_chunks: int = 0) -> None:
        self._handle: ServerHandle | None = None
        self._folder = ""
        self._slot = 0

    def metadata(self) -> str:
        """Return the URL of the checkpoint server."""
        return self._server().url

    def send_checkpoint(
        self, dst_ranks: list[int], step: int, state_dict: T, timeout: timedelta = timedelta(seconds=60)
    ) -> None:
        """Serve a copy of the state to every receiver, until the next one is sent.

        Raises StateError with the path of a value that cannot be sent.
        """
        view, handle = capture({"state": _Sent(state_dict)}, step), self._server()
        self._slot = 1 - self._slot
        handle.begin("snapshot", self._slot)
        memory = handle.allocate("snapshot", self._slot, view.nbytes)[: view.nbytes]
        end, digests = 0, BlockDigests()
        for data in (memoryview(view.header), *(host_bytes(x.cpu()) for _, x in view.tensors)):
            memory[end : end + len(data)] = data
            end += len(data)
        digests.update(memory)
        blocks = digests.blocks()
        state = SnapshotRef(_GENERATION, step, digest_of_blocks(view.nbytes, blocks))
        names = {"job": "transport", "replica": "transport"}
        handle.publish_snapshot(
            self._slot, make_manifest(state, view.nbytes, blocks, **names, created=time.time())
        )

    def disallow_checkpoint(self) -> None:
        """Withdraw the state that was sent last; it waits for readers under way."""
        if self._handle is not None:
            self._handle.begin("snapshot", self._slot)

    def recv_checkpoint(
        self, src_rank: int, metadata: str, step: int, timeout: timedelta = timedelta(seconds=60)
    ) -> T:
        """Return the state of ``step``, verified, with tensors on the CPU. Raises FabricError.

        A sender that has not sent all of it within ``timeout`` is lost.
        """
        restored = restore_values(f"{metadata}/v1/snapshots/{step}", timeout_s=timeout.total_seconds())
        try:
            value: T = restored.values["state"]["value"]
        except (LookupError, TypeError) as error:
            raise FabricError(
                f"{metadata} serves a state that no HTTPTransport has sent: use fabric.client.restore_values"
            ) from error
        return value

    def shutdown(self, wait: bool = True) -> None:
        """End the checkpoint server."""
        if self._handle is not None:
            self._handle.finish(linger_s=0.0)
            self._handle.close()
            shutil.rmtree(self._folder, ignore_errors=True)
            self._handle = None

    def _server(self) -> ServerHandle:
        if self._handle is None:
            chosen = config.settings()
            self._folder = tempfile.mkdtemp(prefix="fabric-transport-")
            spec = ServerSettings(
                job="transport",
                replica="transport",
                run_dir=Path(self._folder) / "run",
                bind=chosen.host,
                advertise=chosen.advertise.partition(",")[0],
                token_file=chosen.token_file,
                tls_folder=chosen.tls.folder,
                orphan_s=_ORPHAN_S,
            )
            self._handle = ServerHandle(spec, incarnation=1)
        return self._handle


class PGTransport(HTTPTransport[T]):
    """As HTTPTransport: fabric has no transport over a process group, and its HTTP is verified."""

    def __init__(
        self,
        pg: Any,
        timeout: timedelta = timedelta(seconds=60),
        device: torch.device | None = None,
        state_dict: Any = None,
    ) -> None:
        super().__init__(timeout)


def check_transport(transport: Any) -> None:
    """Raise ConfigError for a transport of the user's own, which a Manager would not use."""
    if transport is not None and not isinstance(transport, HTTPTransport):
        raise ConfigError(
            f"Manager got the checkpoint_transport {type(transport).__name__}: leave it out, because fabric "
            "moves the state through its checkpoint servers"
        )

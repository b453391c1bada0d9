"""How a joining replica catches up: it loads a fetched state, then replays published gradients.

The other members keep stepping, and the replay must not slow them down. On the CPU the heavy work runs in
another thread at low priority (``runtime.priority``), and the main thread waits for it. Heavy work is loading
and digesting the state, writing a replayed gradient into ``.grad``, and the steps of torch's own optimizers.
The main thread runs user code and, on a device or in a replica of several ranks, all other work.
"""

import torch

from fabric.ckpt_server.state.training_state import restore, verify
from fabric.client.control.engine import Engine, EngineParts
from fabric.client.loop.local_state import LocalState
from fabric.client.loop.loop_progress import LoopProgress
from fabric.client.loop.low_priority_steps import LowPrioritySteps
from fabric.errors import FabricError
from fabric.protocol.messages import member_events as io


class Replay:
    """Brings ``state`` up to the step of the other members."""

    def __init__(self, parts: EngineParts, engine: Engine, state: LocalState, progress: LoopProgress) -> None:
        self._parts = parts
        self._engine = engine
        self._state = state
        self._progress = progress
        self._replayed = 0  # number of steps replayed since this process loaded the state
        self._steps: LowPrioritySteps | None = None

    def begin(self) -> None:
        """Prepare for the user's code to apply a published gradient."""
        self._replayed += 1
        self._progress.behind = True
        if self._state.may_yield:
            objects = self._state.describer.objects.values()
            self._steps = LowPrioritySteps([x for x in objects if isinstance(x, torch.optim.Optimizer)])

    def end(self) -> None:
        """Note that the user's code has applied the gradient."""
        if self._steps is not None:
            self._steps.close()
            self._steps = None

    def install(self, order: io.Install) -> None:
        """Load the fetched state, and verify it once loaded. The fetch has verified it as a whole."""
        fetched_state = self._parts.fetch_thread.take_state()
        assert fetched_state is not None
        # The manifest has the digest of this rank's part; the order has the digest of the replica's state.
        digest = fetched_state.fetched.manifest["digest"]
        self._parts.points.hit("install", order.step)
        self._state.drop_gradient()
        self._state.wait_changeable()
        self._progress.behind = True
        objects, run = self._state.describer.objects, self._state.run
        try:
            restore(fetched_state.file, objects, run)
            verify(objects, order.step, digest, run, self._state.describer.by_name)
        except FabricError as error:
            self._engine.post(io.InstallFailed(f"the state of step {order.step} does not fit: {error}"))
            return
        self._parts.buffers.begin()
        self._progress.state_step = order.step
        self._progress.loads += 1
        fetched = fetched_state.fetched
        self._progress.source = ", ".join(sorted(fetched.sources)) or "this host"
        if not fetched_state.resharded:
            self._parts.snapshots.serve(fetched_state.slot, fetched.manifest)
        self._replayed = 0
        self._parts.journal.write(
            "join",
            generation=fetched.manifest["generation"],
            step=order.step,
            bytes=fetched.nbytes,
            seconds=fetched.seconds,
            sources=dict(fetched.sources),
            compression=fetched.compression,
            resharded=fetched_state.resharded,
        )
        digest = self._state.name_installed(digest)
        self._state.note(digest)
        news = self._progress.take_news()
        self._engine.post(io.Installed(order.step, digest, order.step >= self._progress.until, news))

    def note_joined(self, prepared: io.PreparedRound) -> None:
        """Journal the first round of a replica that has caught up."""
        if self._progress.behind:
            self._progress.behind = False
            replayed, self._replayed = self._replayed, 0
            self._parts.journal.write("joined", epoch=prepared.epoch, step=prepared.step, replayed=replayed)

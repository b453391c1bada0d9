"""The session of a FabricAccelerator, and the step that its script's loop is at.

The loop of a replica that joins begins at its beginning, and the job is at a later step. So the loop goes
over the steps that the job has made: it gets batches, computes nothing and changes nothing. The counters of
the script are right when the loop comes to the job's step.
"""

import ast
import atexit
import contextlib
import json
import math
import sys
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from accelerate.scheduler import AcceleratedScheduler
from accelerate.state import AcceleratorState, DistributedType, PartialState
from accelerate.utils import send_to_device
from torch.utils.data import DataLoader

from fabric.client.data.loader import data_slot_of
from fabric.client.loop.loop_flow import (
    called,
    dotted,
    early_change,
    ends_by,
    made_from,
    moves_training,
    names_read,
    stores,
)
from fabric.client.loop.step import Step
from fabric.client.loop.unshared_objects import ADVICE, MORE_OPTIMIZERS
from fabric.client.loop.user_functions import loops_around, tree_of
from fabric.client.process.excepthook import on_uncaught
from fabric.errors import ConfigError, FabricError
from fabric.exit_codes import FAILED
from fabric.integrations.adopt.living_objects import is_in_order, schedulers_of
from fabric.integrations.arguments import UNEQUAL
from fabric.integrations.script_state import (
    RepeatedOutputs,
    ScriptGradients,
    ScriptState,
    leave_behind,
    say_goes_over,
)
from fabric.integrations.training_data import EpochShape, StepFeed, TrainingData, attach_in
from fabric.integrations.user_source import carried_network, measured_value
from fabric.runtime.config import Settings, launched_ranks, parse_replicas
from fabric.runtime.living_objects import living
from fabric.runtime.process_environment import without_launcher


class JobDataLoader(DataLoader[Any]):
    """A DataLoader of the script: the training's follows the job's steps, any other stays whole.

    ``complete``: the DataLoader as accelerate prepares it.
    """

    def __init__(self, source: Any, complete: Any, replica: "AcceleratedReplica") -> None:
        super().__init__(source.dataset, source.batch_size, collate_fn=source.collate_fn)
        self.source, self.complete, self._replica = source, complete, replica
        self._begun = False

    @cached_property
    def data(self) -> TrainingData:
        """The data as the job deals them out. Raises ConfigError for data that it cannot deal out."""
        return TrainingData.of(self.source)

    @property
    def epochs(self) -> EpochShape | None:
        """The shape of a pass; None for a stream, which is one pass without an end."""
        replica = self._replica
        return None if self.data.is_stream else self.data.epochs(replica.replicas, replica.accumulation)

    def __len__(self) -> int:
        if not self._replica.trains_on(self):
            return len(self.complete)
        # The length of a stream without one raises a TypeError.
        return len(self.source) if (epochs := self.epochs) is None else epochs.batches

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        if not self._replica.trains_on(self):
            return self._read_whole()
        first, self._begun = not self._begun, True
        return self._replica.micro_batches(self, first)

    def _read_whole(self) -> Iterator[Any]:
        self._replica.open_reads, self._replica.evaluates = self._replica.open_reads + 1, True
        try:
            yield from self.complete
        finally:
            self._replica.open_reads -= 1

    def set_epoch(self, epoch: int) -> None:
        """Do nothing for the training: the order of its data follows the job's step."""
        if not self._replica.trains_on(self) and hasattr(self.complete, "set_epoch"):
            self.complete.set_epoch(epoch)

    @property
    def total_batch_size(self) -> int:
        """The number of samples of a micro-batch of all replicas, as accelerate counts it."""
        return int(self.data.batch_size * self._replica.replicas)

    @property
    def total_dataset_length(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type]


class JobScheduler(AcceleratedScheduler):  # type: ignore[misc]
    """Steps as often per step of the job as accelerate does on that many processes."""

    def __init__(self, prepared: Any, replica: "AcceleratedReplica") -> None:
        super().__init__(
            prepared.scheduler, prepared.optimizers, prepared.step_with_optimizer, prepared.split_batches
        )
        self._replica = replica

    def step(self, *arguments: Any, **named: Any) -> None:
        """Step where the optimizer has stepped. Micro-batches leave no trace: their number differs."""
        scheduler = self.scheduler
        if self._replica.goes_over:
            return
        if not self.step_with_optimizer:
            scheduler.step(*arguments, **named)
            return
        if not self.gradient_state.sync_gradients or any(x.step_was_skipped for x in self.optimizers):
            return
        for _ in range(self._replica.replicas):
            # OneCycle refuses a step beyond its last.
            if scheduler._step_count <= getattr(scheduler, "total_steps", math.inf):  # noqa: SLF001
                scheduler.step(*arguments, **named)


ENDLESS = 1 << 40  # the step at which a loop ends that its script counts
STEP_FILE = "fabric.json"  # beside the files of save_state
_TRIGGER = "fabric.trigger"  # metric: replicas whose script has called set_trigger in the step
# Names in the code of a loop that knows that a step may have several micro-batches.
_KNOWS_STEPS = {"accumulate", "sync_gradients"}
# Calls that get a count of batches where a script goes on from a checkpoint, or writes one.
_GO_ON = {"range", "skip_first_batches", "save_state", "write", "write_text", "dump", "dumps", "save"}

# Sentences for a loop of one's own, in the words of accelerate.
_WORDS = {
    "let it count session.committed_step, so that all loops end at the same step": (
        "end it after a number of optimizer steps, or by accelerator.set_trigger and check_trigger; a "
        "replica that joins has not measured what the others have"
    ),
    "session.loader": "the DataLoader",
    ADVICE: (
        "give what keeps it to accelerator.register_for_checkpointing, or say "
        'Accelerator(fabric={"unshared": "ignore"})'
    ),
    MORE_OPTIMIZERS: (
        "give all models and optimizers to one accelerator.prepare, or say "
        'Accelerator(fabric={"unshared": "ignore"})'
    ),
}


class AcceleratedReplica:
    """One replica: ``accelerator`` is its FabricAccelerator, ``arguments`` those of attach."""

    def __init__(
        self, accelerator: Any, chosen: Settings, arguments: dict[str, Any], until: int, seed: int
    ) -> None:
        self.replicas = parse_replicas(chosen.replicas)[1]
        self.name, self.data_slot = chosen.replica, data_slot_of(chosen.replica, self.replicas, None)
        self.prepares = False  # accelerate prepares a DataLoader that every replica reads as a whole
        self.trains = False  # the loop computes a micro-batch of the training DataLoader
        self.goes_over = False  # the loop is at a step that the job has made
        self.open_reads = 0  # number of other DataLoaders that the script is reading
        self.evaluates = False  # the script has read another DataLoader since its last training batch
        self.triggers = Triggers()
        self._accelerator, self._arguments = accelerator, arguments
        self._until, self._seed = until, seed
        self.loaders: list[JobDataLoader] = []
        self._loader: JobDataLoader | None = None  # the training's, once the loop reads it
        self.session: Any = None
        self._loop: _ScriptLoop | None = None
        self._step = 0  # step of the checkpoint that the script has loaded
        self._closed = self._loop_ended = False

    # --- the beginning ----------------------------------------------------------------------------------

    def check_prepared(self, arguments: tuple[Any, ...]) -> None:
        """Raise ConfigError for what cannot be kept equal, before accelerate prepares it."""
        models = [x for x in arguments if isinstance(x, torch.nn.Module)]
        if len({*models, *self._accelerator._models}) > 1:  # noqa: SLF001
            raise ConfigError(
                "the script prepares two models, and FabricAccelerator exchanges the gradients of one: make "
                "them parts of one module"
            )
        for optimizer in (x for x in arguments if isinstance(x, torch.optim.Optimizer)):
            kind = f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"
            if UNEQUAL.search(kind):
                raise ConfigError(
                    f"FabricAccelerator cannot keep replicas equal with the optimizer {kind}: choose one "
                    "such as torch.optim.AdamW"
                )

    def trains_on(self, loader: JobDataLoader) -> bool:
        """Whether ``loader`` is the training's: the first one whose order changes, else the first.

        A wrong guess is noticed: ``backward`` takes only the loss of a batch of this DataLoader.
        """
        if self._loader is None:
            changing = [x for x in self.loaders if not is_in_order(x.source)]
            return loader is (changing or self.loaders)[0]
        return loader is self._loader

    @property
    def accumulation(self) -> int:
        """The number of micro-batches of a replica in a step."""
        return int(self._accelerator.gradient_accumulation_steps)

    @property
    def has_begun(self) -> bool:
        """Whether the loop has had its first batch."""
        return self._loop is not None

    def begin(self, loader: JobDataLoader) -> "_ScriptLoop":
        """Attach what the script has prepared, at the first batch."""
        if self._loop is not None:
            return self._loop
        accelerator, self._loader = self._accelerator, loader
        models, optimizers = accelerator._models, accelerator._optimizers  # noqa: SLF001
        if not models or not optimizers:
            raise ConfigError("accelerator.prepare got no model or no optimizer before the first batch")
        local = sys.modules.get("accelerate.local_sgd")
        if local is not None and living(local.LocalSGD):
            raise ConfigError(
                "FabricAccelerator refuses LocalSGD, because it averages gradients in each step: leave it out"
            )
        if measured := measured_value(sys._getframe(1), accelerator._custom_objects):  # noqa: SLF001
            raise ConfigError(
                f"{measured}, and a replica that joins has not measured what the others have: end the loop "
                "after a number of optimizer steps, or by accelerator.set_trigger and check_trigger, and "
                "weigh the loss by a count of steps"
            )
        shared = [*models, *accelerator._custom_objects]  # noqa: SLF001
        if network := carried_network(sys._getframe(1), shared):  # noqa: SLF001
            raise ConfigError(
                f"{network}, and a replica that joins has another one: give the network to "
                "accelerator.register_for_checkpointing"
            )
        model, data, state = accelerator.unwrap_model(models[0]), loader.data, self._state()
        epochs = loader.epochs
        if epochs is None and self._until == ENDLESS:
            _refuse_finite_stream(data.dataset)
        self.session = attach_in(
            _WORDS, model, [x.optimizer for x in optimizers], state, {"step": self._step, **self._arguments}
        )
        atexit.register(self._close_at_exit)
        on_uncaught.append(self._note_failure)
        if fixed := _fixed_batches():
            self._say(f"{fixed}: if a replica dies, its part of a step is left out until it is back")
        feed = (data if epochs is None else data.limited(epochs.samples)).feed(
            self.session,
            self._until,
            global_batch_size=data.batch_size * self.accumulation * self.replicas,
            seed=self._seed,
            epoch_end="continue" if epochs is None else "short",
            policy="shrink" if fixed else "constant",
        )
        self._loop = _ScriptLoop(self, models[0], feed, ScriptState(state, optimizers), epochs)
        self._loop.number = self._step
        feed.advance()
        return self._loop

    def _state(self) -> dict[str, Any]:
        """Return the objects for ``attach(..., state=)``; schedulers also where none has prepared them."""
        accelerator = self._accelerator
        schedulers = [*accelerator._schedulers]  # noqa: SLF001
        prepared = {id(x.scheduler) for x in schedulers}
        steering = schedulers_of([x.optimizer for x in accelerator._optimizers])  # noqa: SLF001
        schedulers += [x for x in steering if id(x) not in prepared]
        state = {f"scheduler.{i}": x for i, x in enumerate(schedulers)}
        state |= {f"registered.{i}": x for i, x in enumerate(accelerator._custom_objects)}  # noqa: SLF001
        return state | ({"scaler": accelerator.scaler} if accelerator.scaler is not None else {})

    # --- micro-batches ----------------------------------------------------------------------------------

    def micro_batches(self, loader: JobDataLoader, is_first: bool) -> Iterator[Any]:
        loop = self.begin(loader)
        end, self._loop_ended = math.inf, False
        if loop.epochs is not None:  # the first pass may begin in its middle
            within = loop.number % loop.epochs.steps if is_first else 0
            end = loop.number - within + loop.epochs.steps
        while loop.number < end and loop.find_step(self._until):
            yield from self._micro_batches_of(loop)
        self._loop_ended = True

    def _micro_batches_of(self, loop: "_ScriptLoop") -> Iterator[Any]:
        gradient_state = self._accelerator.gradient_state
        is_first = True
        while not loop.is_complete:
            # True in a step's first micro-batch, so that zero_grad at the top of the loop works.
            gradient_state._set_sync_gradients(is_first)  # noqa: SLF001
            self.trains, loop.waits, self.evaluates = True, True, False
            try:
                yield send_to_device(loop.batch(), self._accelerator.device)
            finally:
                self.trains = False
                gradient_state._set_sync_gradients(True)  # noqa: SLF001
            if loop.waits:
                raise FabricError(
                    "the loop asked for a batch without accelerator.backward(loss) for the last one: call it "
                    "once for each batch of the training DataLoader"
                )
            is_first = False

    def backward(self, loss: torch.Tensor, weight: float | None) -> None:
        """Add the micro-batch's gradient, and go on to the step's next one: after the last, exchange."""
        loop, scaler = self._loop, self._accelerator.scaler
        if loop is None or not self.trains:
            way = "as the first one or the only one that shuffles or has a sampler"
            raise FabricError(
                "accelerator.backward got the loss of a batch that is not of the job: prepare one DataLoader "
                f"for the training, {way if self.loaders else 'and make a cycle(...) of it afterwards'}"
            )
        if not loop.waits:
            raise FabricError("accelerator.backward was called twice for one batch: add the losses up")
        if self.open_reads:
            raise ConfigError(
                "the script reads another DataLoader along with the training's, and the job deals out one: "
                "make one data set of both, whose samples are pairs"
            )
        loop.waits = False
        self.triggers.send(self.session)
        loop.backward(scaler.scale(loss) if scaler is not None and loop.computes else loss, weight)
        if loop.is_complete:
            self.triggers.receive(None if self.goes_over else loop.feed.step)
        self._accelerator.gradient_state._set_sync_gradients(loop.is_complete)  # noqa: SLF001

    # --- files and the end ------------------------------------------------------------------------------

    @property
    def is_writer(self) -> bool:
        """Whether this replica writes for all; before the loop begins, the replica of data slot 0."""
        if self.session is not None:
            return bool(self.session.is_writer) and not self.goes_over
        return self.data_slot == 0

    def note_update(self) -> bool:
        """Note that the script's optimizer makes a step; return whether the step is real."""
        if self._loop is not None:
            self._loop.has_updated = True
        return not self.goes_over

    def check_figure(self, method: str) -> None:
        """Raise ConfigError where ``method`` gets a figure of the training, which only this replica has."""
        if self.trains and not self.evaluates:
            raise ConfigError(
                f"accelerator.{method} in the training loop cannot reach the other replicas, because one of "
                f"them may have more batches in a step: leave {method} out, and log the loss of one "
                "replica"
            )

    def note_step(self, folder: Path) -> None:
        """Write the job's step beside a checkpoint of the Accelerator."""
        step = self.session.committed_step if self.session is not None else self._step
        (folder / STEP_FILE).write_text(json.dumps({"step": step}) + "\n")

    def read_step(self, folder: Path) -> None:
        """Read the step of the checkpoint that the script has just loaded."""
        path = folder / STEP_FILE
        if self._loop is not None:
            raise ConfigError(
                "accelerator.load_state was called after the first batch: load the state before it"
            )
        self._step = int(json.loads(path.read_text())["step"]) if path.exists() else 0

    def close(self) -> None:
        if self.session is None or self._closed:
            return
        self._closed = True
        assert self._loop is not None
        if self.goes_over and self._loop.feed.step is not None:
            self._say(
                f"the script's loop ended at step {self._loop.number}, and the job is at step "
                f"{self._loop.feed.step.number}: let the loop end by its own counters, because a replica "
                "that joins has not measured the losses of these steps"
            )
            raise SystemExit(FAILED)
        self._loop.outputs.close()
        self.session.close()

    def _say(self, sentence: str) -> None:
        sys.stderr.write(f"fabric: {self.name}: {sentence}\n")

    def _note_failure(self, _: BaseException) -> None:
        """The script has ended by an error, maybe between two passes: this process waits for nobody."""
        self._closed = True

    def _close_at_exit(self) -> None:
        # A script whose loop ran to its end may leave out end_training. Any other end is a death.
        reached = self.session is not None and self.session.committed_step >= self._until
        if self._loop_ended or reached:
            self.close()


class _ScriptLoop:
    """The step that the script's loop is at, and where its gradient comes from."""

    def __init__(
        self,
        replica: AcceleratedReplica,
        model: Any,
        feed: StepFeed,
        state: ScriptState,
        epochs: EpochShape | None,
    ) -> None:
        self.epochs = epochs
        self.number = 0  # number of steps that the loop has made
        self.is_complete = True  # the gradient of the step is there
        self.waits = False  # the loop has a micro-batch without a backward
        self.computes = False  # the loop computes the gradient of the step
        self.feed, self.outputs = feed, RepeatedOutputs()
        self._replica, self._model, self._state = replica, model, state
        self._gradients = ScriptGradients(model)
        self._upcoming: Any = None  # the step's next micro-batch
        self._left = 0  # number of batches that are left of a step that the loop does not compute
        self._kept: Any = None  # a batch for such a step
        self._finished: Step | None = None  # the newest step of the job that the loop has made
        self.has_updated = False  # the script's optimizer has made a step

    def find_step(self, until: int) -> bool:
        """Go on to the loop's next step; return whether there is one."""
        feed = self.feed
        if not self.is_complete:  # the loop was left within the step
            return True
        step = feed.step
        if step is not None and step is self._finished:
            if not self.has_updated:
                raise ConfigError(
                    f"the script makes no optimizer step after {self._replica.accumulation} of its batches: "
                    "give Accelerator the number of batches of a step, as gradient_accumulation_steps="
                )
            step = feed.advance()
        if step is not None and not step.done and step.number == self.number:
            self._upcoming = feed.micro_batch()
            if self._upcoming is None:
                self._gradients.set_aside()
        job_at = until if step is None else step.number
        if self.number == until:
            return False
        if self.number > job_at:
            leave_behind(self._replica.name, self.number, job_at)
        self._begin_step(job_at)
        return True

    def _begin_step(self, job_at: int) -> None:
        replica, over = self._replica, self.number < job_at
        if over and not replica.goes_over:
            say_goes_over(replica.name, self.number, job_at)
            self._state.keep()
        elif not over and replica.goes_over:
            self._state.put_back()
            self._gradients.drop()
        replica.goes_over, self.is_complete = over, False
        self.computes = not over and self._upcoming is not None
        self._left = 0
        if self.computes:
            self.outputs.close()
        else:
            batches = replica.accumulation
            self._left = batches if self.epochs is None else self.epochs.batches_of(self.number)
            self.outputs.open(self._model)

    def batch(self) -> Any:
        """Return the batch that the loop gets next."""
        if self.computes:
            self._kept = self._upcoming
        elif self._kept is None:
            step = self.feed.step.number if self.feed.step is not None else 0
            self._kept = self.feed.data.fetcher.read(self.feed.data.items(step, 0))
        return self._kept

    def backward(self, loss: torch.Tensor, weight: float | None) -> None:
        """Add the gradient of the batch; after the step's last one ``.grad`` is the average."""
        step = self.feed.step
        if self.computes:
            assert step is not None
            if weight is None and self.epochs is not None:
                weight, factor = self.feed.weight(self.epochs), self.epochs.factor(step.number)
                loss = loss if factor == 1.0 else loss * factor
            step.backward(loss, weight)
            self._upcoming = self.feed.micro_batch()
            self.is_complete = self._upcoming is None
        else:
            self._left -= 1
            self.is_complete = self._left == 0
            if self._replica.goes_over:
                self._gradients.fill()
        if self.is_complete:
            self._complete(step)

    def _complete(self, step: Step | None) -> None:
        replica = self._replica
        if self.computes and step is not None and step.number != self.number:
            # The replica was behind and has taken over a later state in this step.
            if step.number < self.number:
                leave_behind(replica.name, self.number, step.number)
            self._gradients.set_aside()
            self._gradients.fill()
            say_goes_over(replica.name, self.number, step.number)
            self._state.keep()
            replica.goes_over = True
        self.number += 1
        if replica.goes_over:
            return
        if self._gradients.bring_back():
            assert step is not None
            self.feed.session.handover.resume(step.number)  # the loop has computed a forward since
        self.outputs.close()  # an evaluation after the update is real
        self._finished = step


class Triggers:
    """``set_trigger`` of any replica, which every replica sees after the same step."""

    def __init__(self) -> None:
        self._own = False
        self._jobs = False

    def set(self) -> None:
        self._own = True

    def send(self, session: Any) -> None:
        """Let the others know with the step under way."""
        if self._own:
            session.metrics(**{_TRIGGER: 1.0})
            self._own = False

    def receive(self, step: Step | None) -> None:
        """Note what the replicas have set in a complete step; none: a step that the loop goes over."""
        self._jobs = step is not None and step.metrics.get(_TRIGGER, 0.0) > 0

    def check(self, trains: bool) -> bool:
        """Return whether a trigger is set, once. Outside of the training all replicas have set the same."""
        is_set = self._jobs or (self._own and not trains)
        self._jobs = False
        if not trains:
            self._own = False
        return is_set


def _refuse_finite_stream(dataset: object) -> None:
    """Raise ConfigError where the loop reads a stream to its end: the stream of a job goes on for ever."""
    _, loops = next(loops_around(sys._getframe(1)), (None, []))  # noqa: SLF001
    # The caller of a generator may leave it.
    ends = (ast.Break, ast.Return, ast.Raise, ast.Yield, ast.YieldFrom)
    if loops and not any(isinstance(x, ends) for x in ast.walk(loops[-1])):
        raise ConfigError(
            f"the script reads its {type(dataset).__name__} to the end, and a job reads a data set without "
            "len() and an index again and again, as one pass: leave the loop over the batches by `break` "
            "after a number of steps, or give a data set with len() and an index"
        )


def _fixed_batches() -> str:
    """Return why each step must have as many batches as the loop expects, or "" where it may have more.

    It may where the script's code has a name by which loops see that a step has several micro-batches. A
    count of all batches by which the script ends, goes on from a checkpoint, writes a file or trains would be
    wrong. So would be a change of the gradients after each batch.
    """
    frame: Any = sys._getframe(1)  # noqa: SLF001
    for own, loops in loops_around(frame):
        nodes = list(ast.walk(tree_of(own) or loops[0]))
        read = {y for x in nodes if isinstance(x, ast.Call) and called(x) in _GO_ON for y in names_read(x)}
        texts = [x for x in nodes if isinstance(x, ast.Assign) and isinstance(x.value, ast.JoinedStr)]
        read |= {y for x in texts if read & set(stores([x])) for y in names_read(x)}
        file = Path(own.f_code.co_filename).name
        for name, line in _counts(loops[-1]).items():
            made = made_from(loops[-1], {name}, conditions=True)
            if name in read or ends_by(loops, {name}) or moves_training(loops[-1], made):
                return (
                    f"the loop counts its batches in {name} ({file}:{line}), so no step has more than it "
                    "expects (to count steps, count under `if accelerator.sync_gradients:`)"
                )
        parts, steps = list(ast.walk(loops[-1])), list[ast.AST]()
        steps += [x for x in parts if isinstance(x, ast.If) and "sync_gradients" in ast.unparse(x.test)]
        steps += [x for x in parts if isinstance(x, ast.Call) and "accelerator" in dotted(x.func)]
        if line := early_change(loops[-1], {y for x in steps for y in ast.walk(x)}):
            return (
                f"the loop changes gradients after each batch ({file}:{line}), so no step has more than it "
                "expects (to change them once, do it under `if accelerator.sync_gradients:`)"
            )
    while frame is not None:
        package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        if package not in ("accelerate", "fabric") and _KNOWS_STEPS & set(frame.f_code.co_names):
            return ""
        frame = frame.f_back
    return "the loop does not use accelerator.accumulate, so it computes a batch for each step"


def _counts(loop: ast.For | ast.AsyncFor | ast.While) -> dict[str, int]:
    """Return the names in which a loop counts its batches, with their lines."""
    body = [y for x in loop.body for y in (x.body if isinstance(x, ast.With) else [x])]
    added = [x for x in body if isinstance(x, ast.AugAssign) and isinstance(x.value, ast.Constant)]
    counts = {dotted(x.target): x.lineno for x in added}
    if isinstance(loop, ast.For) and "enumerate(" in ast.unparse(loop.iter):
        target = loop.target.elts[0] if isinstance(loop.target, ast.Tuple) else loop.target
        counts |= dict.fromkeys(stores([target]), loop.lineno)
    return {name: line for name, line in counts.items() if name}


# accelerate in a replica of one process, under any launcher.
#
# ``fabric launch`` sets the variables of torchrun. On a host with a device, and with ``cpu=True``, accelerate
# takes them for a distributed training: it makes a process group, wraps the model and cuts the data.


@contextlib.contextmanager
def one_process(adapter: str) -> Iterator[None]:
    """Within this context let accelerate see one process. Raises ConfigError for a replica of several ranks.

    ``adapter``: the name of our class, for the sentence.
    """
    ranks = launched_ranks()
    if ranks > 1:
        raise ConfigError(
            f"{adapter} is one process per replica, and this replica has {ranks} ranks: start each one as "
            "a replica of its own, with fabric launch --ranks 1"
        )
    # Let accelerate look again where the script has asked it before, and it has found one process.
    state = PartialState._shared_state  # noqa: SLF001
    kind = state.get("distributed_type", DistributedType.NO)
    if kind.value.startswith("MULTI_") and state.get("num_processes") == 1:
        AcceleratorState._reset_state(reset_partial_state=True)  # noqa: SLF001
    with without_launcher():
        yield

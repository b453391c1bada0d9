"""The training loop of a script that knows nothing of fabric: when it exchanges, and when it only counts.

The loop exchanges at the first use of its gradient: clipping, unscaling, or the optimizer's step. A replica
that joins has the job's state at once, but its loop's own counters (epochs, hand-set learning rates, log
intervals) begin at 0. So its loop goes over the steps that the job has made, without computing them: no
forward, no backward, no update, no data are read. The job's gradient waits until the loop has come to its
step. A loop that is ahead of the job cannot go back, so its process starts again.
"""

import sys
from collections.abc import Callable

import torch

import fabric.client
from fabric.client.data.loader import data_slot_of
from fabric.client.data.randomness import seed_everything
from fabric.client.gradients.forward_buffers import default_buffers
from fabric.client.loop.later_changes import ONE_TRAINING
from fabric.client.loop.step import Step
from fabric.client.loop.unshared_objects import ADVICE, MORE_OPTIMIZERS, belongs
from fabric.errors import ConfigError
from fabric.integrations.adopt.adopted_data import AdoptedData, InputWatch, draws_data
from fabric.integrations.adopt.living_objects import OWN_WAY, TrainingObjects
from fabric.integrations.measured_values import measured_value
from fabric.integrations.script_state import (
    RepeatedOutputs,
    ScriptGradients,
    ScriptState,
    leave_behind,
    say_goes_over,
)
from fabric.runtime.config import Settings, parse_replicas

Attach = Callable[..., fabric.client.Session | fabric.client.SoloSession]

# Sentences for a loop of one's own, for a script that calls nothing of fabric.
_WORDS = {
    "let it count session.committed_step, so that all loops end at the same step": (
        "end the script's loop after a number of steps; with --adopt it cannot follow what it measures, "
        "because a replica that joins has not measured what the others have"
    ),
    "session.loader": "the DataLoader",
    MORE_OPTIMIZERS: OWN_WAY,
    ADVICE: "with --adopt fabric cannot share it: attach the model with fabric.client.attach(..., state=)",
}


class AdoptedLoop:
    """The state of one script's loop; the patches of ``patches.py`` call it. ``attach`` is fabric's own."""

    def __init__(self, settings: Settings, attach: Attach) -> None:
        self.number = 0  # the step that the loop is at, as the job counts
        self.computes = True  # whether forward, backward and data are real
        self.session: fabric.client.Session | None = None
        self.objects: TrainingObjects | None = None
        self._settings = settings
        self._attach = attach
        self._slot = data_slot_of(settings.replica, parse_replicas(settings.replicas)[1], None)
        self.data = AdoptedData(self, parse_replicas(settings.replicas)[1], self._slot)
        self._inputs: InputWatch | None = None
        self._outputs = RepeatedOutputs()
        self._has_gradient = False  # a backward pass has run since the last update
        self._exchanged = False  # the gradient of this step is exchanged, and the update is to come
        self.updates = True  # whether that update is real
        self.has_left = False  # the session has ended this process
        self._waiting: Step | None = None  # a committed step to which the loop has not come yet
        self._gradients: ScriptGradients | None = None
        self._schedule: ScriptState  # the values that the loop advances, as they were before an exchange

    # --- what the script does -----------------------------------------------------------------------------

    def on_backward(self) -> None:
        """The script is about to run a backward pass."""
        if self._exchanged:
            raise ConfigError(
                "the script runs another backward pass between the first use of the gradient and its update, "
                f"which --adopt cannot exchange: {OWN_WAY}"
            )
        self._has_gradient = True
        self.data.note_backward()

    def after_backward(self) -> None:
        """The gradients are as the script's backward pass made them, or zeros where it did not run."""
        if self._gradients is not None and self.computes:
            self._gradients.note()
        elif self._gradients is not None:
            self._gradients.fill()

    def on_gradient_use(self) -> None:
        """Exchange, at the first use of the gradient since the backward pass."""
        if self._has_gradient and not self._exchanged:
            self._exchanged = True
            self._reach_update()

    def on_update(self, optimizer: torch.optim.Optimizer, closure: object) -> bool:
        """Exchange if clipping has not; return whether the update is real."""
        if self.objects is not None and not belongs(optimizer, [self.objects.optimizer]):
            raise ConfigError(
                f"the script trains with another {type(optimizer).__name__} than in its first step, and a "
                f"job is one training: {ONE_TRAINING}"
            )
        if closure is not None:
            raise ConfigError(
                f"the script gives its optimizer a closure, which computes gradients in the step: {OWN_WAY}"
            )
        if not self._has_gradient:
            raise ConfigError(
                "the script's optimizer makes a step without a backward pass before it, so --adopt does not "
                f"know what to exchange: {OWN_WAY}"
            )
        self.on_gradient_use()
        return self.updates

    def after_update(self) -> None:
        """The update of this step is done, or was left out."""
        self._has_gradient = self._exchanged = False

    def resume_at(self, step: int, batches_per_step: int, skipped: int) -> None:
        """The script has loaded a file that it saved when the loop had made ``step`` steps."""
        if self.session is None:
            self.number = step
            self.data.resume(step, batches_per_step, skipped)

    def finish(self) -> None:
        """The script has ended: leave the job. Raises ConfigError where the script has not trained here."""
        if self.session is None and self.number:
            sys.stderr.write(
                f"fabric: {self._settings.replica}: the script has loaded its file of step {self.number} and "
                "has ended without a further step: nothing is left to train\n"
            )
            return
        if self.session is None:
            raise ConfigError(
                "the script has ended without an optimizer step in this process, and --adopt does not follow "
                f"the processes that a script starts: start each rank with fabric launch, or {OWN_WAY}"
            )
        self._outputs.close()
        self.session.close()

    @property
    def is_writer(self) -> bool:
        """Whether this process writes the script's files: not while its loop only counts."""
        if self.session is None:
            return True
        return self._waiting is None and self.session.is_writer

    # --- the steps of the job -----------------------------------------------------------------------------

    def _reach_update(self) -> None:
        """Bring the gradient of step ``number`` into ``.grad``, or find that the job has made that step."""
        if self.session is None:
            self._begin()
        seed_everything(0, self.number + 1, self._slot)  # for the script's next step, after this update
        if self._waiting is None:
            self._exchange()
        self.number += 1
        self.data.next_step()
        if self._waiting is not None and self._waiting.number < self.number:
            step, self._waiting = self._waiting, None
            assert self._gradients is not None
            self._gradients.bring_back()
            assert self.session is not None
            self.session.handover.resume(step.number)
            self.updates = True
            self._set_computes(not step.replayed)
        elif self._waiting is not None:
            self.updates = False

    def _exchange(self) -> None:
        session, objects, gradients = self.session, self.objects, self._gradients
        assert session is not None and objects is not None and gradients is not None
        if self.computes:
            gradients.check()
        else:
            gradients.drop()
        if self._inputs is not None and self.computes:
            session.metrics(**self._inputs.take())
        self._schedule.keep()
        try:
            step = session.exchange(weight=self.data.weight)
        except SystemExit:
            self.has_left = True
            raise
        if step.number < self.number:
            leave_behind(self._settings.replica, self.number, step.number)
        if self._inputs is not None and self.computes:
            self._inputs.judge(step.metrics)
        if step.number == self.number:
            self.updates = True
            self._set_computes(not step.replayed)
            return
        self._go_over(step)

    def _go_over(self, step: Step) -> None:
        """Let the loop count up to ``step`` without computing; its schedulers go with it from where they
        were."""
        assert self._gradients is not None
        say_goes_over(self._settings.replica, self.number, step.number)
        self._waiting = step
        self._gradients.set_aside()
        self._gradients.fill()
        self._schedule.put_back()
        self._set_computes(False)

    def _set_computes(self, computes: bool) -> None:
        """Let the loop compute, or only count. At the job's step it computes if its gradients are wanted."""
        assert self.objects is not None
        if computes != self.computes:
            self.computes = computes
            self._outputs.close() if computes else self._outputs.open(self.objects.model)

    def _begin(self) -> None:
        """Attach what the script has made by now."""
        objects = TrainingObjects.find()
        measured = measured_value(sys._getframe(1))  # noqa: SLF001
        if measured:
            raise ConfigError(
                f"{measured}, and a replica that joins has not measured what the others have: end the loop "
                f"after a number of steps, and weigh the loss by a count of steps, or {OWN_WAY}"
            )
        self.data.begin()
        buffers = default_buffers(objects.model)
        session = self._attach(
            objects.model, objects.optimizer, state=objects.state, buffers=buffers, step=self.number
        )
        assert isinstance(session, fabric.client.Session)
        session.say_in(_WORDS)
        self.objects, self.session = objects, session
        self._schedule = ScriptState(objects.schedule, [objects.optimizer])
        self._gradients = ScriptGradients(objects.model)
        if self.data.sampler is not None:
            session.draw_from(self.data.sampler)
        else:
            self._inputs = InputWatch(objects.model, draws_data(sys._getframe(1)))  # noqa: SLF001
        averaged = ", its buffers averaged" if buffers == "average" else ""
        sys.stderr.write(
            f"fabric: {self._settings.replica}: adopted {objects.describe()}{averaged} and "
            f"{self.data.describe()}; torch.save writes at one replica only\n"
        )

"""Trainers that write journals, with the real code, so that the audit can judge simulated worlds.

In a real trainer two threads write lines. Here the main thread is slower than elsewhere, so that the control
thread is often ahead of it.
"""

import json
from typing import Any

from sim.main_thread import MainThread
from sim.server import FLIPPED
from sim.trainer import Trainer
from sim.world import World

from fabric.audit.audit import DataOrder, audit, gather
from fabric.audit.journal import RecordedRun, parse_journal
from fabric.client.control.engine import RoundJournal
from fabric.client.process.journal import Journal
from fabric.protocol.messages import member_events as io
from fabric.protocol.messages import network as m

# The main thread begins to apply a step up to this many seconds after the step was committed.
APPLY_S = 0.05


class SimJournal(Journal):
    """Keeps its lines in ``world.journals``."""

    def __init__(self, trainer: Trainer) -> None:
        super().__init__(None, trainer.host, trainer.incarnation)
        self._clockwork = trainer.clockwork
        self._source = {"replica": trainer.host, "incarnation": trainer.incarnation}
        self._lines = trainer.world.journals.setdefault(trainer.host, [])

    def write(self, event: str, **values: Any) -> None:
        now = self._clockwork.now
        self._lines.append({"event": event, "t": now, "mono": now, **self._source, **values})


class JournaledMain(MainThread):
    """Writes the lines that the user's thread writes, in the order of the real session."""

    trainer: "JournaledTrainer"

    def __init__(self, trainer: Trainer) -> None:
        super().__init__(trainer)
        self.undigested = False  # whether the digest of this step's state has been left for later
        self.behind, self.replayed = False, 0

    def _is_alone(self) -> bool:
        """A trainer with a journal takes each digest that is due, because the audit compares them."""
        return False

    def note_state(self, digest: str) -> None:
        if digest:
            generation = self.trainer.core.memory.state.generation
            self.trainer.journal.write("state", generation=generation, step=self.step, digest=digest)

    def _note_left_digest(self) -> None:
        if self.undigested:
            self.undigested = False
            self.note_state(self.digest)

    def _apply(self, order: io.Apply) -> None:
        self._work(self.trainer.clockwork.between(0.0, APPLY_S), lambda: self._scatter(order))

    def _scatter(self, order: io.Apply) -> None:
        self._note_left_digest()
        self._note_commit(order)
        super()._scatter(order)

    def _note_commit(self, order: io.Apply) -> None:
        held, world = order.prepared, self.trainer.world
        if held is None:
            held = world.prepared[order.generation, order.step]
            self.behind, self.replayed = True, self.replayed + 1
        elif self.behind:
            self.behind, replayed, self.replayed = False, self.replayed, 0
            self.trainer.journal.write("joined", epoch=held.epoch, step=held.step, replayed=replayed)
        self.trainer.journal.commit(order, held, world.settings.micro_batches, {})

    def _install(self, order: io.Install) -> None:
        self._note_left_digest()
        super()._install(order)

    def note_answer(self, event: io.Event) -> None:
        """Write the lines that come before the main thread's answer ``event``."""
        if isinstance(event, io.Installed):
            state = self.trainer.transfer.state
            assert state is not None
            self.behind, self.replayed = True, 0
            self.trainer.journal.write(
                "join", generation=state.generation, step=event.step, bytes=1, seconds=0.1
            )
            self.note_state(event.digest)
        elif isinstance(event, io.Ready):
            self.undigested = event.later
            self.note_state(event.digest)
        elif isinstance(event, io.Digested):
            self.undigested = False
            self.note_state(event.digest)
        elif isinstance(event, io.Closing):
            self.note_state(self.digest)


class JournaledTrainer(Trainer):
    """Writes the lines that the control thread writes."""

    main_class = JournaledMain
    main: JournaledMain

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        batches = self.world.settings.micro_batches
        data = {"dataset_size": 1000 * batches, "global_batch_size": batches, "micro_batch_size": 1}
        data |= {"seed": 0, "micro_batches": batches}
        order = DataOrder(data)
        self.journal = SimJournal(self)
        self.round_journal = RoundJournal(self.journal)
        self.round_journal.samples = lambda step, ids: {str(i): order.samples(step, i) for i in ids}
        self.journal.start("job", "layout", data, -1)
        start = self._performers[io.StartExchange]

        def note_and_start(effect: io.StartExchange) -> None:
            own = self.core.rounds.own_contribution()
            if own is not None:
                self.round_journal.note_contribution(own)
            start(effect)

        self._performers[io.StartExchange] = note_and_start

    def feed(self, event: io.Event) -> None:
        if self.alive and not self.paused:
            self.main.note_answer(event)
        super().feed(event)

    def send_peer(self, effect: io.SendPeer) -> None:
        if isinstance(effect.message, m.Contribution):
            self.round_journal.note_contribution(effect.message)
        super().send_peer(effect)

    def _publish(self, effect: io.Publish) -> None:
        self.world.prepared[effect.generation, effect.prepared.step] = effect.prepared
        super()._publish(effect)

    def _link_up(self, effect: io.LinkUp) -> None:
        self.round_journal.note_epoch(effect.record)
        super()._link_up(effect)

    def _note(self, note: io.WriteJournal) -> None:
        ids = {"micro_batches": list(note.micro_batches)} if note.micro_batches else {}
        kind = note.kind.replace(" ", "-")
        self.journal.write(kind, epoch=note.epoch, step=note.step, why=note.why, about=note.about, **ids)
        super()._note(note)

    def finish(self, order: io.Finish) -> None:
        if order.alone:
            self.journal.write("alone", step=order.step, reason=order.alone)
        if self.main.closing:
            self.journal.write("finish", step=self.main.step)
        else:  # the job ended before this process had caught up
            self.journal.write("stop", code=0, reason="the job is complete")
        super().finish(order)

    def stop(self, order: io.Stop) -> None:
        self.journal.write("stop", code=order.code, reason=order.reason)
        super().stop(order)


def broken_promises(world: World) -> list[str]:
    """Return the audit's sentences about the journals of this world.

    The sentences about flipped bits, and about the order of incarnations on hosts whose clocks go back, are
    left out: such worlds flip bits and turn back clocks.
    """
    lines = world.journals
    flipped = any(FLIPPED in x.get("digest", "") for entries in lines.values() for x in entries)
    content = {name: b"\n".join(json.dumps(x).encode() for x in entries) for name, entries in lines.items()}
    run = RecordedRun({name: parse_journal(name, content[name]) for name in content})
    sentences = audit(gather(run), is_over=False)
    if flipped:
        sentences = [x for x in sentences if "disagree on the digest" not in x]
    if world.settings.member.digest_every != 1:
        sentences = [x for x in sentences if "has no digest of its state" not in x]
    return [x for x in sentences if "does not have a higher incarnation" not in x]

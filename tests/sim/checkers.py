"""The invariants of the protocol, checked from outside: what members applied, said and promised, and what the
store was told. Nothing here looks into the cores to decide what is right.
"""

from collections import Counter
from typing import TYPE_CHECKING

from fabric.model import Member, Record
from fabric.protocol import member_io as io
from fabric.protocol import messages as m

if TYPE_CHECKING:
    from sim.server import Gradient
    from sim.trainer import Trainer


class Violation(AssertionError):
    """An invariant was broken; the message says which, by whom, and how."""


class Checks:
    """Fed by the world's parts; raises Violation at once."""

    def __init__(self, micro_batches: int, min_replicas: int) -> None:
        self.micro_batches = micro_batches
        self.min_replicas = min_replicas
        self.records: list[Record] = []
        self.by_epoch: dict[int, Record] = {}
        self.gradients: dict[tuple[int, int], str] = {}  # (generation, step) -> digest applied
        self.states: dict[tuple[int, int], str] = {}
        self.commits: Counter[int] = Counter()  # generation -> distinct steps committed
        self.promises: dict[str, int] = {}  # process -> the newest epoch it reported for
        self.bars: dict[tuple[str, int, int], str] = {}
        self.entered: dict[tuple[str, int], int] = {}  # process -> a round that it said it entered
        self.steps: dict[tuple[str, int], int] = {}
        self.newest = (0, 0)  # (generation, step) committed last

    # --- the store ---------------------------------------------------------------------------------

    def written(self, before: Record | None, after: Record) -> None:
        """Every record follows from the one it replaces."""
        if before is not None and after.epoch != before.epoch + (0 if after.complete else 1):
            raise Violation(f"epoch {after.epoch} was written over {before.epoch}")
        if before is not None and before.complete:
            raise Violation("a record was written after the job was complete")
        if before is not None and after.generation != before.generation:
            begins = after.generation == before.generation + 1 and after.cold == after.epoch
            if not begins or not after.is_forced:
                raise Violation(f"generation {after.generation} does not begin with a cold forced epoch")
        if not after.roster or len(set(after.names)) != len(after.names):
            raise Violation(f"epoch {after.epoch} has the roster {after.names}")
        if not any(not x.fresh for x in after.roster):
            raise Violation(f"nobody in epoch {after.epoch} knows the job's state")
        if before is not None and after.generation == before.generation:
            self._follows(before, after)
        self.records.append(after)
        self.by_epoch[after.epoch] = after

    def paths(self, before: Record | None, after: Record) -> list[str]:
        """Rare paths that this change of the record belongs to."""
        found = []
        if len(after.roster) < self.min_replicas and not after.complete:
            found.append("path: parked")
        if before is not None and after.is_forced and after.generation == before.generation:
            grows = len(after.roster) > len(before.roster)
            found += ["path: admitted while parked"] * (grows and len(before.roster) < self.min_replicas)
        return found

    def _follows(self, before: Record, after: Record) -> None:
        kept = [x for x in after.roster if before.lists(x.replica, x.incarnation)]
        if after.cold != before.cold:
            raise Violation("the epoch of the cold start changed within a generation")
        veterans = {x.replica for x in before.roster if not x.fresh}
        if not any(x.replica in veterans or self._took_part(x) for x in kept):
            raise Violation(f"no member of epoch {before.epoch} that knows the state is in {after.epoch}")
        for x in after.roster:
            if not before.lists(x.replica, x.incarnation) and not x.fresh:
                raise Violation(f"{x.replica} enters in epoch {after.epoch} without being fresh")
        if not after.is_forced:
            gone = [x for x in before.roster if not x.leaving and not after.lists(x.replica, x.incarnation)]
            if gone:
                raise Violation(
                    f"planned epoch {after.epoch} removes {gone[0].replica}, which was not leaving"
                )

    def _took_part(self, member: Member) -> bool:
        """Whether it entered a round, and its state was there then or is now."""
        key = (member.replica, member.incarnation)
        return self.steps.get(key, -1) >= self.entered.get(key, 10**9)

    def announced(self, record: Record) -> None:
        """Rule 1: nothing is announced before it is committed."""
        if record not in self.records:
            raise Violation(f"epoch {record.epoch} was announced before the store had it")

    # --- rounds ------------------------------------------------------------------------------------

    def said_to_peer(self, trainer: "Trainer", message: m.PeerMessage) -> None:
        """Fencing: only members of an epoch speak in it, and nobody against a promise."""
        epoch, who = message.fence.epoch, trainer.name
        record = self.by_epoch.get(epoch)
        if record is None or not record.lists(trainer.host, trainer.incarnation):
            raise Violation(f"{who} speaks in epoch {epoch}, which does not list it")
        if epoch < self.promises.get(who, 0):
            raise Violation(f"{who} speaks in epoch {epoch} after its report for {self.promises[who]}")
        if isinstance(message, m.Bar):
            said = self.bars.setdefault((who, epoch, message.step), message.gradient_digest)
            if said != message.gradient_digest:
                raise Violation(f"{who} held two results of round {(epoch, message.step)}")

    def running(self, trainer: "Trainer", message: m.Running) -> None:
        key = (trainer.host, trainer.incarnation)
        self.entered[key] = message.step
        self.steps[key] = trainer.main.step

    def reported(self, trainer: "Trainer", report: m.Report) -> None:
        self.promises[trainer.name] = max(self.promises.get(trainer.name, 0), report.fence.epoch)

    def gathered(self, trainer: "Trainer", order: io.StartExchange, content: tuple[int, ...]) -> None:
        """What goes into the ring is what the contribution said."""
        if len(content) != order.weight:
            raise Violation(
                f"{trainer.name} contributes {content} to step {order.step} with weight {order.weight}"
            )

    # --- commits -----------------------------------------------------------------------------------

    def published(self, trainer: "Trainer", effect: io.Publish, gradient: "Gradient") -> None:
        if gradient.digest != effect.held.gradient_digest:
            raise Violation(f"{trainer.name} publishes another gradient than it held at step {gradient.step}")

    def applied(self, trainer: "Trainer", order: io.Apply, gradient: "Gradient", generation: int) -> None:
        """Agreement, plus one, exactly once, and one generation at a time."""
        who = trainer.name
        if order.step != trainer.main.step or gradient.step != order.step:
            raise Violation(
                f"{who} applies step {gradient.step} as {order.step} with the state at {trainer.main.step}"
            )
        if order.held is not None:
            if order.held.gradient_digest != gradient.digest:
                raise Violation(f"{who} held {order.held.gradient_digest}, but applies {gradient.digest}")
            if self.records[-1].generation != generation:
                raise Violation(f"{who} commits in generation {generation} after a cold start without it")
        counted = Counter(i for _, ids in gradient.parts for i in ids)
        wrong = [i for i in range(self.micro_batches) if counted[i] != 1]
        if wrong or len(counted) != self.micro_batches:
            raise Violation(f"{who} applies step {order.step} made of {gradient.parts}: wrong for {wrong}")
        parts = tuple((name, tuple(sorted(ids))) for name, ids in gradient.parts)
        if order.held is not None and order.held.contributions != parts:
            raise Violation(f"{who} believes {order.held.contributions}, applies {gradient.parts}")
        known = self.gradients.setdefault((generation, order.step), gradient.digest)
        if known != gradient.digest:
            raise Violation(
                f"{who} applies {gradient.digest} at step {order.step} of generation {generation}, "
                f"others {known}"
            )
        if (generation, order.step + 1) > self.newest:
            self.newest = (generation, order.step + 1)
            self.commits[generation] += 1

    def state(self, trainer: "Trainer", generation: int, step: int, digest: str) -> None:
        """Agreement of the states after every step."""
        self.steps[trainer.host, trainer.incarnation] = step
        if generation == 0:
            return
        known = self.states.setdefault((generation, step), digest)
        if known != digest:
            raise Violation(
                f"{trainer.name} has state {digest} at step {step} of generation {generation}, others {known}"
            )

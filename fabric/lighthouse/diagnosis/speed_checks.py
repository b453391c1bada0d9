"""Asks slow replicas, and one healthy witness, for a micro-benchmark, and says what it has shown.

A refuted slowdown is real too, but its cause is not the device: the data, the host's other work or a link.
Where a link between replicas is slow, its sender echoes its receiver, and a witness the next member of the
ring (`LinkCheck`).
"""

import math
from collections.abc import Container, Mapping, Sequence
from statistics import median

from msgspec import Struct, field
from msgspec.structs import replace

from fabric.health.localise import SLOW, Scope, Slowdown
from fabric.model import SpeedMeasurement, Value, printable, shortened
from fabric.protocol.messages.network import HeartbeatAck, LeaderMessage

# Chooses the witness of a slow link between replicas, and judges the link by two echoes. Pure.


# An echo this many times slower than the witness's confirms a slow link: short transfers vary by less.
SLOWER = 2.0
# A round trip must be longer by this, because the other threads of a process delay its answers.
LATE_S = 0.005
_LONGEST = 120  # characters of a host's words about its interfaces
_FEW = 6  # members among which a witness is looked for


class LinkEcho(Value):
    """One measured link."""

    sender: str
    receiver: str
    measured: SpeedMeasurement

    @property
    def has_answer(self) -> bool:
        times = (self.measured.round_trip_s, self.measured.bytes_per_s)
        return all(math.isfinite(x) and x >= 0 for x in times) and self.measured.round_trip_s > 0

    @property
    def words(self) -> str:
        """The figures, for people."""
        trip = f"a round trip of {self.measured.round_trip_s * 1e3:.3g} ms"
        over = shortened(printable(self.measured.interface), _LONGEST)
        over = over and f" over {over}"
        if not self.measured.bytes_per_s:
            return f"{trip} and no byte of a transfer in time{over}"
        rate, units = self.measured.bytes_per_s, ((1e9, "GB/s"), (1e6, "MB/s"))
        unit, name = next((x for x in units if rate >= x[0]), (1e3, "kB/s"))
        return f"{trip} and {rate / unit:.4g} {name}{over}"


def witness_link(
    suspect: tuple[str, str], members: Sequence[str], slow: Container[str]
) -> tuple[str, str] | None:
    """Return a link of the ring ``members`` to compare with, if possible without an end of ``suspect``."""
    if len(members) < 2:
        return None
    near = [*members[:_FEW]]
    links = list(zip(near, [*near[1:], members[len(near) % len(members)]], strict=True))
    fit = [x for x in links if x[0] not in slow and x[0] != suspect[0]]
    return min(fit, key=lambda link: len({*link} & {*suspect}), default=None)


def judge_link(suspect: LinkEcho, witness: LinkEcho) -> tuple[bool | None, str]:
    """Return whether the suspect link is slow, None without a measurement, and the reason in a sentence."""
    for link in (suspect, witness):
        if not link.has_answer:
            why = "it died, it runs an older version, or nothing gets through"
            return None, f"{link.receiver} has not answered the echo of {link.sender}: {why}"
    own, reference = suspect.measured, witness.measured
    is_late = own.round_trip_s > SLOWER * reference.round_trip_s + LATE_S
    is_narrow = own.bytes_per_s * SLOWER < reference.bytes_per_s
    place = f"the link from {suspect.sender} to {suspect.receiver}"
    figures = f"{place} has {suspect.words}; from {witness.sender} to {witness.receiver}: {witness.words}"
    if is_late or is_narrow:
        return True, f"{figures}: the network from {suspect.sender} to {suspect.receiver} is slow"
    advice = "this link is not slow now, look at the two hosts and at the network's other load"
    return False, f"{figures}: {advice}"


MOST_PER_HOUR = 6
_HOUR_S = 3600.0
# A check without an answer after this time is over: the replica runs an older version, or has died.
ANSWER_S = 60.0
CONFIRMED, REFUTED, NO_ANSWER = "confirmed", "refuted", "no answer"


class SpeedVerdict(Value):
    """The outcome of one check."""

    replica: str
    verdict: str
    why: str
    is_about_link: bool = False  # whether a link between replicas was measured, and no device


class SpeedCheck(Struct):
    """One request under way."""

    number: int
    slowdown: Slowdown
    ranks: Sequence[int]  # the suspected ranks; empty: all of the replica
    witness: str
    until: float
    echoes: Mapping[str, str]  # asked replica -> the member that it echoes; empty: a check of devices
    answers: dict[str, Sequence[SpeedMeasurement]] = field(default_factory=dict)  # by replica

    @property
    def asked(self) -> tuple[str, str]:
        return self.slowdown.replica, self.witness


class SpeedChecks:
    """One check at a time, one for each slowdown, and at most MOST_PER_HOUR in an hour."""

    def __init__(self, number: int = 0) -> None:
        """``number``: less than that of the first check, and more than those of an earlier leader."""
        self._check: SpeedCheck | None = None
        self._begun: list[float] = []  # when the checks of the last hour began
        # Slow replicas that were checked since they became slow, and whether their link was checked.
        self._done: dict[str, bool] = {}
        self._number = number

    def look(
        self,
        slow: Mapping[str, Slowdown],
        ranks: Mapping[str, Sequence[int]],
        members: Sequence[str],
        now: float,
    ) -> list[SpeedVerdict]:
        """Begin or end a check; return the verdict if one has come. ``ranks``: the slow ranks by replica."""
        suspect = self._check.slowdown.replica if self._check is not None else ""
        if suspect in members and suspect not in slow:
            self._check = None  # the figures of a replica that is well again say nothing about its slowdown
        verdicts = self._end(members, now)
        self._done = {name: of_link for name, of_link in self._done.items() if name in slow}
        self._begun = [at for at in self._begun if 0 <= now - at < _HOUR_S]
        waiting = [
            name
            for name, x in slow.items()
            if x.scope is not Scope.JOB and self._done.get(name) != x.is_between_replicas
        ]
        is_few = 2 * len(slow) <= len(members)
        if self._check is None and waiting and is_few and len(self._begun) < MOST_PER_HOUR:
            self._begin(slow, waiting[0], ranks.get(waiting[0], ()), members, now)
        return verdicts

    def _begin(
        self,
        slow: Mapping[str, Slowdown],
        name: str,
        ranks: Sequence[int],
        members: Sequence[str],
        now: float,
    ) -> None:
        slowdown, echoes = slow[name], dict[str, str]()
        witness = next((name for name in members if name not in slow), "")
        if slowdown.is_between_replicas:
            suspect = name, slowdown.units[1].replica
            other = witness_link(suspect, members, slow)
            witness = other[0] if other is not None else ""
            echoes = dict([suspect, other]) if other is not None else {}
        if not witness:
            return
        self._number += 1
        self._check = SpeedCheck(self._number, slowdown, tuple(ranks), witness, now + ANSWER_S, echoes)
        self._begun.append(now)
        self._done[name] = slowdown.is_between_replicas

    def attach(self, replica: str, message: LeaderMessage) -> LeaderMessage:
        """Put the request into the answer to a heartbeat of a replica that is asked."""
        check = self._check
        if check is None or not isinstance(message, HeartbeatAck):
            return message
        if replica not in check.asked or replica in check.answers:
            return message
        return replace(message, measure=check.number, echo=check.echoes.get(replica, ""))

    def take(self, replica: str, measured: Sequence[SpeedMeasurement]) -> None:
        """Take a replica's answer; answers to no request do not count."""
        check = self._check
        if check is None or replica not in check.asked:
            return
        answers = [x for x in measured if x.number == check.number]
        if answers:
            check.answers[replica] = answers

    def _end(self, members: Sequence[str], now: float) -> list[SpeedVerdict]:
        check = self._check
        if check is None:
            return []
        missing = [x for x in check.asked if x not in check.answers]
        gone = [x for x in missing if x not in members]
        if missing and not gone and now < check.until:
            return []
        self._check = None
        if not missing:
            return [_judge(check)]
        why = f"{', '.join(missing)} has not answered the micro-benchmark within {ANSWER_S:g} s"
        if gone:
            why = f"{', '.join(gone)} has left the job without an answer to the micro-benchmark"
        return [SpeedVerdict(check.slowdown.replica, NO_ANSWER, why, bool(check.echoes))]


def _judge(check: SpeedCheck) -> SpeedVerdict:
    name, witness = check.asked
    if check.echoes:
        suspect, other = (LinkEcho(x, check.echoes[x], check.answers[x][0]) for x in check.asked)
        is_slow_link, why = judge_link(suspect, other)
        verdict = NO_ANSWER if is_slow_link is None else CONFIRMED if is_slow_link else REFUTED
        return SpeedVerdict(name, verdict, why, is_about_link=True)
    suspects = [x for x in check.answers[name] if not check.ranks or x.rank in check.ranks]
    sentences, is_slow, is_fast = [], False, False
    # At least half of the slowdown must show, because short measurements vary.
    needed = max(SLOW, 1.0 + (check.slowdown.factor - 1.0) / 2)
    for words, of in (("a matrix product", "product_s"), ("a copy of memory", "copy_s")):
        # An impossible time confirms nothing.
        seconds = [s for x in suspects if 0 < (s := getattr(x, of)) < math.inf]
        references = [s for x in check.answers[witness] if 0 < (s := getattr(x, of)) < math.inf]
        if not seconds or not references:
            continue
        own, reference = max(seconds), median(references)
        is_slow |= own > needed * reference
        is_fast |= reference > needed * own
        times = f"{own * 1e3:.3g} ms there and {reference * 1e3:.3g} ms at {witness}"
        sentences.append(f"{words} takes {times}")
    if not sentences:
        return SpeedVerdict(name, NO_ANSWER, f"the micro-benchmark failed at {name} or {witness}")
    measured = "; ".join(sentences)
    if is_slow and is_fast:
        return SpeedVerdict(name, NO_ANSWER, f"{measured}: the two figures contradict each other")
    if is_slow:
        return SpeedVerdict(name, CONFIRMED, f"{measured}: its device, memory or host is slow")
    return SpeedVerdict(
        name, REFUTED, f"{measured}: its device is not slow, look at its data and at its host"
    )

"""Chooses the witness of a slow link between replicas, and judges the link by two echoes. Pure."""

import math
from collections.abc import Container, Sequence
from dataclasses import dataclass

from fabric.model import SpeedMeasurement

# An echo this many times slower than the witness's confirms a slow link: short transfers vary by less.
SLOWER = 2.0
# A round trip must be longer by this, because the other threads of a process delay its answers.
LATE_S = 0.005
_FEW = 6  # members among which a witness is looked for


@dataclass(frozen=True, slots=True)
class LinkEcho:
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
        if not self.measured.bytes_per_s:
            return f"{trip} and no byte of a transfer in time"
        rate, units = self.measured.bytes_per_s, ((1e9, "GB/s"), (1e6, "MB/s"))
        unit, name = next((x for x in units if rate >= x[0]), (1e3, "kB/s"))
        return f"{trip} and {rate / unit:.4g} {name}"


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
    return (
        False,
        f"{figures}: this link is not slow now, look at the two hosts and at the network's other load",
    )

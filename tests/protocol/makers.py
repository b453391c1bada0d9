"""Short ways to write down records, reports and sessions in tests."""

from fabric.model import Base, Member, Record
from fabric.protocol.messages.network import OpenSession, Report


def record_of(names, epoch=2, forced=None, cold=1, generation=1, base=None, **changes):
    """A record whose roster is ``names`` (a string of words), forced unless told otherwise."""
    roster = tuple(member_of(name, **changes.get(name, {})) for name in names.split())
    return Record(
        store_id="s",
        generation=generation,
        cold=cold,
        epoch=epoch,
        forced=epoch if forced is None else forced,
        nonce=f"n{epoch}",
        roster=roster,
        base=base or Base(0, 0, "start", ("http://base",)),
        reason="a test",
    )


def member_of(name, incarnation=1, **changes):
    return Member(name, incarnation, f"{name}:1", f"http://{name}", **changes)


def report_of(record, step, pend=(0, 0, ""), holds="", have=(), digest="", committed="", generation=1):
    """``pend`` is (epoch, step, names); ``holds`` the gradient digest held, or empty."""
    return Report(
        fence=record.fence,
        state_generation=generation,
        step=step,
        digest=digest,
        round_epoch=pend[0],
        round_step=pend[1],
        round_roster=tuple(pend[2].split()),
        holds=bool(holds),
        gradient_digest=holds,
        have=tuple(have),
        committed_digest=committed,
    )


def session_of(name, incarnation=1, **changes):
    fields = {"generation": 0, "step": 0, "digest": "start", "epoch": 0, "micro_batches": 4, **changes}
    return OpenSession(
        replica=name, incarnation=incarnation, link=f"{name}:1", ckpt=f"http://{name}", **fields
    )

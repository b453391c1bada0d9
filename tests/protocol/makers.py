"""Short ways to write down records, reports and sessions in tests."""

from fabric.model import Base, DataPlan, Member, Record
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


def report_of(
    record,
    step,
    last_round=(0, 0, ""),
    prepared="",
    have=(),
    digest="",
    committed="",
    generation=1,
    micro_batches=4,
):
    """``last_round`` is (epoch, step, names); ``prepared`` the gradient digest held, or empty."""
    return Report(
        fence=record.fence,
        state_generation=generation,
        step=step,
        digest=digest,
        round_epoch=last_round[0],
        round_step=last_round[1],
        round_lacked=tuple(x for x in record.names if x not in last_round[2].split())
        if last_round[0]
        else (),
        prepared=bool(prepared),
        gradient_digest=prepared,
        have=tuple(have),
        plan=DataPlan(micro_batches),
        committed_digest=committed,
    )


def session_of(name, incarnation=1, **changes):
    fields = {"generation": 0, "step": 0, "digest": "start", "epoch": 0, "micro_batches": 4, **changes}
    return OpenSession(
        replica=name, incarnation=incarnation, link=f"{name}:1", ckpt=f"http://{name}", **fields
    )

"""Deliberate bugs in a restart from durable storage; the worlds of ``durable_worlds`` must notice each
bug.
"""

from collections.abc import Callable

import pytest
from msgspec.structs import replace

from fabric.model import DURABLE, Base, SnapshotRef
from fabric.protocol.leader.base_choice import BaseChoice
from fabric.protocol.leader.liveness import Liveness, Peer
from fabric.protocol.member.catch_up import CatchUp
from fabric.protocol.messages import member_events as io

Patch = pytest.MonkeyPatch


def ask_again_for_what_nobody_could_load(patch: Patch) -> None:
    chosen = BaseChoice.choose

    def base(bases: BaseChoice, peers: list[Peer], is_heard: bool = False) -> tuple[Base | None, str]:
        bases.unusable.clear()
        return chosen(bases, peers, is_heard)

    patch.setattr(BaseChoice, "choose", base)


def pass_over_what_one_could_not_load_and_others_did(patch: Patch) -> None:
    patch.setattr(BaseChoice, "note_loaded", lambda bases, generation: None)


def begin_from_scratch_when_nothing_can_be_loaded(patch: Patch) -> None:
    chosen = BaseChoice.choose

    def base(bases: BaseChoice, peers: list[Peer], is_heard: bool = False) -> tuple[Base | None, str]:
        first = peers[0].session
        found, passed = chosen(bases, peers, is_heard)
        return found or Base(0, 0, first.digest, (first.ckpt,)), passed

    patch.setattr(BaseChoice, "choose", base)


def begin_from_the_oldest(patch: Patch) -> None:
    known = Liveness.durable

    def oldest(liveness: Liveness) -> set[SnapshotRef]:
        return set(sorted(known(liveness), key=lambda ref: (ref.generation, ref.step))[:1])

    patch.setattr(Liveness, "durable", oldest)


def each_takes_what_it_can_load(patch: Patch) -> None:
    """Bug: a replica that cannot load the base loads its oldest checkpoint, and reports that it has the
    base.
    """
    failed, installed = CatchUp.on_fetch_failed, CatchUp.on_installed

    def on_failed(member: CatchUp, event: io.FetchFailed) -> None:
        older = member._context.identity.durable[0] if member._context.identity.durable else None
        if not event.unusable or older is None or member.fetch.void:
            failed(member, event)
            return
        member.fetch.doing = ""
        member.want(older, (DURABLE,))

    def on_installed(member: CatchUp, event: io.Installed) -> None:
        installed(member, event)
        base = member._epochs.newest.base if member._epochs.newest is not None else None
        if base is not None and event.digest != base.digest and event.step < base.step:
            member._memory.state = replace(member._memory.state, step=base.step, digest=base.digest)

    patch.setattr(CatchUp, "on_fetch_failed", on_failed)
    patch.setattr(CatchUp, "on_installed", on_installed)


def begin_from_another_jobs_checkpoint(patch: Patch) -> None:
    patch.setattr(BaseChoice, "_foreign", lambda *_: {})


# Bug -> its patch, and the kind of world that shows the bug.
DURABLE_BUGS: dict[str, tuple[Callable[[Patch], None], str]] = {
    mutation.__name__: (mutation, kind)
    for mutation, kind in (
        (ask_again_for_what_nobody_could_load, "damaged"),
        (pass_over_what_one_could_not_load_and_others_did, "one cannot read it"),
        (begin_from_scratch_when_nothing_can_be_loaded, "all damaged"),
        (begin_from_the_oldest, "whole"),
        (begin_from_another_jobs_checkpoint, "beside another job's"),
        (each_takes_what_it_can_load, "one cannot read it"),
    )
}

"""Every place that ends a trainer has an exit code with a reason and a test: 75 for what passes, 1 for what a
person must mend.
"""

import ast
import os
import queue
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch.distributed as dist
from protocol.test_member import Trainer, running
from test_security_page import names_of_tests

from fabric.client.attach import _crash
from fabric.client.control.engine import Engine
from fabric.client.process.rank_group import RankGroup
from fabric.exit_codes import FAILED, FINISHED, RESTART
from fabric.integrations.accelerate.replica import AcceleratedReplica
from fabric.protocol.member.state import CoreContext
from fabric.protocol.messages import member_events as io
from fabric.protocol.messages import network as m

ROOT = Path(__file__).parents[2]
CODES = {"FINISHED", "FAILED", "RESTART", "DEVICE_FAILED", "LAYOUT_REFUSED", "END_BY_SIGNAL", "_INTERRUPTED"}
ENDS = {"SystemExit", "_exit", "exit", "Stop", "stop", "_stop", "depart", "leave"}
# Each place, its codes, and a test that a wrong code there fails. A place without a code hands on another's.
EXITS: dict[str, tuple[str, str]] = {
    "client/attach.py _crash.crash": ("RESTART", "client/test_exits.py::test_a_defect_asks_for_a_restart"),
    "client/attach.py ends_with_a_sentence": (
        "FAILED RESTART",
        "ckpt_server/test_lost_server.py::test_a_trainer_that_finds_its_server_stopped_is_to_be_started_again",
    ),
    "client/control/engine.py Engine._refused": (
        "FAILED",
        "integration/test_mistakes.py::test_a_token_that_does_not_match",
    ),
    "client/control/engine.py Engine.crash": (
        "RESTART",
        "client/test_exits.py::test_a_defect_asks_for_a_restart",
    ),
    "client/loop/loop_orders.py LoopOrders._holds": (
        "RESTART",
        "client/test_calls_of_steps.py::test_a_state_is_loaded_in_the_call_that_has_its_step",
    ),
    "client/loop/shutdown.py Shutdown._on_cell_error": (
        "FAILED",
        "integration/test_exceptions.py::test_an_error_in_a_notebooks_cell_ends_its_replica_alone",
    ),
    "client/loop/shutdown.py Shutdown._on_time_over": (
        "END_BY_SIGNAL",
        "integration/test_notice.py::test_where_storage_is_too_slow_the_checkpoint_before_stays_whole",
    ),
    "client/loop/shutdown.py Shutdown._on_uncaught": (
        "DEVICE_FAILED FAILED RESTART",
        "integration/test_exceptions.py::test_a_failed_collective_is_no_mistake_but_a_wrong_setting_is",
    ),
    "client/process/rank_group.py _lost_at_start": (
        "RESTART",
        "client/test_exits.py::test_a_rank_that_is_lost_at_the_start_asks_for_a_restart",
    ),
    "client/process/rank_group.py layout": (
        "FAILED",
        "client/test_asked_layout.py::test_a_session_has_the_same_layout",
    ),
    "client/process/rank_group.py refuse_layout": (
        "LAYOUT_REFUSED",
        "client/test_asked_layout.py::test_a_script_gets_its_layout_or_refuses_it",
    ),
    "cli/run.py _run_launched.check": (
        "FAILED",
        "cli/test_run.py::test_a_launched_script_that_trains_without_a_session_is_refused",
    ),
    "cli/run.py run_program": (
        "DEVICE_FAILED FAILED _INTERRUPTED",
        "cli/test_run.py::test_a_scripts_exit_code_and_output_are_its_own",
    ),
    "integrations/accelerate/replica.py AcceleratedReplica.close": (
        "FAILED",
        "client/test_exits.py::test_a_loop_that_ends_before_the_job_asks_for_a_person",
    ),
    "integrations/lightning/job.py LightningJob.begin_step": (
        "RESTART",
        "client/test_exits.py::test_a_loop_of_lightning_that_is_ahead_of_the_job_asks_for_a_restart",
    ),
    "integrations/ray.py _LighthouseActor.__init__": (
        "RESTART",
        "integration/test_ray.py::test_a_killed_actor_and_a_killed_raylet_cost_no_step",
    ),
    "integrations/ray.py _ReplicaActor.train": (
        "RESTART",
        "integration/test_ray.py::test_a_killed_actor_and_a_killed_raylet_cost_no_step",
    ),
    "integrations/script_state.py leave_behind": (
        "RESTART",
        "integrations/test_adopted_loops.py::test_a_loop_that_is_ahead_of_the_job_starts_again",
    ),
    "protocol/member/catch_up.py CatchUp.on_fetch_failed": (
        "FAILED RESTART",
        "protocol/test_rank_orders.py::test_storage_that_stays_away_asks_for_a_restart_of_all_ranks",
    ),
    "protocol/member/catch_up.py CatchUp.on_install_failed": (
        "FAILED",
        "client/test_exits.py::test_a_core_asks_for_a_person_where_no_restart_helps",
    ),
    "protocol/member/catch_up.py CatchUp.on_installed": (
        "RESTART",
        "protocol/test_member_generations.py::test_a_member_that_loaded_the_end_of_an_old_generation_starts_again",
    ),
    "protocol/member/ending.py Ending._end_alone_when_due": (
        "RESTART",
        "client/test_exits.py::test_a_newcomer_at_the_end_without_a_lighthouse_asks_for_a_restart",
    ),
    "protocol/member/ending.py Ending._stop_when_left_behind": (
        "FAILED",
        "protocol/test_member_end.py::test_a_newcomer_does_not_end_the_job",
    ),
    "protocol/member/ending.py Ending._stop_when_others_have_finished": (
        "FAILED",
        "protocol/test_member_end.py::test_a_members_loop_stops_at_the_step_at_which_another_member_has_finished",
    ),
    "protocol/member/ending.py Ending.on_complete": (
        "FAILED FINISHED",
        "protocol/test_member_end.py::test_close_ends_the_process_where_the_job_ended_elsewhere",
    ),
    "protocol/member/membership.py Membership._begin_another_life": (
        "RESTART",
        "protocol/test_store_replaced.py::test_an_epoch_that_is_no_higher_starts_the_process_again",
    ),
    "protocol/member/membership.py Membership._start_generation": (
        "RESTART",
        "protocol/test_member.py::test_a_replica_that_has_not_read_storage_does_not_begin_the_job_from_nothing",
    ),
    "protocol/member/rounds.py DataAgreement.fails": (
        "FAILED",
        "protocol/test_data_plans.py::test_the_member_with_other_data_than_the_rest_ends_before_the_commit",
    ),
    "protocol/member/rounds.py Rounds._is_on_its_own_for_too_long": (
        "RESTART",
        "protocol/test_member.py::test_without_a_lighthouse_a_member_goes_on_until_its_autonomy_ends",
    ),
    "protocol/member/rounds.py Rounds._judge_nonfinite": (
        "FAILED",
        "integration/test_nan.py::test_with_on_nan_stop_all_members_stop",
    ),
    "protocol/member/serving.py SnapshotServing.heed": (
        "RESTART",
        "integration/test_notice.py::test_after_sigterm_to_all_no_committed_step_is_lost",
    ),
    "protocol/member/session.py LighthouseSession.on_rejected": (
        "FAILED RESTART",
        "client/test_exits.py::test_a_core_asks_for_a_person_where_no_restart_helps",
    ),
    "protocol/member/state.py CoreContext.leave": (
        "FINISHED RESTART",
        "client/test_exits.py::test_a_drained_replica_has_finished_and_one_with_notice_is_to_be_started_again",
    ),
    "protocol/ranks.py FollowerRank.lost": (
        "RESTART",
        "protocol/test_rank_orders.py::test_a_follower_obeys_until_the_end",
    ),
    "protocol/ranks.py Ranks._share": (
        "FAILED",
        "protocol/test_rank_orders.py::test_ranks_with_different_loops_are_an_error",
    ),
    "protocol/ranks.py Ranks._on_main": (
        "FAILED",
        "protocol/test_rank_digests.py::test_ranks_that_tell_the_digests_of_different_steps_end_the_replica",
    ),
    "protocol/ranks.py Ranks._on_one": (
        "RESTART",
        "protocol/test_rank_orders.py::test_a_lost_rank_ends_the_replica_and_rank_0_last",
    ),
}


def exits_of(path: Path) -> dict[str, set[str]]:
    """Return the codes that each function of a module ends a process with."""
    found: dict[str, set[str]] = {}

    def walk(node: ast.AST, names: tuple[str, ...]) -> None:
        for child in ast.iter_child_nodes(node):
            inner = names
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                inner = (*names, child.name)
            elif isinstance(child, ast.Call) and ast.unparse(child.func).rpartition(".")[2] in ENDS:
                given = [*child.args, *(x.value for x in child.keywords)]
                words = {x.id for value in given for x in ast.walk(value) if isinstance(x, ast.Name)}
                if codes := words & CODES:
                    found.setdefault(".".join(names), set()).update(codes)
            walk(child, inner)

    walk(ast.parse(path.read_text()), ())
    return found


def test_the_table_has_every_place_that_ends_a_trainer_with_its_codes():
    root = ROOT / "fabric"
    places = [*(root / "cli").glob("run.py")]
    places += [x for room in ("client", "protocol", "integrations") for x in (root / room).rglob("*.py")]
    found = {
        f"{path.relative_to(root)} {name}": " ".join(sorted(codes))
        for path in places
        for name, codes in exits_of(path).items()
    }
    assert found == {place: codes for place, (codes, _) in EXITS.items()}


def test_every_test_of_the_table_exists():
    named = {test for _, test in EXITS.values()}
    there = {
        f"{x}::{y}" for x in {t.partition("::")[0] for t in named} for y in names_of_tests(ROOT / "tests" / x)
    }
    assert named <= there


# --- exits that no other test shows -----------------------------------------------------------------------


def test_a_core_asks_for_a_person_where_no_restart_helps():
    for told in (io.InstallFailed("an object did not take over its state"), m.Rejected("other settings")):
        trainer = running()
        trainer.leader(told) if isinstance(told, m.Rejected) else trainer.do(told)
        assert [stop.code for stop in trainer.found(io.Stop)] == [FAILED]


def test_a_drained_replica_has_finished_and_one_with_notice_is_to_be_started_again():
    context = CoreContext(Trainer().core.context.identity, Trainer().core.context.config, 0.0)
    for noticed, code in ((False, FINISHED), (True, RESTART)):
        if noticed:
            context.notice()
        context.leave(None)
        assert context.effects[-1].code == code


def test_a_newcomer_at_the_end_without_a_lighthouse_asks_for_a_restart():
    trainer = Trainer()
    trainer.do(io.Closing())
    trainer.do(io.LeaderLost())
    trainer.now = 100.0 + trainer.core.context.config.autonomy_s
    trainer.do(io.Tick())
    assert [stop.code for stop in trainer.found(io.Stop)] == [RESTART]


def test_a_defect_asks_for_a_restart(monkeypatch, capsys):
    def end(code: int) -> None:
        raise SystemExit(code)

    parts = SimpleNamespace(
        crash_marker=SimpleNamespace(clear=list), journal=SimpleNamespace(write=lambda *_, **__: None)
    )
    orders: queue.SimpleQueue[io.Stop] = queue.SimpleQueue()
    Engine.crash(SimpleNamespace(_parts=parts, orders=orders), ValueError("a defect"))
    assert orders.get_nowait().code == RESTART
    monkeypatch.setattr(os, "_exit", end)
    with pytest.raises(SystemExit) as left:
        _crash("r0", parts.crash_marker)(ValueError("a defect"))
    assert left.value.code == RESTART
    assert capsys.readouterr().err == "fabric: r0: internal error: ValueError: a defect\n"


def test_a_rank_that_is_lost_at_the_start_asks_for_a_restart(monkeypatch, capsys):
    def lost(*_: object, **__: object) -> None:
        raise RuntimeError("Connection closed by peer")

    monkeypatch.setattr(dist, "get_backend", lambda: "gloo")
    monkeypatch.setattr(dist, "all_reduce", lost)
    for way in (lambda group: group.gather({"a": 1}), lambda group: group.ask({"a": 1}, lambda rows: rows)):
        with pytest.raises(SystemExit) as left:
            way(RankGroup(0, 2))
        assert left.value.code == RESTART
        assert "a rank of this replica was lost at the start" in capsys.readouterr().err


def test_a_loop_that_ends_before_the_job_asks_for_a_person():
    said: list[str] = []
    loop = SimpleNamespace(number=3, feed=SimpleNamespace(step=SimpleNamespace(number=9)))
    replica = SimpleNamespace(session=object(), _closed=False, _loop=loop, goes_over=True, _say=said.append)
    with pytest.raises(SystemExit) as left:
        AcceleratedReplica.close(replica)
    assert left.value.code == FAILED and "ended at step 3, and the job is at step 9" in said[0]


def test_a_loop_of_lightning_that_is_ahead_of_the_job_asks_for_a_restart(capsys):
    job = pytest.importorskip("fabric.integrations.lightning.job")
    feed = SimpleNamespace(step=SimpleNamespace(number=3))
    with pytest.raises(SystemExit) as left:
        trainer = SimpleNamespace(global_step=9)
        job.LightningJob.begin_step(SimpleNamespace(_fresh=True, _feed=feed, _trainer=trainer))
    assert left.value.code == RESTART and "at step 3 and the Trainer at step 9" in capsys.readouterr().err
